"""Checks code that no test can run without a GPU: every name it uses of TensorRT, TensorRT for RTX and cuda-bindings
exists in the library, and takes as many arguments."""

from __future__ import annotations

import ast
import inspect
import platform
import re
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import trt_fake
from eagle_runtime.base.errors import BackendError
from eagle_runtime.trt.driver import CudaDriver

ROOT = Path(__file__).resolve().parents[1]
API = ROOT / "tests/data/tensorrt_api.txt"
SUPPORTED = platform.machine() in ("x86_64", "AMD64") and sys.platform in ("linux", "win32")
needs_libraries = pytest.mark.skipif(not SUPPORTED, reason="the libraries are for Linux and Windows")

# The types of the names in each file. `trt` is the module everywhere.
OBJECTS = {
    "runtime/eagle_runtime/trt/library.py": {},
    "runtime/eagle_runtime/trt/session.py": {"runtime": "Runtime"},
    "runtime/eagle_runtime/trt/execution.py": {
        "runtime": "Runtime",
        "engine": "ICudaEngine",
        "self._engine": "ICudaEngine",
        "self._context": "IExecutionContext",
        "config": "IRuntimeConfig",
        "cache": "IRuntimeCache",
        "graphs": "CudaGraphStrategy",
        "kernels": "DynamicShapesKernelSpecializationStrategy",
    },
    "export/eagle_export/tensorrt/network.py": {
        "self._builder": "Builder",
        "self._network": "INetworkDefinition",
        "self._parser": "OnnxParser",
        "self._parser.get_error(index)": "ParserError",
        "faults[0]": "ParserError",
        "config": "IBuilderConfig",
        "config.get_timing_cache()": "ITimingCache",
        "tensor": "ITensor",
        "profile": "IOptimizationProfile",
    },
}
RTX_ONLY = {
    "ComputeCapability",
    "CudaGraphStrategy",
    "DynamicShapesKernelSpecializationStrategy",
    "IRuntimeCache",
    "IRuntimeConfig.create_runtime_cache",
    "IRuntimeConfig.cuda_graph_strategy",
    "IRuntimeConfig.dynamic_shapes_kernel_specialization_strategy",
    "IRuntimeConfig.set_runtime_cache",
    "IExecutionContext.is_stream_capturable",
    "IBuilderConfig.num_compute_capabilities",
    "IBuilderConfig.set_compute_capability",
}


@dataclass(frozen=True, slots=True)
class Use:
    """name: Class.member, or Class. arguments: their number in a call, else None."""

    where: str
    name: str
    arguments: int | None


def uses(path: str, objects: dict[str, str]) -> Iterator[Use]:
    """Yields every use of the library in a file."""
    tree = ast.parse((ROOT / path).read_text(encoding="utf-8"))
    calls = {id(node.func): len(node.args) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    inner = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    for node in ast.walk(tree):
        if not isinstance(node, ast.Attribute):
            continue
        where, text = f"{path}:{node.lineno}", ast.unparse(node)
        owner = ast.unparse(node.value)
        if owner in objects:
            yield Use(where, f"{objects[owner]}.{node.attr}", calls.get(id(node)))
        elif owner.startswith("trt.") and node.attr.startswith("__"):
            yield Use(where, owner.removeprefix("trt."), None)
        elif text.startswith("trt.") and id(node) not in inner and not node.attr.startswith("__"):
            yield Use(where, text.removeprefix("trt."), calls.get(id(node)))


def all_uses() -> list[Use]:
    return [use for path, objects in OBJECTS.items() for use in uses(path, objects)]


def read_api() -> dict[str, list[tuple[int, int]]]:
    """Returns Class, or Class.member -> the least and largest number of arguments per overload; empty for what is not a
    method."""
    api: dict[str, list[tuple[int, int]]] = {}
    owner = ""
    for line in API.read_text(encoding="utf-8").splitlines():
        if line.startswith("#"):
            continue
        if not line.startswith(" "):
            owner = line
            api[owner] = []
            continue
        name, _, parameters = line.strip().partition("(")
        overloads = api.setdefault(f"{owner}.{name}", [])
        if parameters:
            names = [part for part in parameters.rstrip(")").split(", ") if part]
            overloads.append((sum(not part.endswith("=") for part in names), len(names)))
            if name == "__init__":
                api[owner].append(overloads[-1])
    return api


def test_uses_are_collected() -> None:
    """Control: calls, attributes that are set, and values."""
    used = {(use.name, use.arguments) for use in all_uses()}
    assert {
        ("IExecutionContext.set_tensor_address", 2),
        ("ICudaEngine.device_memory_size_v2", None),
        ("IBuilderConfig.set_flag", 1),
        ("BuilderFlag.WEIGHT_STREAMING", None),
        ("Runtime", 1),
        ("ILogger.Severity.ERROR", None),
        ("IHostMemory", None),
    } - used == {("IHostMemory", None)}
    assert len(used) > 50


def test_tensorrt_has_every_name() -> None:
    api = read_api()
    wrong = []
    for use in all_uses():
        if use.name in RTX_ONLY or use.name.split(".")[0] in RTX_ONLY:
            continue
        limits = api.get(use.name)
        if limits is None or (use.arguments is not None and not any(a <= use.arguments <= b for a, b in limits)):
            wrong.append(use)
    assert wrong == []


def test_the_remaining_names_are_those_of_tensorrt_for_rtx() -> None:
    used = {use.name for use in all_uses()} | {use.name.split(".")[0] for use in all_uses()}
    assert used >= RTX_ONLY and not RTX_ONLY & read_api().keys()


@needs_libraries
def test_tensorrt_for_rtx_has_every_name() -> None:
    import tensorrt_rtx as trt

    wrong = []
    for use in all_uses():
        member: Any = trt
        for part in use.name.split("."):
            member = getattr(member, part, None)
        if member is None or (use.arguments is not None and use.arguments not in arities(member)):
            wrong.append(use)
    assert wrong == []


def arities(method: Any) -> set[int]:
    """Returns the numbers of arguments that a method of the library takes, from its docstring, which lists all
    overloads."""
    owner = method.__init__ if inspect.isclass(method) else method
    counts = set()
    for parameters in re.findall(rf"^(?:\d+\. )?{owner.__name__}\((self.*)\) -> ", str(owner.__doc__), re.M):
        names = re.sub(r"<[^<>]*>|\[[^\[\]]*\]", "", parameters).split(", ")[1:]
        counts |= set(range(sum("=" not in name for name in names), len(names) + 1))
    return counts


@pytest.mark.parametrize(
    ("fake", "real"),
    [
        (trt_fake.FakeRuntime, "Runtime"),
        (trt_fake.FakeEngine, "ICudaEngine"),
        (trt_fake.FakeContext, "IExecutionContext"),
        (trt_fake.Strategy, "ExecutionContextAllocationStrategy"),
    ],
)
def test_the_fake_library_has_names_of_the_real_one(fake: Any, real: str) -> None:
    """And its methods take the same parameters."""
    lines = API.read_text(encoding="utf-8").split(f"\n{real}\n")[1].split("\n")
    listed = {
        line.strip().replace("=", "") for line in lines[: [*(not n.startswith(" ") for n in lines), True].index(True)]
    }
    for name, method in inspect.getmembers(fake, inspect.isfunction):
        if name.startswith("_") or name == "fail":
            continue
        parameters = ", ".join(list(inspect.signature(method).parameters)[1:])
        assert f"{name}({parameters})" in listed, (name, parameters)
    if real.endswith("Strategy"):
        assert set(fake.__members__) == listed


# cuda-bindings.


@needs_libraries
def test_cuda_bindings_have_every_name() -> None:
    from cuda.bindings import runtime

    tree = ast.parse((ROOT / "runtime/eagle_runtime/trt/driver.py").read_text(encoding="utf-8"))
    names = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    functions = {name for name in names if re.fullmatch(r"cuda[A-Z]\w+", name)}
    chains = {ast.unparse(node) for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    chains = {text.removeprefix("self._cuda.") for text in chains if text.startswith("self._cuda.cuda")}
    chains |= {
        f"cudaError_t.{text[6:]}" for text in {ast.unparse(n) for n in ast.walk(tree)} if text.startswith("codes.")
    }
    assert len(functions) >= 18 and len(chains) >= 12
    for name in functions | chains:
        member: Any = runtime
        for part in name.split("."):
            member = getattr(member, part)


@needs_libraries
def test_cuda_bindings_take_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every call is made. Without a driver it fails for that reason, not for its arguments."""
    from cuda.bindings import runtime

    if runtime.cudaGetDeviceCount()[0] == runtime.cudaError_t.cudaSuccess:
        pytest.skip("there is a GPU, for which these addresses are wrong")
    done = runtime.cudaError_t.cudaSuccess
    monkeypatch.setattr(runtime, "cudaGetDeviceCount", lambda: (done, 1))
    monkeypatch.setattr(runtime, "cudaSetDevice", lambda device: (done,))
    driver = CudaDriver()
    calls: dict[str, tuple[Any, ...]] = {
        "describe": (),
        "allocate": (16,),
        "free": (256,),
        "allocate_host": (16,),
        "free_host": (256,),
        "create_stream": (),
        "destroy_stream": (7,),
        "synchronize": (7,),
        "upload": (256, 512, 16, 7),
        "download": (256, 512, 16, 7),
        "copy": (256, 512, 16, 7),
        "copy_2d": (256, 64, 512, 64, 16, 2, 7),
        "clear": (256, 16, 7),
        "capture": (7, lambda: True),
        "launch": (5, 7),
        "destroy_graph": (5,),
    }
    assert calls.keys() == {name for name, _ in inspect.getmembers(CudaDriver, inspect.isfunction) if name[0] != "_"}
    driver._graphs[5] = runtime.cudaGraphExec_t(5)
    for name, arguments in calls.items():
        with pytest.raises(BackendError, match=r"no NVIDIA driver is installed|serves CUDA up to"):
            getattr(driver, name)(*arguments)


@needs_libraries
def test_the_error_without_a_driver_is_one_line() -> None:
    from cuda.bindings import runtime

    if runtime.cudaGetDeviceCount()[0] == runtime.cudaError_t.cudaSuccess:
        assert CudaDriver().describe().available <= CudaDriver().describe().total
        return
    with pytest.raises(BackendError, match=r"driver") as error:
        CudaDriver().describe()
    assert "\n" not in str(error.value)
