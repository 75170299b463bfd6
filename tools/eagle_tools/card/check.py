"""Checks a GPU with a kit, step by step: a step that fails is recorded with its error, and the others run."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from eagle_calib.replay import forced_logits
from eagle_runtime import BackendError, BundleError, EagleError, EagleModel, Result, SamplingParams
from eagle_runtime.machine.nvidia import DeviceInfo
from eagle_tools.card.kit import Kit, Reference, changed_files, read_references
from eagle_tools.ties import is_tie

BACKEND = "tensorrt-rtx"
CONTEXT = 512  # tokens that the kit's engines serve
LARGEST_DIFFERENCE = 0.05  # largest difference by rounding, as a share of the largest logit
NEW_TOKENS = 64  # decoded from each prompt
NODES = (16, 32, 60)  # of the trees that are timed
TEMPERATURES = (0.0, 1.0)
RUNS = 3  # of each timed generation; the median counts


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one step. ok: None if it could not be done here, for the reason in `says`."""

    name: str
    ok: bool | None
    says: str
    seconds: float = 0.0
    figures: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Machine:
    """What the check uses of a machine. gpu: returns its GPU. open: loads a bundle on a backend; build: builds engines
    for a compute capability into a bundle. All raise EagleError."""

    gpu: Callable[[], DeviceInfo]
    open: Callable[[Path, str], EagleModel]
    build: Callable[[Path, str], None]


def check_card(folder: Path, kit: Kit, machine: Machine) -> Iterator[Step]:
    """Yields the steps' outcomes. Without a GPU, those that need one are left out."""
    gpu: DeviceInfo | None = None
    try:
        gpu = machine.gpu()
        yield Step("card", True, str(gpu), figures=dataclasses.asdict(gpu))
    except BackendError as error:
        yield Step("card", None, str(error))
    yield _step("kit", lambda: _files(folder, kit))
    for precision in kit.precisions:
        yield from _on_backend(folder, precision, "cpu", machine, None)
    if gpu is not None:
        known = {capability for served in kit.precisions.values() for capability in served}
        for precision, served in kit.precisions.items():
            if gpu.compute_capability in known and gpu.compute_capability not in served:
                lacks = f"GPUs of compute capability {gpu.compute_capability} have no kernels for {precision}"
                yield Step(f"load {precision} on {BACKEND}", None, lacks)
            else:
                yield from _on_backend(folder, precision, BACKEND, machine, gpu)


def _step(name: str, work: Callable[[], Step]) -> Step:
    """Returns the outcome of `work` with its time, or the error that it raised."""
    started = time.perf_counter()
    try:
        step = dataclasses.replace(work(), name=name)
    except EagleError as error:
        step = Step(name, False, str(error))
    except Exception as error:  # a report of a GPU that does what no one expects is what the check is for
        step = Step(name, False, f"{type(error).__name__}: {error}")
    return dataclasses.replace(step, seconds=round(time.perf_counter() - started, 3))


def _files(folder: Path, kit: Kit) -> Step:
    changed = changed_files(folder, kit)
    if changed:
        return Step("", False, f"{len(changed)} of {len(kit.files)} files are not the kit's, the first is {changed[0]}")
    return Step("", True, f"{len(kit.files)} files have their SHA-256")


def _on_backend(folder: Path, precision: str, backend: str, machine: Machine, gpu: DeviceInfo | None) -> Iterator[Step]:
    """Yields the steps of one bundle. gpu: None on the CPU, which only computes the reference again."""
    bundle, of = folder / precision, f"{precision} on {backend}"
    opened: list[tuple[EagleModel, list[Reference]]] = []

    def load() -> Step:
        references = read_references(folder / f"{precision}.npz")
        before = None if gpu is None else machine.gpu().free
        model, built = _open(bundle, backend, machine, gpu)
        opened.append((model, references))
        says = "engines built and loaded" if built else "loaded"
        figures: dict[str, Any] = {"built_here": built, "gpu_bytes": None}
        if gpu is not None and before is not None and (after := machine.gpu().free) is not None:
            figures["gpu_bytes"] = before - after
            says += f", {(before - after) / 1e6:.0f} MB of GPU memory"
        return Step("", True, says, figures=figures)

    step = _step(f"load {of}", load)
    if gpu is None and not step.ok:
        step = dataclasses.replace(step, ok=None)  # the CPU's library may be missing where a GPU is
    yield step
    if not opened:
        return
    model, references = opened[0]
    yield _step(f"logits {of}", lambda: _logits(model, references))
    if gpu is not None:
        for temperature in TEMPERATURES:
            yield _step(f"identity {of} T={temperature:g}", partial(_identity, model, references, temperature))
        yield _step(f"cycle {of}", lambda: _cycle(model, references))
    if not (closed := _step(f"close {of}", lambda: _close(model))).ok:
        yield closed


def _close(model: EagleModel) -> Step:
    model.close()
    return Step("", True, "closed")


def _open(bundle: Path, backend: str, machine: Machine, gpu: DeviceInfo | None) -> tuple[EagleModel, bool]:
    """Returns the loaded model, and whether its engines were built here, where those of the kit do not serve."""
    try:
        return machine.open(bundle, backend), False
    except (BackendError, BundleError) as error:  # engines of another version of the library, or for other GPUs
        if gpu is None:
            raise
        try:
            machine.build(bundle, gpu.compute_capability)
        except (EagleError, ModuleNotFoundError) as failed:
            raise BackendError(f"{error}; building engines here failed too: {failed}") from None
        return machine.open(bundle, backend), True


def _logits(model: EagleModel, references: Sequence[Reference]) -> Step:
    """Compares the logits of every recorded row, given the same tokens before it."""
    largest, scale, same = 0.0, 0.0, []
    for reference in references:
        logits = forced_logits(model, reference.prompt.tolist(), reference.continuation.tolist())
        difference = np.abs(logits.astype(np.float64) - reference.logits)
        largest = max(largest, float(np.where(np.isnan(difference), np.inf, difference).max()))
        scale = max(scale, float(np.abs(reference.logits).max()))
        same += (logits.argmax(-1) == reference.logits.argmax(-1)).tolist()
    agreement = float(np.mean(same))
    says = f"differ from the reference by up to {largest:.3g} of {scale:.3g}, {agreement:.1%} rank the same token first"
    finite = bool(np.isfinite(largest))
    figures = {"largest_difference": largest if finite else None, "scale": scale, "same_first": agreement}
    return Step("", finite and largest <= LARGEST_DIFFERENCE * scale, says, figures=figures)


def _identity(model: EagleModel, references: Sequence[Reference], temperature: float) -> Step:
    """Compares decoding with drafts and without, from every prompt with a seed of its own."""
    equal = ties = 0
    for seed, reference in enumerate(references):
        prompt = reference.prompt.tolist()
        plain, drafted = (_decode(model, prompt, method, temperature, seed) for method in ("vanilla", "eagle"))
        if plain.token_ids == drafted.token_ids:
            equal += 1
        elif is_tie(model, prompt, plain.token_ids, drafted.token_ids, temperature=temperature, seed=seed):
            ties += 1
    says = f"{equal} of {len(references)} texts have the same tokens with drafts and without"
    says += f", {ties} with tokens whose logits are equal up to rounding" if ties else ""
    figures = {"texts": len(references), "equal": equal, "ties": ties, "temperature": temperature}
    return Step("", equal + ties == len(references), says, figures=figures)


def _decode(model: EagleModel, prompt: list[int], method: str, temperature: float, seed: int, **tree: Any) -> Result:
    if method == "eagle":
        tree = {"tree": "dynamic", **tree}
    return model.generate(
        prompt,
        method=method,
        sampling=SamplingParams(temperature=temperature, seed=seed),
        max_new_tokens=NEW_TOKENS,
        ignore_eos=True,
        **tree,
    )


def _cycle(model: EagleModel, references: Sequence[Reference]) -> Step:
    """Times tokens without drafts and cycles with trees of NODES nodes."""
    prompt = references[0].prompt.tolist()
    _decode(model, prompt, "vanilla", 0.0, 0)  # compiles what is left to compile
    token = _per_pass([_decode(model, prompt, "vanilla", 0.0, 0) for _ in range(RUNS)], "decode_s")
    rows: list[dict[str, Any]] = []
    for nodes in NODES:
        _decode(model, prompt, "eagle", 0.0, 0, total_token=nodes)
        before = _counters(model)
        results = [_decode(model, prompt, "eagle", 0.0, 0, total_token=nodes) for _ in range(RUNS)]
        cycles = sum(result.usage.target_passes for result in results)
        parts = {"verify": "verify_s", "draft": "draft_s", "host": "host_s", "cycle": "decode_s"}
        measured = {name: _per_pass(results, figure) for name, figure in parts.items()}
        counted = _per_cycle(before, _counters(model), cycles)
        rows.append({"nodes": nodes, "tau": results[0].usage.tau, "ms": measured, "counted_per_cycle": counted})
    says = f"{token:.2f} ms per token without drafts"
    says += "".join(f"; {row['nodes']} nodes {row['ms']['cycle']:.2f} ms per cycle" for row in rows)
    return Step("", True, says, figures={"token_ms": token, "trees": rows})


def _per_pass(results: Sequence[Result], figure: str) -> float:
    """Milliseconds of a figure of Usage per forward pass of the target, the median over the results."""
    return 1e3 * float(median(getattr(one.usage, figure) / max(1, one.usage.target_passes) for one in results))


def _counters(model: EagleModel) -> dict[str, int]:
    """Returns what the engines were given up to now; nothing where sessions do not count."""
    counters = model.counters()
    return {} if counters is None else dataclasses.asdict(counters)


def _per_cycle(before: dict[str, int], after: dict[str, int], cycles: int) -> dict[str, float]:
    return {name: (after[name] - before[name]) / max(1, cycles) for name in after}
