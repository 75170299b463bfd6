"""Opens bundles on ONNX Runtime's CUDA provider, or raises an error; it never falls back to the CPU.

CUDA graphs are off: a captured graph replays one set of shapes and addresses, and the past grows with every forward
pass. TF32 is off: it would round the inputs of fp32 products to 10 bits of mantissa.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from eagle_runtime.base.errors import BackendError
from eagle_runtime.bundle.manifest import GraphSpec, HeadSpec, Manifest, TargetSpec, pieces_of
from eagle_runtime.core.session import Session
from eagle_runtime.machine.nvidia import DeviceInfo, first_gpu
from eagle_runtime.ort import library
from eagle_runtime.ort.ahead_session import AheadSession
from eagle_runtime.ort.buffers import SPARE, OrtMemory
from eagle_runtime.ort.device_session import OrtDeviceSession

PROVIDER = "CUDAExecutionProvider"
OPTIONS = {"device_id": "0", "use_tf32": "0", "arena_extend_strategy": "kSameAsRequested"}
PROVIDERS: library.Providers = ((PROVIDER, OPTIONS), ("CPUExecutionProvider", {}))
INSTALL = "pip uninstall onnxruntime, then pip install 'eagle-edge[cuda]'"
# Operators that ONNX Runtime runs on the host on purpose, since in these graphs they only compute shapes.
SHAPES = frozenset(
    {"Add", "Cast", "Concat", "Gather", "Mul", "Reshape", "Shape", "Slice", "Squeeze", "Sub", "Unsqueeze"}
)
CONTEXT_BYTES = 400_000_000  # taken by CUDA and its libraries, roughly


def open_sessions(bundle: Path, manifest: Manifest, context: int, head_scratch: int) -> tuple[Session, ...]:
    """Returns the sessions of a bundle's target and, if it has one, of its head, on the first GPU. context: tokens of
    prompt and output; head_scratch: additional rows of the head's cache. Raises BackendError."""
    check_graphs(bundle, manifest)
    gpu = first_gpu()
    check_provider(library.available_providers())
    check_libraries(library.preload_libraries())
    rows = {"target": context, "draft": context + head_scratch}
    needed = sum(memory_needed(bundle, model, rows[name]) for name, model in manifest.models.items())
    check_memory(gpu, needed + CONTEXT_BYTES)
    # ONNX Runtime warns of missing plugins and duplicates without a cause.
    with library.without_warnings(), contextlib.ExitStack() as freed:
        memory = OrtMemory("cuda", PROVIDERS)
        sessions: list[Session] = []
        for model in manifest.models.values():
            sessions.append(_open(bundle, model.graph, memory))
            freed.callback(sessions[-1].close)
        freed.pop_all()
    return tuple(sessions)


def _open(bundle: Path, graph: GraphSpec, memory: OrtMemory) -> Session:
    path = bundle / graph.file
    session = library.open_graph(path, PROVIDERS, threads=1)  # the host only computes shapes
    check_placed(path, session.get_providers(), library.operators(session))
    if not graph.past:
        return AheadSession(session, path, graph)
    return OrtDeviceSession(session, path, graph, memory)


def check_graphs(bundle: Path, manifest: Manifest) -> None:
    """Raises BackendError for graphs made for CPUs, with int8 products or a head-major past, which the provider would
    run on the host, or not at all; for a kind of head that does not run on it; and for keys of several shapes."""
    if manifest.head is not None and "cuda" in manifest.head.form.not_on:
        raise BackendError(
            f"{bundle} has a {manifest.head.form.title}, which does not run on cuda; build engines for it with "
            "eagle-export engines, or run it on backend cpu"
        )
    for name, model in manifest.models.items():
        if len(model.graph.alike) > 1 or model.graph.states is not None:
            raise BackendError(
                f"{bundle}: the {name} graph's layers have keys of several shapes, or states, which run on backend cpu "
                "alone"
            )
        stored = {weight.dtype for weight in model.graph.weights.values()}
        if "int8" in stored or pieces_of(model.graph) is not None:
            raise BackendError(
                f"{bundle}: the {name} graph's int8 products are those for CPUs; "
                "export the bundle with eagle-export --backend cuda, or run it on backend cpu"
            )


def check_provider(available: Sequence[str]) -> None:
    """Raises BackendError unless onnxruntime was built for CUDA."""
    if PROVIDER not in available:
        raise BackendError(f"this onnxruntime has no {PROVIDER}: {INSTALL}")


def check_libraries(complaints: Iterable[str]) -> None:
    """Raises BackendError if a library that the provider needs does not load. complaints: from preload_libraries."""
    missing = [line for line in complaints if line.startswith("Failed to load")]
    if missing:
        names = ", ".join(line.removeprefix("Failed to load ").split(":")[0] for line in missing)
        raise BackendError(f"CUDA's libraries are missing ({names}): pip install 'eagle-edge[cuda]'")


def memory_needed(bundle: Path, model: TargetSpec | HeadSpec, rows: int) -> int:
    """Returns the bytes of a model's files and of a cache of `rows` rows."""
    weights = sum(path.stat().st_size for path in (bundle / model.graph.file).parent.iterdir())
    return weights + (rows + SPARE) * model.graph.kv_token_bytes


def check_memory(gpu: DeviceInfo, needed: int) -> None:
    """Raises BackendError if the GPU cannot hold `needed` bytes."""
    if needed > gpu.available:
        raise BackendError(
            f"{gpu.name} has {gpu.available / 1e9:.1f} of {gpu.total / 1e9:.1f} GB free, but this bundle takes about "
            f"{needed / 1e9:.1f} GB; {library.MEMORY_ADVICE}"
        )


def check_placed(path: Path, providers: Sequence[str], placed: Iterable[tuple[str, str]]) -> None:
    """Raises BackendError if the host would compute anything but shapes. providers: of the session that was opened;
    placed: provider and operator of every node."""
    if PROVIDER not in providers:
        raise BackendError(f"onnxruntime did not start {PROVIDER} for {path}: look at nvidia-smi, or {INSTALL}")
    if on_host := sorted({operator for provider, operator in placed if provider != PROVIDER} - SHAPES):
        raise BackendError(
            f"{path}: onnxruntime has no CUDA kernels for {', '.join(on_host)}; export the bundle with eagle-export "
            "--backend cuda"
        )
