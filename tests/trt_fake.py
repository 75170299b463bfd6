"""A fake of TensorRT's runtime on a fake GPU. An "engine" names an ONNX file, which ONNX Runtime runs on the GPU's
bytes.

It enforces TensorRT's rules: sizes lie in the profile, addresses are bound, aligned and of live memory, no output
overlaps another tensor, a change of the profile resets all shapes, scratch memory is given, a context outlives its
queued work and its graphs, streamed weights get their budget before a context, and a graph is captured only right after
a forward pass of the same shape. Names and signatures are TensorRT's (tests/test_gpu_names.py).
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

from cuda_fake import FakeDriver
from eagle_export.tensorrt.build import profiles_of
from eagle_export.tensorrt.engine_graphs import EngineGraph, engine_graphs, files_of, write_tables
from eagle_runtime.base.errors import BackendError
from eagle_runtime.base.files import file_sha256
from eagle_runtime.bundle.manifest import Manifest, read_manifest
from eagle_runtime.trt.engine_file import (
    ENGINES,
    SIDECAR,
    SIDECAR_VERSION,
    EngineFolder,
    EngineSet,
    EngineSpec,
    Profile,
)

VERSION = "1.0"
Sizes = tuple[tuple[str, int], ...]
DTYPES = {
    "tensor(float)": np.float32,
    "tensor(float16)": np.float16,
    "tensor(int64)": np.int64,
    "tensor(int32)": np.int32,
}


class Strategy(enum.Enum):
    STATIC = 0
    ON_PROFILE_CHANGE = 1
    USER_MANAGED = 2


class GraphStrategy(enum.Enum):
    DISABLED = 0
    WHOLE_GRAPH_CAPTURE = 1


class Specialization(enum.Enum):
    LAZY = 0
    EAGER = 1
    NONE = 2


class _Logger:
    Severity = enum.IntEnum("Severity", {"INTERNAL_ERROR": 0, "ERROR": 1, "WARNING": 2})

    def __init__(self, min_severity: Any = None) -> None:
        self.messages: list[str] = []

    def log(self, severity: Any, message: str) -> None:
        self.messages.append(message)


class _Recorder:
    def report_error(self, code: Any, description: str) -> bool:
        return False


def fake_library(driver: FakeDriver, library: str) -> Any:
    """Returns a module like tensorrt_rtx or tensorrt. contexts: what became of those created, in order."""
    module = SimpleNamespace(
        __name__=library.replace("-", "_"),
        __version__=VERSION,
        ILogger=_Logger,
        Logger=_Logger,
        IErrorRecorder=_Recorder,
        ExecutionContextAllocationStrategy=Strategy,
        contexts=[],
        scratch=4096,  # bytes that running an engine takes
        streaming_scratch=0,  # more bytes that it takes while weights are streamed
        alignment=256,  # of addresses
        refuse=None,  # name of a call that fails
    )
    module.Runtime = lambda logger: FakeRuntime(driver, module, logger)
    if library == "tensorrt-rtx":
        module.CudaGraphStrategy = GraphStrategy
        module.DynamicShapesKernelSpecializationStrategy = Specialization
    return module


class FakeRuntime:
    def __init__(self, driver: FakeDriver, module: Any, logger: Any) -> None:
        self.driver = driver
        self.module = module
        self.logger = logger
        self.error_recorder: Any = None

    def fail(self, message: str) -> None:
        """Report an error as the library does: to the recorder if there is one."""
        if self.error_recorder is not None:
            self.error_recorder.report_error(1, message)
        else:
            self.logger.log(_Logger.Severity.ERROR, message)

    def deserialize_cuda_engine(self, serialized_engine: Any) -> FakeEngine | None:
        try:
            return FakeEngine(self, json.loads(bytes(memoryview(serialized_engine))))
        except ValueError:
            self.fail("the engine is not an engine")
            return None


class FakeEngine:
    def __init__(self, runtime: FakeRuntime, content: Mapping[str, Any]) -> None:
        self.runtime = runtime
        self.error_recorder = runtime.error_recorder
        self.graph = Graph(content)
        self.num_io_tensors = len(self.graph.tensors)
        self.streamable_weights_size = 1000
        self.record = EngineRecord(1000)

    @property
    def device_memory_size_v2(self) -> int:
        module, streams = self.runtime.module, self.record.weight_streaming_budget_v2 < self.streamable_weights_size
        return int(module.scratch + (module.streaming_scratch if streams else 0))

    @property
    def weight_streaming_budget_v2(self) -> int:
        return self.record.weight_streaming_budget_v2

    @weight_streaming_budget_v2.setter
    def weight_streaming_budget_v2(self, nbytes: int) -> None:
        if self.record.contexts:
            raise RuntimeError("the budget is set while there are execution contexts")
        if not 0 <= nbytes <= self.streamable_weights_size:
            raise RuntimeError(f"the budget cannot be {nbytes}")
        self.record.weight_streaming_budget_v2 = nbytes

    def get_tensor_name(self, index: int) -> str:
        return str(list(self.graph.tensors)[index])

    def create_runtime_config(self) -> FakeConfig:
        return FakeConfig()

    def create_execution_context(self, strategy: Any = Strategy.STATIC) -> FakeContext:
        kind = FakeRtxContext if hasattr(self.runtime.module, "CudaGraphStrategy") else FakeContext
        return kind(self, strategy if isinstance(strategy, FakeConfig) else FakeConfig(strategy))


@dataclass
class EngineRecord:
    """What tests see of an engine, also after it was freed. contexts: number of those that exist."""

    weight_streaming_budget_v2: int
    contexts: int = 0


@dataclass
class ContextRecord:
    """What tests see of an execution context, also after it was freed. passes: sizes of each forward pass queued,
    captured ones included. compiled: sizes that kernels were compiled for here, in no earlier run."""

    engine: EngineRecord
    config: FakeConfig
    passes: list[dict[str, int]] = field(default_factory=list)
    compiled: list[dict[str, int]] = field(default_factory=list)
    calls: list[tuple[Any, ...]] = field(default_factory=list)
    scratch: tuple[int, int] | None = None
    freed: bool = False


class Graph:
    """The graph of an engine, which ONNX Runtime computes on the fake GPU's bytes."""

    def __init__(self, content: Mapping[str, Any]) -> None:
        self.profiles = [Profile(**profile) for profile in content["profiles"]]
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        options.add_session_config_entry("session.model_external_initializers_file_folder_path", content["folder"])
        graph = Path(content["onnx"]).read_bytes()
        self._session = ort.InferenceSession(graph, options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: value for value in self._session.get_inputs()}
        self.outputs = {value.name: value for value in self._session.get_outputs()}
        self.tensors = {**self.inputs, **self.outputs}

    def shape(self, name: str, sizes: Mapping[str, int]) -> list[int]:
        """Returns the shape of an input or output."""
        return [sizes[size] if isinstance(size, str) else size for size in self.tensors[name].shape]

    def nbytes(self, name: str, sizes: Mapping[str, int]) -> int:
        """Returns the bytes of an input or output."""
        return int(np.prod(self.shape(name, sizes))) * np.dtype(DTYPES[self.tensors[name].type]).itemsize

    def compute(self, sizes: Mapping[str, int], addresses: Mapping[str, int]) -> None:
        binding = self._session.io_binding()
        for names, bind in ((self.inputs, binding.bind_input), (self.outputs, binding.bind_output)):
            for name, value in names.items():
                dtype = np.dtype(DTYPES[value.type])
                bind(name, "cpu", 0, dtype.type, self.shape(name, sizes), addresses[name])
        self._session.run_with_iobinding(binding)


class FakeConfig:
    def __init__(self, strategy: Strategy = Strategy.STATIC) -> None:
        self.strategy = strategy
        self.cuda_graph_strategy = GraphStrategy.DISABLED
        self.dynamic_shapes_kernel_specialization_strategy = Specialization.LAZY
        self.cache: Any = None

    def set_execution_context_allocation_strategy(self, strategy: Strategy) -> None:
        self.strategy = strategy

    def create_runtime_cache(self) -> FakeRuntimeCache:
        return FakeRuntimeCache()

    def set_runtime_cache(self, cache: FakeRuntimeCache) -> bool:
        self.cache = cache
        return True


class FakeRuntimeCache:
    """The shapes for which kernels are compiled."""

    def __init__(self) -> None:
        self.shapes: set[Sizes] = set()

    def deserialize(self, blob: bytes) -> bool:
        try:
            shapes = json.loads(bytes(blob))
        except ValueError:
            return False
        self.shapes = {tuple((str(name), int(size)) for name, size in shape) for shape in shapes}
        return True

    def reset(self) -> bool:
        self.shapes.clear()
        return True

    def serialize(self) -> bytes:
        return json.dumps(sorted(self.shapes)).encode()


class FakeContext:
    def __init__(self, engine: FakeEngine, config: FakeConfig) -> None:
        self.engine = engine
        self.error_recorder = engine.error_recorder
        self.record = ContextRecord(engine.record, config)
        self._driver = engine.runtime.driver
        self._profile = 0
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._kernels = config.cache or FakeRuntimeCache()
        engine.runtime.module.contexts.append(self.record)
        engine.record.contexts += 1

    def __del__(self) -> None:
        self.record.freed = True
        self.record.engine.contexts -= 1

    def set_device_memory(self, memory: int, size: int) -> None:
        self._driver.device(memory, size)
        self.record.scratch = (memory, size)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.record.calls.append(("profile", profile_index))
        if not 0 <= profile_index < len(self.engine.graph.profiles):
            self.engine.runtime.fail(f"there is no profile {profile_index}")
            raise RuntimeError("Error in set optimization profile async.")
        self._profile = profile_index
        self._shapes.clear()
        return True

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.record.calls.append(("shape", name, shape))
        graph = self.engine.graph
        if name not in graph.inputs:
            self.engine.runtime.fail(f"{name} is not an input")
            return False
        declared, profile = graph.inputs[name].shape, graph.profiles[self._profile]
        limits = [profile.sizes[size] if isinstance(size, str) else (size, size) for size in declared]
        if len(shape) != len(declared) or not all(a[0] <= b <= a[-1] for a, b in zip(limits, shape, strict=True)):
            self.engine.runtime.fail(f"{name} {shape} is outside of profile {profile}")
            return False
        self._shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.record.calls.append(("address", name, memory))
        if memory % self.engine.runtime.module.alignment or name not in self.engine.graph.tensors:
            self.engine.runtime.fail(f"{name} at {memory} is not aligned")
            return False
        self._addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        runtime, engine, record = self.engine.runtime, self.engine, self.record
        if runtime.module.refuse == "execute_async_v3":
            runtime.fail("the kernel was sick")
            runtime.fail("and so was the next")
            return False
        self._check_scratch()
        missing = [name for name in engine.graph.inputs if name not in self._shapes]
        unbound = [name for name in engine.graph.tensors if name not in self._addresses]
        if missing or unbound:
            runtime.fail(f"missing shapes of {missing}, addresses of {unbound}")
            return False
        sizes: dict[str, int] = {}
        for name, shape in self._shapes.items():
            for wanted, size in zip(engine.graph.inputs[name].shape, shape, strict=True):
                assert not isinstance(wanted, str) or sizes.setdefault(wanted, size) == size, f"{wanted} is two sizes"
        self._check_overlap(sizes)
        key: Sizes = tuple(sorted(sizes.items()))
        specialising = record.config.dynamic_shapes_kernel_specialization_strategy is not Specialization.NONE
        if specialising and key not in self._kernels.shapes:
            assert self._driver.capturing is None, "compiled while captured"
            self._kernels.shapes.add(key)
            record.compiled.append(sizes)
        if self._driver.capturing is not None:
            assert record.passes and record.passes[-1] == sizes, "captured before a forward pass of this shape has run"
        record.passes.append(sizes)
        graph, addresses, driver = engine.graph, dict(self._addresses), self._driver

        def work() -> None:
            if record.freed:
                raise BackendError("the GPU failed: a forward pass runs after its execution context was freed")
            for name, address in addresses.items():
                driver.device(address, graph.nbytes(name, sizes))
            graph.compute(sizes, addresses)

        self._driver.enqueue(work, stream_handle)
        return True

    def _check_scratch(self) -> None:
        managed = self.record.config.strategy is Strategy.USER_MANAGED
        needed = self.engine.device_memory_size_v2 if managed else 0
        if needed and (self.record.scratch is None or self.record.scratch[1] < needed):
            raise BackendError(f"the GPU failed: {needed} bytes of scratch memory are needed")
        if needed and self.record.scratch is not None:
            self._driver.device(*self.record.scratch)

    def _check_overlap(self, sizes: Mapping[str, int]) -> None:
        """Every tensor lies inside one allocation, and no output over another output or an input, which kernels may
        still read."""
        ranges = []
        for name in self.engine.graph.tensors:
            nbytes = self.engine.graph.nbytes(name, sizes)
            self._driver.device(self._addresses[name], nbytes)
            ranges.append((self._addresses[name], self._addresses[name] + nbytes, name))
        for start, end, name in ranges:
            for other_start, other_end, other in ranges:
                both = {name, other} & self.engine.graph.outputs.keys()
                if name != other and both and start < other_end and other_start < end:
                    raise BackendError(f"the GPU failed: {name} and {other} overlap, and a kernel writes one of them")


class FakeRtxContext(FakeContext):
    def is_stream_capturable(self, stream: int) -> bool:
        return self._driver.capturable


def write_fake_engines(
    bundle: Path, library: str, context: int, *, streamed: bool = False, capability: str = "8.9"
) -> EngineFolder:
    """Write what build_engines writes into a bundle, with engines for the fake library."""
    manifest = read_manifest(bundle)
    folder = bundle / ENGINES / f"{library}-sm{capability.replace('.', '')}"
    folder.mkdir(parents=True, exist_ok=True)
    profiles = profiles_of(manifest, context)
    graphs = engine_graphs(bundle, manifest, profiles["target"][-1].sizes["T"][-1])
    specs = {graph.name: _write_engine(folder, bundle, manifest, graph, profiles[graph.name]) for graph in graphs}
    engines = EngineSet(
        schema_version=SIDECAR_VERSION,
        library=library,
        library_version=VERSION,
        compute_capabilities=(capability,),
        gpu=None,
        platform=None,
        context=context,
        weight_streaming=streamed,
        target=specs["target"],
        draft=specs.get("draft"),
        keep=specs.get("keep"),
    )
    (folder / SIDECAR).write_text(engines.to_json(), encoding="utf-8")
    return EngineFolder(folder, engines)


def _write_engine(
    folder: Path, bundle: Path, manifest: Manifest, graph: EngineGraph, profiles: tuple[Profile, ...]
) -> EngineSpec:
    file = folder / f"{graph.name}.engine"
    onnx = folder / f"{graph.name}.onnx"
    onnx.write_bytes(graph.content)
    content = {
        "onnx": str(onnx),
        "folder": str(graph.source.parent),
        "profiles": [dataclasses.asdict(profile) for profile in profiles],
    }
    file.write_text(json.dumps(content), encoding="utf-8")
    return EngineSpec(
        file=file.name,
        sha256=file_sha256(file),
        size=file.stat().st_size,
        graph=files_of(bundle, manifest, graph),
        inputs=graph.inputs,
        outputs=graph.outputs,
        tables=write_tables(graph, folder),
        profiles=profiles,
        kernels=None,
        fused_attention=None,
        weights=sum((bundle / path).stat().st_size for path in files_of(bundle, manifest, graph)),
        scratch=4096,
    )
