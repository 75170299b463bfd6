"""Chooses the engine that runs a bundle, by name or as the first of BACKENDS that works, and opens its sessions."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Generic, TypeVar

from eagle_runtime.base.backend_names import AUTO, BACKENDS, NATIVE, on_cpu
from eagle_runtime.base.errors import BackendError, BundleError, EagleError
from eagle_runtime.bundle.graph import OLDER_OPERATORS, OPERATORS
from eagle_runtime.bundle.listed_files import read_graph
from eagle_runtime.bundle.manifest import GraphSpec, Manifest
from eagle_runtime.core.session import Session
from eagle_runtime.machine.host import total_memory

PassedOver = tuple[tuple[str, str], ...]
T = TypeVar("T")
DEFAULT_CONTEXT = 4096  # tokens; a GPU reserves its caches, which take tens of gigabytes for 128k


@dataclass(frozen=True, slots=True)
class Chosen(Generic[T]):
    """The backend that runs a bundle. opened: what `open_on` returned. passed_over: (backend, reason) of every one that
    was tried or ruled out before it."""

    backend: str
    opened: T
    passed_over: PassedOver


def check_name(backend: str) -> None:
    """Raises BackendError for a name that `choose` does not know."""
    if backend not in (AUTO, *BACKENDS):
        raise BackendError(f"backend {backend!r} is unknown; choose {AUTO} or one of {', '.join(BACKENDS)}")


def choose(backend: str, bundle: Path, manifest: Manifest, open_on: Callable[[str], T]) -> Chosen[T]:
    """Open a bundle on a backend, or with "auto" on the first of BACKENDS that works.

    open_on: opens the bundle on the backend of a name, or raises an EagleError. With "auto" it is not called for
    backends that the bundle was not made for. Raises the EagleError of open_on, or a BackendError with every reason."""
    if backend != AUTO:
        return Chosen(backend, open_on(backend), ())
    passed_over: PassedOver = ()
    tried = False
    for name in BACKENDS:
        reason = unfit(name, bundle, manifest)
        if reason is None:
            try:
                return Chosen(name, open_on(name), passed_over)
            except EagleError as error:
                if name == BACKENDS[-1] and not tried:
                    raise  # this was the only one tried
                reason = str(error)
                tried |= name != NATIVE  # the same files run on cpu, whose error says what is wrong with them
        passed_over += ((name, reason),)
    raise BackendError(f"no backend runs {bundle}: {reasons_text(passed_over)}")


def unfit(backend: str, bundle: Path, manifest: Manifest) -> str | None:
    """Returns why a bundle was not made for a backend, as its files show; None if it may have been. For native also why
    its operators cannot be used."""
    if backend.startswith("tensorrt"):
        built = [folder.parent.name for folder in (bundle / "engines").glob("*/engine.json")]
        rtx = [name for name in built if name.startswith("tensorrt-rtx-")]
        of_library = rtx if backend == "tensorrt-rtx" else [name for name in built if name not in rtx]
        return None if of_library else "the bundle has no engines for it"
    if backend == NATIVE:
        if manifest.target.graph.native is None:
            return "the bundle has no graph for it"
        from eagle_runtime.ort.operators import native_operators

        return native_operators().reason or None
    if backend == "cuda" and manifest.target.graph.inputs["tree_mask"].dtype != "float16":
        return "the bundle computes in fp32, as those for CPUs do"
    if manifest.head is not None and backend in manifest.head.form.not_on:
        return f"the bundle has a {manifest.head.form.title}, which does not run on it"
    return None


def notice(chosen: Chosen[T], bundle: Path, manifest: Manifest) -> str | None:
    """Returns a warning for users who left the choice to "auto": that engine files of the bundle are run as they are,
    or that its portable graph runs although it has a native one. Otherwise None."""
    if chosen.backend == "cpu" and manifest.target.graph.native is not None:
        reason = dict(chosen.passed_over)[NATIVE]
        return f"the portable graph runs, which takes twice as long as the native one or more: {reason}"
    if not chosen.backend.startswith("tensorrt"):
        return None
    return (
        f"{chosen.backend} runs the engine files in {bundle / 'engines'}; an engine is code, so run none whose maker "
        "you do not trust (backends cuda and cpu run no engine files)"
    )


def open_sessions(
    backend: str, bundle: Path, manifest: Manifest, context: int, head_scratch: int, threads: int | None
) -> tuple[Session, ...]:
    """Returns the sessions of a bundle's target and, if it has one, of its head. context: tokens of prompt and output;
    head_scratch: additional rows of the head's cache; threads: of one forward pass on the CPU. Raises BackendError,
    BundleError."""
    if backend.startswith("tensorrt"):
        from eagle_runtime.trt import session as tensorrt

        return tensorrt.open_sessions(bundle, manifest, backend, context)
    graphs = [model.graph for model in manifest.models.values()]
    if backend == "cuda":
        for graph in graphs:
            read_graph(bundle, manifest, graph.file)
        from eagle_runtime.ort import cuda

        return cuda.open_sessions(bundle, manifest, context, head_scratch)
    check_host_memory(manifest, backend, context, head_scratch)
    return tuple(_on_host(backend, bundle, manifest, graph, threads) for graph in graphs)


def _on_host(backend: str, bundle: Path, manifest: Manifest, graph: GraphSpec, threads: int | None) -> Session:
    """Opens a graph on the CPU; its native form, if it has one, with backend native."""
    from eagle_runtime.ort.ahead_session import AheadSession
    from eagle_runtime.ort.operators import native_operators
    from eagle_runtime.ort.session import OrtSession, open_on_cpu

    operators, form = None, graph_of(graph, backend)
    if backend == NATIVE and graph.native is not None:
        operators = native_operators()
        if graph.native.operators not in (OPERATORS, *OLDER_OPERATORS):
            raise BundleError(
                f"{bundle} is made for native operators of version {graph.native.operators}, and this runtime has "
                f"{OPERATORS}; export the bundle again"
            )
        if operators.reason:
            raise BackendError(f"{NATIVE} cannot run: {operators.reason}")
    content, path = read_graph(bundle, manifest, form.file), bundle / form.file
    if form.past:
        return OrtSession(path, form, threads, content, operators)
    library = None if operators is None else operators.library
    return AheadSession(open_on_cpu(path, form, threads, content, library), path, form)


def graph_of(graph: GraphSpec, backend: str) -> GraphSpec:
    """The description of the graph that a backend runs: the native form, if there is one, with backend native."""
    return graph.native_form() if backend == NATIVE else graph


def files_read(backend: str, manifest: Manifest) -> set[str]:
    """Returns the listed files of a bundle that a backend reads. TensorRT reads engines instead of the graphs and their
    weights; their SHA-256 is in the sidecar, and always compared."""
    folders = {PurePosixPath(model.graph.file).parent for model in manifest.models.values()}
    with_graphs = not backend.startswith("tensorrt")
    return {name for name in manifest.files if with_graphs or PurePosixPath(name).parent not in folders}


def _token_bytes(manifest: Manifest, backend: str, *names: str) -> int:
    """Bytes of the keys and values of one token. names: of models; none for all."""
    models = [model for name, model in manifest.models.items() if not names or name in names]
    return sum(graph_of(model.graph, backend).kv_token_bytes for model in models)


def default_context(manifest: Manifest, backend: str, free: int | None) -> int:
    """Returns the context where none is asked for: the model's own, but on a GPU at most DEFAULT_CONTEXT, and on a CPU,
    whose caches grow as they fill, at most the power of two whose keys and values take a quarter of the free memory, or
    DEFAULT_CONTEXT if that is more. free: bytes; None if unknown."""
    longest, rows = manifest.target.context, (free or 0) // 4 // _token_bytes(manifest, backend)
    if not on_cpu(backend) or rows <= DEFAULT_CONTEXT:
        return min(longest, DEFAULT_CONTEXT)
    return longest if rows >= longest else 1 << rows.bit_length() - 1


def check_host_memory(manifest: Manifest, backend: str, context: int, head_scratch: int) -> None:
    """Raises BackendError for caches that exceed this machine's memory and swap together, before they are allocated."""
    needed = context * _token_bytes(manifest, backend) + head_scratch * _token_bytes(manifest, backend, "draft")
    total = total_memory()
    if total is not None and needed > total:
        raise BackendError(
            f"a context of {context} tokens takes {needed / 1e9:.1f} GB for keys and values, but this machine has "
            f"{total / 1e9:.1f} GB of memory and swap; load with a smaller context"
        )


def facts_of_times(backend: str, sessions: Sequence[Session]) -> list[str]:
    """Returns what the times of forward passes depend on, other than the bundle: the library, the GPU, the engines.
    Times of one GPU say nothing about another one in the same machine."""
    facts = [library_version(backend)]
    if backend == "cuda":
        from eagle_runtime.machine.nvidia import first_gpu

        with contextlib.suppress(BackendError):  # the session runs, whatever the driver says
            gpu = first_gpu()
            facts += [gpu.name, gpu.compute_capability]
    return facts + [fact for one in sessions for fact in one.facts]


def library_version(backend: str) -> str:
    """Returns the name of a backend's library, with its version if it has been imported."""
    name = "onnxruntime" if on_cpu(backend) or backend == "cuda" else backend.replace("-", "_")
    version = f"{name} {getattr(sys.modules.get(name), '__version__', '')}"
    return f"{version}, operators {OPERATORS}" if backend == NATIVE else version


def reasons_text(passed_over: PassedOver) -> str:
    """Returns the backends that do not run a bundle, with the reasons, in one line."""
    return "; ".join(f"{name}: {reason}" for name, reason in passed_over)
