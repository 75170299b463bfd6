"""Build TensorRT engines from a bundle's graphs: beside them, with a sidecar, renamed into place when complete."""

from __future__ import annotations

import contextlib
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_calib.folder import clear_leftovers, written
from eagle_export.destination import TIMING, check_space, disk_errors
from eagle_export.errors import ExportError
from eagle_export.tensorrt.kernels import read_kernels
from eagle_export.tensorrt.network import Network, Report, capability_of
from eagle_runtime.bundle.graph_file import read_graph
from eagle_runtime.bundle.manifest import Manifest, read_manifest, verify_hashes
from eagle_runtime.files import file_sha256
from eagle_runtime.loading import DEFAULT_CONTEXT, HEAD_SCRATCH
from eagle_runtime.machine.nvidia import DeviceInfo
from eagle_runtime.session.trt.device import in_place
from eagle_runtime.session.trt.driver import describe
from eagle_runtime.session.trt.engine_file import (
    ENGINES,
    SIDECAR,
    SIDECAR_VERSION,
    EngineSet,
    EngineSpec,
    Profile,
    host_platform,
)
from eagle_runtime.session.trt.library import LIBRARIES, load_library
from eagle_runtime.session.trt.padding import PAST_STEP, bucket, round_up
from eagle_runtime.target import PREFILL_CHUNK

CAPABILITIES = ("8.6", "8.9", "12.0")  # GeForce RTX 30, 40 and 50; several cost little room
LOGIT_ROWS = 128  # rows with logits in a pass larger than a tree is by default: 128 x 128k numbers are 65 MB


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """One engine as built. layers: decoder layers of its graph. seconds: of parsing and building."""

    name: str
    spec: EngineSpec
    layers: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Built:
    """What a build made. folder: inside the bundle."""

    folder: Path
    engines: EngineSet
    built: tuple[BuiltEngine, ...]


def build_engines(
    bundle: Path,
    library: str,
    compute_capabilities: Sequence[str] | None = None,
    *,
    context: int | None = None,
    weight_streaming: bool = False,
) -> Built:
    """Build the target's engine, and the head's if there is one, into bundle/engines/<library>-<target>.

    library: "tensorrt-rtx", which needs no GPU, or "tensorrt", which builds for the GPU present. compute_capabilities:
    to build for, None for CAPABILITIES; only TensorRT for RTX can choose. context: tokens of prompt and output that
    the engines serve; None takes the model's own, at most 4096. weight_streaming: let the target's weights stay on
    the host as far as the GPU has no room for them. An older folder of the same target is replaced in the end. Raises
    ExportError, BundleError, BackendError, and then, as when interrupted, leaves no files."""
    assert library in LIBRARIES, library
    manifest = read_manifest(bundle)
    check_precision(bundle, manifest)
    longest = manifest.target.context
    context = min(longest, DEFAULT_CONTEXT) if context is None else context
    if not 2 <= context <= longest:
        raise ExportError(f"context is {context}, but this model serves 2 to {longest} tokens")
    if library == "tensorrt" and compute_capabilities:
        raise ExportError(
            "tensorrt builds for the GPU that is present; leave out --compute-capability, or use --backend tensorrt-rtx"
        )
    trt = load_library(library)
    gpu = describe() if library == "tensorrt" else None
    capabilities = _checked(trt, compute_capabilities or CAPABILITIES) if gpu is None else (gpu.compute_capability,)
    verify_hashes(bundle, manifest)
    for model in manifest.models.values():
        read_graph(bundle, manifest, model.graph)  # it may name no file that was not hashed
    target = "-".join(f"sm{capability.replace('.', '')}" for capability in capabilities)
    folder = bundle.absolute() / ENGINES / f"{library}-{target}"
    with _parent_of(folder):
        check_space(folder.parent, sum(path.stat().st_size for path in bundle.glob("*/*.data")))
        clear_leftovers(folder.parent)
        with disk_errors(folder), written(folder, lambda older: check_older_engines(older, folder)) as new:
            streamed = {"target": weight_streaming, "draft": False}
            built = [
                _build_one(
                    trt, bundle, manifest, name, new / f"{name}.engine", capabilities, context, streamed[name], gpu
                )
                for name in manifest.models
            ]
            specs = {engine.name: engine.spec for engine in built}
            engines = EngineSet(
                schema_version=SIDECAR_VERSION,
                library=library,
                library_version=str(trt.__version__),
                compute_capabilities=capabilities,
                gpu=None if gpu is None else gpu.name,
                platform=None if gpu is None else host_platform(),
                context=context,
                weight_streaming=weight_streaming,
                target=specs["target"],
                draft=specs.get("draft"),
            )
            (new / SIDECAR).write_text(engines.to_json(), encoding="utf-8")
    return Built(folder, engines, tuple(built))


def check_precision(bundle: Path, manifest: Manifest) -> None:
    """Raises ExportError unless both graphs compute in halves: TensorRT builds others in fp32 without a word, or, as
    it has no kernel for their attention, not at all."""
    for model in manifest.models.values():
        dtype = model.graph.inputs["tree_mask"].dtype
        if dtype != "float16":
            raise ExportError(
                f"{bundle} computes in {dtype}, but engines need a bundle in halves; export it with "
                "-p fp16 --backend tensorrt-rtx (or int8, int8-weight, int4)"
            )


def check_older_engines(older: Path, folder: Path) -> None:
    """Raises ExportError if `older`, which had the name `folder`, holds anything but engines and their sidecar."""
    if foreign := sorted(path.name for path in older.iterdir() if path.name != SIDECAR and path.suffix != ".engine"):
        raise ExportError(f"{folder / foreign[0]} is none of the engines' own files; take it away")


def profiles_of(manifest: Manifest, context: int) -> dict[str, tuple[Profile, ...]]:
    """Name as in Manifest.models -> the sizes that its engine is built for: first trees, then prompts in chunks.

    The most is what it is tuned for: a tree is padded rather than tuned for half its size. Both begin at one row, and
    neither is for one row alone: kernels of their own for that would double an engine's weights."""
    defaults = manifest.tree_defaults
    chunk = bucket(min(PREFILL_CHUNK, context))
    nodes = bucket(defaults.total_token)
    level = bucket(max(defaults.draft_top_k, defaults.depth + 2))  # a grown level, or an accepted path with its root
    past, scratch = round_up(context, PAST_STEP), round_up(HEAD_SCRATCH + PAST_STEP - 1, PAST_STEP)
    head_past = round_up(context + HEAD_SCRATCH, PAST_STEP)

    def profile(name: str, rows: int, most_past: int, covered: int, logit_rows: int) -> Profile:
        columns = rows + covered
        logits = (1, logit_rows, logit_rows)
        return Profile(name, (1, rows, rows), (0, most_past, most_past), (1, columns, columns), logits)

    def both(tree: int, most_past: int, covered: int) -> tuple[Profile, Profile]:
        wide = max(chunk, tree)
        return (
            profile("tree", tree, most_past, covered, tree),
            profile("prefill", wide, most_past, covered, min(wide, max(LOGIT_ROWS, tree))),
        )

    found = {"target": both(nodes, past, PAST_STEP), "draft": both(level, head_past, scratch)}
    return {name: found[name] for name in manifest.models}


def _build_one(
    trt: Any,
    bundle: Path,
    manifest: Manifest,
    name: str,
    path: Path,
    capabilities: tuple[str, ...],
    context: int,
    streamed: bool,
    gpu: DeviceInfo | None,
) -> BuiltEngine:
    started = time.perf_counter()
    part = manifest.models[name]
    profiles = profiles_of(manifest, context)[name]
    with _progress(path.name) as report:
        report("reading the graph", 0, 1)
        network = Network(trt, bundle / part.graph.file)
        engine = network.build(
            profiles,
            () if gpu else capabilities,
            stream_weights=streamed,
            timing=bundle / ENGINES / TIMING if gpu else None,
            report=report,
        )
        path.write_bytes(engine)
    try:
        kernels = [kernel for kernel in read_kernels(network.messages.layers) if kernel.profile == 0]
    except ValueError:  # a library that words its log differently; the engine is as good
        kernels = []
    fused = sum(kernel.is_fused_attention for kernel in kernels)
    beside = Path(part.graph.file).parent
    spec = EngineSpec(
        file=path.name,
        sha256=file_sha256(path),
        size=path.stat().st_size,
        graph={file: digest for file, digest in manifest.files.items() if Path(file).parent == beside},
        profiles=profiles,
        in_place=in_place(part.graph.kv_row_bytes),
        kernels=len(kernels) or None,
        fused_attention=fused if kernels else None,
    )
    return BuiltEngine(name, spec, part.num_layers, time.perf_counter() - started)


def _checked(trt: Any, capabilities: Sequence[str]) -> tuple[str, ...]:
    """In order, without doubles; raises ExportError for one that the library does not know."""
    for capability in capabilities:
        capability_of(trt, capability)
    return tuple(sorted(set(capabilities), key=lambda text: tuple(map(int, text.split(".")))))


@contextlib.contextmanager
def _parent_of(folder: Path) -> Iterator[None]:
    """The folder of all engines, gone again if this was to be the first and did not come about."""
    parent = folder.parent
    try:
        parent.mkdir(exist_ok=True)
    except OSError as error:
        raise ExportError(f"{parent} cannot be created ({error.strerror})") from None
    try:
        yield
    finally:
        with contextlib.suppress(OSError):
            parent.rmdir()  # which only an empty folder allows


@contextlib.contextmanager
def _progress(name: str) -> Iterator[Report]:
    """A bar on stderr for one engine; nothing where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task(name)
        yield lambda phase, done, steps: progress.update(
            task, description=f"{name}: {phase}", completed=done, total=max(1, steps)
        )
