"""What is checked before a bundle is opened on ONNX Runtime's CUDA provider."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_runtime import BackendError, EagleModel
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.machine.nvidia import DeviceInfo, first_gpu, read_gpu
from eagle_runtime.ort.buffers import SPARE, OrtCache, OrtMemory
from eagle_runtime.ort.cuda import (
    PROVIDER,
    check_libraries,
    check_memory,
    check_placed,
    check_provider,
    memory_needed,
)
from eagle_runtime.ort.library import CPU, available_providers, open_graph, operators, preload_libraries

GPU = DeviceInfo("NVIDIA Fake", "8.9", "13.0", 8_000_000_000, 5_000_000_000, "580.65")


class Driver:
    """Stands in for libcuda or NVML: every function writes its answers and records its name."""

    def __init__(self, **answers: Any) -> None:
        """answers: name of a function -> what it returns, or writes through its arguments."""
        self.answers = answers
        self.calls: list[str] = []

    def __getattr__(self, name: str) -> Callable[..., int]:
        def call(*arguments: Any) -> int:
            self.calls.append(name)
            answer = self.answers.get(name, 0)
            if isinstance(answer, dict):
                answer = answer[arguments[1]]  # by the attribute that is asked for
            if isinstance(answer, bytes):
                next(each for each in arguments if hasattr(each, "raw")).value = answer
                return 0
            if isinstance(answer, tuple):
                target = next(each for each in reversed(arguments) if hasattr(each, "_obj"))._obj
                (target.value,) = answer
                return 0
            if isinstance(answer, int):
                return answer
            answer(*arguments)
            return 0

        return call


def cuda(**changes: Any) -> Driver:
    answers: dict[str, Any] = {
        "cuDeviceGetCount": (1,),
        "cuDeviceGetName": b"NVIDIA Fake",
        "cuDeviceGetAttribute": {75: (8,), 76: (9,)},
        "cuDriverGetVersion": (13010,),
        "cuDeviceTotalMem_v2": (8_000_000_000,),
        "cuDeviceGetPCIBusId": b"0000:01:00.0",
    }
    return Driver(**{**answers, **changes})


def nvml(**changes: Any) -> Driver:
    def memory(handle: Any, reference: Any) -> None:
        reference._obj.free = 5_000_000_000

    def handle(bus_id: bytes, reference: Any) -> None:
        assert bus_id == b"0000:01:00.0", "another GPU than CUDA's first"

    answers: dict[str, Any] = {
        "nvmlDeviceGetHandleByPciBusId_v2": handle,
        "nvmlDeviceGetMemoryInfo": memory,
        "nvmlSystemGetDriverVersion": b"580.65",
    }
    return Driver(**{**answers, **changes})


def test_the_gpu_is_described_by_its_driver() -> None:
    management = nvml()
    gpu = read_gpu(cuda(), management)
    assert gpu == dataclasses.replace(GPU, cuda="13.1")
    assert str(gpu) == "NVIDIA Fake, compute 8.9, 8.0 GB, 5.0 free, driver 580.65 for CUDA 13.1"
    assert management.calls[0] == "nvmlInit_v2" and management.calls[-1] == "nvmlShutdown"


@pytest.mark.parametrize("management", [None, nvml(nvmlInit_v2=9)])
def test_free_memory_is_unknown_without_nvml(management: Driver | None) -> None:
    gpu = read_gpu(cuda(), management)
    assert gpu.free is None and gpu.driver is None
    assert str(gpu) == "NVIDIA Fake, compute 8.9, 8.0 GB, driver for CUDA 13.1"


@pytest.mark.parametrize(
    ("driver", "says"),
    [
        (cuda(cuInit=100), "does not start (error 100 of cuInit)"),
        (cuda(cuDeviceGetCount=3), "sees no GPU"),
        (cuda(cuDeviceGetCount=(0,)), "sees no GPU"),
    ],
)
def test_a_driver_without_a_gpu_is_refused(driver: Driver, says: str) -> None:
    with pytest.raises(BackendError) as error:
        read_gpu(driver, None)
    assert says in str(error.value) and "nvidia-smi" in str(error.value)


def test_the_cuda_backend_never_falls_back_to_the_cpu(bundle_of: Callable[..., Path]) -> None:
    try:
        ctypes.CDLL("libcuda.so.1")
    except OSError:
        pass
    else:
        pytest.skip("this machine has a driver")
    with pytest.raises(BackendError, match=r"no NVIDIA driver is installed \(.* is missing\)"):
        first_gpu()
    with pytest.raises(BackendError, match="no NVIDIA driver is installed"):
        EagleModel.load(bundle_of("eagle1"), backend="cuda")


def test_an_onnxruntime_without_cuda_is_refused() -> None:
    if PROVIDER in available_providers():
        pytest.skip("this onnxruntime was built for CUDA")
    with pytest.raises(BackendError, match=r"has no CUDAExecutionProvider: .*pip install 'eagle-edge\[cuda\]'"):
        check_provider(available_providers())
    check_provider([PROVIDER, "CPUExecutionProvider"])
    assert preload_libraries() == []


def test_the_error_names_libraries_that_do_not_load() -> None:
    """The lines are onnxruntime 1.31's own."""
    check_libraries(["Skip loading CUDA and cuDNN DLLs since torch is imported."])
    complaints = [
        "Failed to load libcublasLt.so.13: libcublasLt.so.13: cannot open shared object file: No such file",
        "Failed to load libcurand.so.10: libcurand.so.10: cannot open shared object file: No such file",
        "Please follow https://onnxruntime.ai/docs/install/#cuda-and-cudnn to install CUDA.",
    ]
    with pytest.raises(BackendError) as error:
        check_libraries(complaints)
    assert str(error.value) == (
        "CUDA's libraries are missing (libcublasLt.so.13, libcurand.so.10): pip install 'eagle-edge[cuda]'"
    )


def test_a_bundle_that_does_not_fit_is_refused_with_advice() -> None:
    check_memory(GPU, 4_900_000_000)
    check_memory(dataclasses.replace(GPU, free=None), 7_900_000_000)
    with pytest.raises(BackendError) as error:
        check_memory(GPU, 5_100_000_000)
    message = str(error.value)
    assert message.startswith("NVIDIA Fake has 5.0 of 8.0 GB free, but this bundle takes about 5.1 GB; ")
    assert all(advice in message for advice in ("smaller context", "int4", "close the process"))


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_the_memory_of_a_bundle_is_its_files_and_caches(precision: str, bundle_of: Callable[..., Path]) -> None:
    bundle = bundle_of("eagle3", precision)
    head = read_manifest(bundle).models["draft"]
    cache = OrtCache(
        OrtMemory(), 1, 100, head.num_kv_heads, head.head_dim, "float16" if precision == "fp16" else "float32"
    )
    files = sum(path.stat().st_size for path in (bundle / "draft").iterdir())
    assert memory_needed(bundle, head, 100) == files + 2 * (100 + SPARE) * cache.row_bytes


def test_a_provider_that_did_not_start_is_an_error() -> None:
    with pytest.raises(BackendError, match="did not start CUDAExecutionProvider for g"):
        check_placed(Path("g"), ["CPUExecutionProvider"], [])


def test_computing_on_the_host_is_an_error(bundle_of: Callable[..., Path]) -> None:
    """A session on two providers of this machine, none of them CUDA, computes all its nodes on the host."""
    bundle = bundle_of("eagle1")
    others: list[tuple[str, dict[str, str]]] = [
        (name, {}) for name in available_providers() if name not in (PROVIDER, CPU[0][0])
    ]
    if not others:
        pytest.skip("this onnxruntime has one provider")
    session = open_graph(bundle / "draft" / "model.onnx", [*others[:1], *CPU], 1)
    placed = operators(session)
    assert {"MatMul", "Attention", "TopK"} <= {operator for _, operator in placed}
    with pytest.raises(BackendError, match=r"has no CUDA kernels for Attention, .*MatMul.*; export .* --backend cuda"):
        check_placed(Path("g"), [PROVIDER], placed)


@pytest.mark.parametrize(
    ("on_host", "says"),
    [
        # As onnxruntime-gpu 1.31 places the nodes of a target in fp16 and of one in int8 for CPUs.
        (["Squeeze", "Squeeze", "Squeeze", "Add", "Sub", "Reshape", "Concat"], None),
        (["Squeeze", "Add", "Sub", "Reshape", "Concat", "MatMulIntegerToFloat"], "kernels for MatMulIntegerToFloat;"),
    ],
)
def test_shapes_may_be_computed_on_the_host(on_host: list[str], says: str | None) -> None:
    placed = [(PROVIDER, "MatMul"), (PROVIDER, "Attention"), *((CPU[0][0], name) for name in on_host)]
    if says is None:
        check_placed(Path("g"), [PROVIDER, CPU[0][0]], placed)
    else:
        with pytest.raises(BackendError, match=says):
            check_placed(Path("g"), [PROVIDER, CPU[0][0]], placed)
