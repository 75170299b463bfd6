"""CUDA's errors become one sentence that says what to do. A stand-in for the bindings gives prepared answers."""

from __future__ import annotations

import enum
import sys
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

from cuda_fake import FakeDriver
from eagle_runtime.base.errors import BackendError
from eagle_runtime.core.counters import Counters
from eagle_runtime.trt.driver import CudaDriver, no_driver

Error = enum.IntEnum(
    "Error",
    {
        "cudaSuccess": 0,
        "cudaErrorMemoryAllocation": 2,
        "cudaErrorInsufficientDriver": 35,
        "cudaErrorNoDevice": 100,
        "cudaErrorIllegalAddress": 700,
    },
)


class Bindings(ModuleType):
    """Stands in for cuda.bindings.runtime, with one GPU. answers: name of a call -> what it returns."""

    def __init__(self, **answers: tuple[Any, ...]) -> None:
        super().__init__("cuda.bindings.runtime")
        self.cudaError_t = Error
        self.cudaStreamNonBlocking = 1
        self.cudaStreamCaptureMode = SimpleNamespace(cudaStreamCaptureModeThreadLocal=1)
        kinds = ("HostToDevice", "DeviceToHost", "DeviceToDevice")
        self.cudaMemcpyKind = SimpleNamespace(**{f"cudaMemcpy{kind}": kind for kind in kinds})
        self.calls: list[tuple[Any, ...]] = []
        properties = SimpleNamespace(name=b"Card\0\0", major=8, minor=9)
        self.answers = {
            "cudaGetDeviceCount": (Error.cudaSuccess, 1),
            "cudaGetDeviceProperties": (Error.cudaSuccess, properties),
            "cudaMemGetInfo": (Error.cudaSuccess, 1_500_000_000, 8_000_000_000),
            "cudaDriverGetVersion": (Error.cudaSuccess, 13010),
            "cudaRuntimeGetVersion": (Error.cudaSuccess, 13050),
            "cudaGetErrorString": (Error.cudaSuccess, b"an illegal memory access"),
            **answers,
        }

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("cuda"):
            raise AttributeError(name)

        def call(*arguments: Any) -> tuple[Any, ...]:
            self.calls.append((name, *arguments))
            return self.answers.get(name, (Error.cudaSuccess,))

        return call


def bind(monkeypatch: pytest.MonkeyPatch, **answers: tuple[Any, ...]) -> Bindings:
    bindings, package = Bindings(**answers), ModuleType("cuda.bindings")
    package.runtime = bindings  # type: ignore[attr-defined]
    for name, module in (("cuda", ModuleType("cuda")), ("cuda.bindings", package), (bindings.__name__, bindings)):
        monkeypatch.setitem(sys.modules, name, module)
    return bindings


def test_the_gpu_is_described(monkeypatch: pytest.MonkeyPatch) -> None:
    bind(monkeypatch)
    info = CudaDriver().describe()
    assert (info.name, info.compute_capability, info.cuda) == ("Card", "8.9", "13.1")
    assert (info.free, info.total) == (1_500_000_000, 8_000_000_000)


@pytest.mark.parametrize(
    ("answers", "says"),
    [
        ({"cudaGetDeviceCount": (Error.cudaErrorNoDevice, None)}, "the NVIDIA driver sees no GPU; look at nvidia-smi"),
        ({"cudaGetDeviceCount": (Error.cudaSuccess, 0)}, "the NVIDIA driver sees no GPU; look at nvidia-smi"),
        (
            {
                "cudaGetDeviceCount": (Error.cudaErrorInsufficientDriver, None),
                "cudaDriverGetVersion": (Error.cudaSuccess, 0),
            },
            "no NVIDIA driver is installed; install driver 580 or newer",
        ),
        (
            {
                "cudaGetDeviceCount": (Error.cudaErrorInsufficientDriver, None),
                "cudaDriverGetVersion": (Error.cudaSuccess, 12040),
            },
            "the NVIDIA driver serves CUDA up to 12.4, but 13.0 is needed; install driver 580 or newer",
        ),
        (
            {"cudaSetDevice": (Error.cudaErrorIllegalAddress,)},
            "the GPU failed in cudaSetDevice (an illegal memory access); start again, and look at nvidia-smi",
        ),
    ],
)
def test_the_error_says_why_no_gpu_can_be_used(
    monkeypatch: pytest.MonkeyPatch, answers: dict[str, Any], says: str
) -> None:
    bind(monkeypatch, **answers)
    with pytest.raises(BackendError) as error:
        CudaDriver().describe()
    assert str(error.value).startswith(says) and "\n" not in str(error.value)


def test_missing_bindings_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cuda.bindings", None)
    with pytest.raises(BackendError, match=r"cuda-bindings is not installed .*; pip install 'cuda-bindings>=13'"):
        CudaDriver().describe()


def test_an_unknown_cuda_version_is_named() -> None:
    assert str(no_driver(13000, 15000)).endswith("but 15.0 is needed; install a driver for CUDA 15")


def test_the_error_for_full_memory_gives_sizes_and_advice(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = bind(monkeypatch, cudaMalloc=(Error.cudaErrorMemoryAllocation, None))
    with pytest.raises(
        BackendError, match=r"3\.20 GB are needed, 1\.50 GB of 8\.00 GB are free; lower the context, use"
    ):
        CudaDriver().allocate(3_200_000_000)
    assert ("cudaGetLastError",) in bindings.calls, "or the error would be reported again"


def test_a_capture_that_fails_leaves_the_stream_usable(monkeypatch: pytest.MonkeyPatch) -> None:
    bindings = bind(
        monkeypatch, cudaStreamEndCapture=(Error.cudaSuccess, 3), cudaGraphInstantiate=(Error.cudaSuccess, 4)
    )
    driver = CudaDriver()
    assert driver.capture(7, lambda: True) == 4
    driver.launch(4, 7)
    assert bindings.calls[-2:] == [("cudaGraphDestroy", 3), ("cudaGraphLaunch", 4, 7)]
    assert driver.capture(7, lambda: False) is None

    def fail() -> bool:
        raise KeyError

    ended = sum(call[0] == "cudaStreamEndCapture" for call in bindings.calls)
    with pytest.raises(KeyError):
        driver.capture(7, fail)
    assert sum(call[0] == "cudaStreamEndCapture" for call in bindings.calls) == ended + 1
    bindings.answers["cudaGraphInstantiate"] = (Error.cudaErrorMemoryAllocation, None)
    assert driver.capture(7, lambda: True) is None
    bindings.answers["cudaStreamEndCapture"] = (Error.cudaErrorIllegalAddress, None)
    assert driver.capture(7, lambda: True) is None


def work_of(driver: CudaDriver) -> Counters:
    """Every kind of work once, but for two uploads. Returns what was counted of it."""
    stream, host = driver.create_stream(), driver.allocate_host(64)
    first, second = driver.allocate(64), driver.allocate(64)
    begun = driver.tally.now
    driver.upload(first, host, 40, stream)
    driver.upload(second, host, 24, stream)
    driver.download(host, first, 16, stream)
    driver.copy(second, first, 8, stream)
    driver.copy_2d(second, 32, first, 32, 8, 2, stream)
    driver.clear(first, 64, stream)
    graph = driver.capture(stream, lambda: True)
    assert graph is not None
    driver.launch(graph, stream)
    driver.tally.engine_call("one")
    driver.tally.engine_call("one")
    driver.synchronize(stream)
    assert begun == Counters(allocations=3)
    return driver.tally.now.since(begun)


def test_work_is_counted_alike_on_a_gpu_and_on_the_fake_one(monkeypatch: pytest.MonkeyPatch) -> None:
    done = Error.cudaSuccess
    answers = {"cudaStreamEndCapture": (done, 3), "cudaGraphInstantiate": (done, 4), "cudaMallocHost": (done, 1 << 20)}
    bind(monkeypatch, **answers, cudaMalloc=(done, 512), cudaStreamCreateWithFlags=(done, 7))
    counted = work_of(CudaDriver())
    assert counted == work_of(FakeDriver()) == Counters(
        engine_calls=2, graph_launches=1, shapes=1, uploads=2, bytes_up=64, downloads=1, bytes_down=16,
        device_copies=3, synchronisations=1,
    )  # fmt: skip
