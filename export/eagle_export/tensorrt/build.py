"""Builds TensorRT engines from a bundle's graphs into a folder of the bundle, which appears only when it is
complete."""

from __future__ import annotations

import contextlib
import re
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_calib.folder import clear_leftovers, written
from eagle_export.base.destination import TIMING, check_space, disk_errors
from eagle_export.base.errors import ExportError
from eagle_export.tensorrt.engine_graphs import EngineGraph, engine_graphs, files_of, write_tables
from eagle_export.tensorrt.network import Kernel, Network, Report, capability_of, read_kernels
from eagle_export.tensorrt.precision import check_capabilities, check_precision, default_capabilities
from eagle_runtime.base.files import file_sha256
from eagle_runtime.bundle.listed_files import read_graph, verify_hashes
from eagle_runtime.bundle.manifest import Manifest, read_manifest
from eagle_runtime.core.target import PREFILL_CHUNK
from eagle_runtime.machine.host import free_memory
from eagle_runtime.opening.backends import DEFAULT_CONTEXT
from eagle_runtime.trt.driver import CudaDriver
from eagle_runtime.trt.engine_file import (
    ENGINES,
    SIDECAR,
    SIDECAR_VERSION,
    EngineSet,
    EngineSpec,
    Profile,
    host_platform,
)
from eagle_runtime.trt.fixed_shapes import HEAD_ROWS, PAST_STEP, TARGET_ROWS, TREE_ROWS, next_step, round_up
from eagle_runtime.trt.library import LIBRARIES, load_library

SUFFIXES = (".engine", ".table")  # of the files of engines
LOGIT_ROWS = 128  # rows with logits in the prefill profile: 128 rows of a vocabulary of 128 k are 65 MB in fp32
# Memory of a build per byte of a graph's weights, with TensorRT for RTX 1.7.1 and two profiles: 3.9 was measured for an
# fp16 graph of 0.26 GB, 3.1 for one of 2 GB, and what the process holds before.
PER_BYTE_OF_WEIGHTS = 4.0
PROCESS_BYTES = 200_000_000
_LINE = re.compile(r"Total (Activation|Weights) Memory: (\d+) bytes")


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """One engine of a build. layers: decoder layers of its graph. kernels: of all profiles, empty where the library
    does not report them. seconds: time of parsing and building."""

    name: str
    spec: EngineSpec
    layers: int
    kernels: tuple[Kernel, ...]
    seconds: float


@dataclass(frozen=True, slots=True)
class Built:
    """The result of a build. folder: where the engines are, inside the bundle."""

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
    """Build the target's engine, and the head's if there is one, into bundle/engines/<library>-<compute capabilities>.

    library: "tensorrt-rtx", which needs no GPU, or "tensorrt", which builds for the GPU present. compute_capabilities:
    the ones to build for, None for `default_capabilities`; only TensorRT for RTX takes any. context: tokens of prompt
    and output; None takes the model's own, at most DEFAULT_CONTEXT. weight_streaming: keep the part of the target's
    weights on the host that does not fit on the GPU. An older folder of the same name is replaced once the build is
    complete. Raises ExportError, BundleError, BackendError; then, as when interrupted, no file of the build is left."""
    assert library in LIBRARIES, library
    manifest = read_manifest(bundle)
    check_precision(bundle, manifest)
    longest = manifest.target.context
    context = min(longest, DEFAULT_CONTEXT) if context is None else context
    if not 2 <= context <= longest:
        raise ExportError(f"context is {context}, but this model serves 2 to {longest} tokens")
    if library == "tensorrt" and compute_capabilities:
        raise ExportError(
            "tensorrt builds for the GPU that is present; leave out the capability, or use the backend tensorrt-rtx"
        )
    trt = load_library(library)
    gpu = CudaDriver().describe() if library == "tensorrt" else None
    asked = compute_capabilities or default_capabilities(manifest)
    capabilities = _checked(trt, asked) if gpu is None else (gpu.compute_capability,)
    check_capabilities(bundle, manifest, capabilities)
    verify_hashes(bundle, manifest)
    for model in manifest.models.values():
        read_graph(bundle, manifest, model.graph.file)  # raises if the graph reads a file that was not hashed
        check_memory(bundle / model.graph.file)
    target = "-".join(f"sm{capability.replace('.', '')}" for capability in capabilities)
    folder = bundle.absolute() / ENGINES / f"{library}-{target}"
    with _parent_of(folder):
        check_space(folder.parent, sum(path.stat().st_size for path in bundle.glob("*/*.data")))
        clear_leftovers(folder.parent)
        with disk_errors(folder), written(folder, lambda older: check_older_engines(older, folder)) as new:
            profiles = profiles_of(manifest, context)
            built = [
                _build_one(
                    trt,
                    bundle,
                    manifest,
                    graph,
                    profiles[graph.name],
                    new,
                    () if gpu else capabilities,
                    weight_streaming and graph.name == "target",
                )
                for graph in engine_graphs(bundle, manifest, profiles["target"][-1].sizes["T"][-1])
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
                keep=specs.get("keep"),
            )
            (new / SIDECAR).write_text(engines.to_json(), encoding="utf-8")
    return Built(folder, engines, tuple(built))


def check_older_engines(older: Path, folder: Path) -> None:
    """Raises ExportError if `older`, which had the name `folder`, holds anything but engines and their sidecar."""
    if foreign := sorted(path.name for path in older.iterdir() if path.name != SIDECAR and path.suffix not in SUFFIXES):
        raise ExportError(f"{folder / foreign[0]} is not a file of the engines; remove it")


def profiles_of(manifest: Manifest, context: int) -> dict[str, tuple[Profile, ...]]:
    """Returns the profiles of every engine: the target's one for trees of up to TREE_ROWS nodes, then one for chunks of
    a prompt and for wider trees; one for the head's calls, of which a block head's have no T; one without sizes for the
    gathering of rows. Profiles are tuned for their largest sizes, since trees are padded."""
    past, nodes = round_up(context, PAST_STEP), manifest.tree_defaults.total_token
    chunk = next_step(TARGET_ROWS, max(TREE_ROWS, nodes, min(PREFILL_CHUNK, context)))

    def profile(name: str, **most: int) -> Profile:
        return Profile(name, {dimension: (1, size, size) for dimension, size in most.items()})

    profiles: dict[str, tuple[Profile, ...]] = {
        "target": (
            profile("tree", T=TREE_ROWS, P=past, R=TREE_ROWS),
            profile("prefill", T=chunk, P=past, R=min(chunk, max(LOGIT_ROWS, nodes))),
        )
    }
    if manifest.head is not None:
        rows = {"T": HEAD_ROWS[-1]} if manifest.head.block is None else {}
        profiles |= {"draft": (profile("draft", P=past, **rows),), "keep": (Profile("keep", {}),)}
    return profiles


def _build_one(
    trt: Any,
    bundle: Path,
    manifest: Manifest,
    graph: EngineGraph,
    profiles: tuple[Profile, ...],
    folder: Path,
    capabilities: tuple[str, ...],
    streamed: bool,
) -> BuiltEngine:
    """Build into `folder`. capabilities: none for the GPU present."""
    started = time.perf_counter()
    path = folder / f"{graph.name}.engine"
    with _progress(path.name) as report:
        report("reading the graph", 0, 1)
        network = Network(trt, graph.source, graph.content)
        engine = network.build(
            profiles,
            capabilities,
            stream_weights=streamed,
            timing=None if capabilities else bundle / ENGINES / TIMING,
            report=report,
        )
        path.write_bytes(engine)
    try:
        kernels = tuple(read_kernels(network.messages.layers))
    except ValueError:  # a release with another format of its log, which says nothing about the engine
        kernels = ()
    of_trees = [kernel for kernel in kernels if kernel.profile == 0]
    weights, scratch = read_memory(network.messages.memory)
    spec = EngineSpec(
        file=path.name,
        sha256=file_sha256(path),
        size=path.stat().st_size,
        graph=files_of(bundle, manifest, graph),
        inputs=graph.inputs,
        outputs=graph.outputs,
        tables=write_tables(graph, folder),
        profiles=profiles,
        kernels=len(of_trees) or None,
        fused_attention=sum(kernel.is_fused_attention for kernel in of_trees) if of_trees else None,
        weights=weights,
        scratch=scratch,
    )
    return BuiltEngine(graph.name, spec, graph.layers, kernels, time.perf_counter() - started)


def _checked(trt: Any, capabilities: Sequence[str]) -> tuple[str, ...]:
    """Returns the capabilities in ascending order, each once. Raises ExportError for an unknown one."""
    for capability in capabilities:
        capability_of(trt, capability)
    return tuple(sorted(set(capabilities), key=lambda text: tuple(map(int, text.split(".")))))


@contextlib.contextmanager
def _parent_of(folder: Path) -> Iterator[None]:
    """Create the parent of `folder` for the block, and remove it afterwards if it is empty."""
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
    """Shows a progress bar for one engine on stderr if that is a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    console = Console(stderr=True)
    with Progress(*columns, console=console, disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task(name)
        yield lambda phase, done, steps: progress.update(
            task, description=f"{name}: {phase}", completed=done, total=max(1, steps)
        )


def read_memory(messages: Iterable[str]) -> tuple[int | None, int | None]:
    """Returns the bytes of GPU memory of an engine from the lines that its build logged: of its weights, and of the
    scratch memory of its largest profile; None where the library does not report them."""
    logged: dict[str, list[int]] = {"Activation": [], "Weights": []}
    for match in filter(None, map(_LINE.search, messages)):
        logged[match[1]].append(int(match[2]))
    return max(logged["Weights"], default=None), max(logged["Activation"], default=None)


def check_memory(graph: Path) -> None:
    """Raises ExportError if the machine has less free memory than building an engine of this ONNX graph takes."""
    weights = sum(path.stat().st_size for path in graph.parent.iterdir() if path.is_file())
    needed, free = int(PER_BYTE_OF_WEIGHTS * weights) + PROCESS_BYTES, free_memory()
    if free is not None and needed > free:
        raise ExportError(
            f"building the engine of {graph} takes about {needed / 1e9:.1f} GB of memory "
            f"({PER_BYTE_OF_WEIGHTS:g} times its {weights / 1e9:.2f} GB of weights), but {free / 1e9:.1f} GB are free; "
            "end other programs, export in int8 or int4, or build on a machine with more memory (tensorrt-rtx needs no "
            "GPU there)"
        )
