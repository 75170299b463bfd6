"""A fake of TensorRT's runtime on a fake GPU. An "engine" names an ONNX file, which ONNX Runtime runs on the GPU's
bytes.

It enforces TensorRT's rules: sizes lie in the profile, addresses are aligned, a change of the profile resets all
shapes, scratch memory is given, and a graph is captured only right after a forward pass of the same shape. Names and
signatures are TensorRT's (tests/test_gpu_names.py).
"""

from __future__ import annotations

import dataclasses
import enum
import json
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import onnxruntime as ort

from cuda_fake import FakeDriver
from eagle_export.tensorrt.build import profiles_of
from eagle_runtime.bundle.manifest import Manifest, read_manifest
from eagle_runtime.files import file_sha256
from eagle_runtime.session.trt.device import in_place
from eagle_runtime.session.trt.engine_file import (
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
DTYPES = {"tensor(float)": np.float32, "tensor(float16)": np.float16, "tensor(int64)": np.int64}


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

    def log(self, severity: Any, message: str) -> None: ...


class _Recorder:
    def report_error(self, code: Any, description: str) -> bool:
        return False


def fake_library(driver: FakeDriver, library: str) -> Any:
    """Returns a module like tensorrt_rtx or tensorrt. contexts: those created, in order."""
    module = SimpleNamespace(
        __name__=library.replace("-", "_"),
        __version__=VERSION,
        ILogger=_Logger,
        IErrorRecorder=_Recorder,
        ExecutionContextAllocationStrategy=Strategy,
        contexts=[],
        scratch=4096,  # bytes that running an engine takes
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
            self.fail("the engine is no engine")
            return None


class FakeEngine:
    def __init__(self, runtime: FakeRuntime, content: Mapping[str, Any]) -> None:
        self.runtime = runtime
        self.profiles = [Profile(**profile) for profile in content["profiles"]]
        options = ort.SessionOptions()
        options.intra_op_num_threads = 1
        self.session = ort.InferenceSession(content["onnx"], options, providers=["CPUExecutionProvider"])
        self.inputs = {value.name: value for value in self.session.get_inputs()}
        self.outputs = {value.name: value for value in self.session.get_outputs()}
        self._names = [*self.inputs, *self.outputs]
        self.num_io_tensors = len(self._names)
        self.device_memory_size_v2 = runtime.module.scratch
        self.streamable_weights_size = 1000
        self.weight_streaming_budget_v2 = 1000

    def get_tensor_name(self, index: int) -> str:
        return str(self._names[index])

    def create_runtime_config(self) -> FakeConfig:
        return FakeConfig()

    def create_execution_context(self, strategy: Any = Strategy.STATIC) -> FakeContext:
        context = FakeContext(self, strategy if isinstance(strategy, FakeConfig) else FakeConfig(strategy))
        self.runtime.module.contexts.append(context)
        return context


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
        self.config = config
        self.driver = engine.runtime.driver
        self.profile = 0
        self.shapes: dict[str, tuple[int, ...]] = {}
        self.addresses: dict[str, int] = {}
        self.scratch: tuple[int, int] | None = None
        self.passes: list[dict[str, int]] = []  # sizes of each forward pass queued, captured ones included
        self.compiled: list[dict[str, int]] = []  # sizes that kernels were compiled for here, in no earlier run
        self._kernels = config.cache or FakeRuntimeCache()
        self.calls: list[tuple[Any, ...]] = []

    def set_device_memory(self, memory: int, size: int) -> None:
        self.driver.device(memory, size)
        self.scratch = (memory, size)

    def set_optimization_profile_async(self, profile_index: int, stream_handle: int) -> bool:
        self.calls.append(("profile", profile_index))
        self.profile = profile_index
        self.shapes.clear()
        return 0 <= profile_index < len(self.engine.profiles)

    def set_input_shape(self, name: str, shape: tuple[int, ...]) -> bool:
        self.calls.append(("shape", name, shape))
        declared = self.engine.inputs[name].shape
        profile = self.engine.profiles[self.profile]
        limits = profile.sizes
        for wanted, size in zip(declared, shape, strict=True):
            fits = limits[wanted][0] <= size <= limits[wanted][2] if isinstance(wanted, str) else size == wanted
            if not fits:
                self.engine.runtime.fail(f"{name} {shape} is outside of profile {profile}")
                return False
        self.shapes[name] = shape
        return True

    def set_tensor_address(self, name: str, memory: int) -> bool:
        self.calls.append(("address", name, memory))
        if memory % self.engine.runtime.module.alignment or name not in {*self.engine.inputs, *self.engine.outputs}:
            self.engine.runtime.fail(f"{name} at {memory} is not aligned")
            return False
        self.addresses[name] = memory
        return True

    def execute_async_v3(self, stream_handle: int) -> bool:
        runtime, engine = self.engine.runtime, self.engine
        if runtime.module.refuse == "execute_async_v3":
            runtime.fail("the kernel was sick")
            runtime.fail("and so was the next")
            return False
        needed = engine.device_memory_size_v2 if self.config.strategy is Strategy.USER_MANAGED else 0
        assert needed == 0 or (self.scratch is not None and self.scratch[1] >= needed), "no scratch memory"
        missing = [name for name in engine.inputs if name not in self.shapes]
        unbound = [name for name in (*engine.inputs, *engine.outputs) if name not in self.addresses]
        if missing or unbound:
            runtime.fail(f"missing shapes of {missing}, addresses of {unbound}")
            return False
        sizes: dict[str, int] = {}
        for name, shape in self.shapes.items():
            for wanted, size in zip(engine.inputs[name].shape, shape, strict=True):
                assert not isinstance(wanted, str) or sizes.setdefault(wanted, size) == size, f"{wanted} is two sizes"
        assert sizes["T"] <= sizes["L"] <= sizes["P"] + sizes["T"]
        key: Sizes = tuple(sorted(sizes.items()))
        specialising = self.config.dynamic_shapes_kernel_specialization_strategy is not Specialization.NONE
        if specialising and key not in self._kernels.shapes:
            assert self.driver.capturing is None, "compiled while captured"
            self._kernels.shapes.add(key)
            self.compiled.append(sizes)
        if self.driver.capturing is not None:
            assert self.passes and self.passes[-1] == sizes, "captured before a forward pass of this shape has run"
        self.passes.append(sizes)
        addresses = dict(self.addresses)
        self.driver.enqueue(lambda: self._compute(sizes, addresses), stream_handle)
        return True

    def _compute(self, sizes: Mapping[str, int], addresses: Mapping[str, int]) -> None:
        binding = self.engine.session.io_binding()
        for values, bind in ((self.engine.inputs, binding.bind_input), (self.engine.outputs, binding.bind_output)):
            for name, value in values.items():
                shape = [sizes[size] if isinstance(size, str) else size for size in value.shape]
                dtype = np.dtype(DTYPES[value.type])
                self.driver.device(addresses[name], int(np.prod(shape)) * dtype.itemsize)
                bind(name, "cpu", 0, dtype.type, shape, addresses[name])
        self.engine.session.run_with_iobinding(binding)


def write_fake_engines(
    bundle: Path, library: str, context: int, *, streamed: bool = False, capability: str = "8.9"
) -> EngineFolder:
    """Write what build_engines writes into a bundle, with engines for the fake library."""
    manifest = read_manifest(bundle)
    folder = bundle / ENGINES / f"{library}-sm{capability.replace('.', '')}"
    folder.mkdir(parents=True, exist_ok=True)
    specs = {
        name: _write_engine(folder, bundle, manifest, name, profiles)
        for name, profiles in profiles_of(manifest, context).items()
    }
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
    )
    (folder / SIDECAR).write_text(engines.to_json(), encoding="utf-8")
    return EngineFolder(folder, engines)


def _write_engine(
    folder: Path, bundle: Path, manifest: Manifest, name: str, profiles: tuple[Profile, ...]
) -> EngineSpec:
    file = folder / f"{name}.engine"
    content = {
        "onnx": str(bundle / name / "model.onnx"),
        "profiles": [dataclasses.asdict(profile) for profile in profiles],
    }
    file.write_text(json.dumps(content), encoding="utf-8")
    return EngineSpec(
        file=file.name,
        sha256=file_sha256(file),
        size=file.stat().st_size,
        graph={path: digest for path, digest in manifest.files.items() if path.startswith(f"{name}/")},
        profiles=profiles,
        in_place=in_place(manifest.models[name].graph.kv_row_bytes),
        kernels=None,
        fused_attention=None,
    )
