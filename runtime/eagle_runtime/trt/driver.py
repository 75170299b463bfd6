"""CUDA calls on the first GPU: memory, copies, one stream, graphs. The only file that imports cuda (cuda-bindings).

Addresses, streams and graphs are integers. Copies and launches are queued on a stream and return at once; `synchronize`
waits for them. Every failure raises a BackendError. All work is counted (`tally`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from eagle_runtime.base.errors import BackendError
from eagle_runtime.core.counters import Tally
from eagle_runtime.machine.nvidia import DeviceInfo, cuda_version

OLDEST_DRIVER = {12: "525", 13: "580"}  # CUDA major version -> the first driver release that supports it


class CudaDriver:
    """The operations that sessions need of the first GPU that CUDA_VISIBLE_DEVICES leaves."""

    def __init__(self) -> None:
        """Raises BackendError if the driver, a GPU or cuda-bindings is missing."""
        try:
            from cuda.bindings import runtime
        except ImportError as error:
            raise BackendError(
                f"cuda-bindings is not installed or does not load ({error}); pip install 'cuda-bindings>=13'"
            ) from None
        self.tally = Tally()
        self._cuda: Any = runtime
        self._graphs: dict[int, Any] = {}
        if self._answer("cudaGetDeviceCount") == 0:
            raise BackendError(_NO_GPU)
        self._call("cudaSetDevice", 0)

    def describe(self) -> DeviceInfo:
        """Returns the GPU as CUDA describes it."""
        properties = self._answer("cudaGetDeviceProperties", 0)
        free, total = self._call("cudaMemGetInfo")
        return DeviceInfo(
            name=bytes(properties.name).split(b"\0")[0].decode(errors="replace"),
            compute_capability=f"{properties.major}.{properties.minor}",
            cuda=cuda_version(self._answer("cudaDriverGetVersion")),
            total=int(total),
            free=int(free),
        )

    def allocate(self, nbytes: int) -> int:
        """Returns the address of device memory, 256-byte aligned, with undefined content."""
        self.tally.add(allocations=1)
        error, address = self._cuda.cudaMalloc(nbytes)
        if error == self._cuda.cudaError_t.cudaErrorMemoryAllocation:
            self._cuda.cudaGetLastError()  # or the next call would report the error again
            free, total = self._call("cudaMemGetInfo")
            raise out_of_memory(nbytes, int(free), int(total))
        self._check("cudaMalloc", error)
        return int(address)

    def free(self, address: int) -> None:
        self._call("cudaFree", address)

    def allocate_host(self, nbytes: int) -> int:
        """Returns the address of page-locked host memory, which the GPU can copy from and to directly."""
        self.tally.add(allocations=1)
        return int(self._answer("cudaMallocHost", nbytes))

    def free_host(self, address: int) -> None:
        self._call("cudaFreeHost", address)

    def create_stream(self) -> int:
        """Returns a stream that does not wait for the default stream."""
        return int(self._answer("cudaStreamCreateWithFlags", self._cuda.cudaStreamNonBlocking))

    def destroy_stream(self, stream: int) -> None:
        self._call("cudaStreamDestroy", stream)

    def synchronize(self, stream: int) -> None:
        """Wait until all queued work is done."""
        self.tally.add(synchronisations=1)
        self._call("cudaStreamSynchronize", stream)

    def upload(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy from the host. The source must not change until the stream is synchronised."""
        self.tally.add(uploads=1, bytes_up=nbytes)
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyHostToDevice
        self._call("cudaMemcpyAsync", target, source, nbytes, kind, stream)

    def download(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy to the host. The target is valid once the stream is synchronised."""
        self.tally.add(downloads=1, bytes_down=nbytes)
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToHost
        self._call("cudaMemcpyAsync", target, source, nbytes, kind, stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        """Copy inside the device. Target and source must not overlap."""
        self.tally.add(device_copies=1)
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call("cudaMemcpyAsync", target, source, nbytes, kind, stream)

    def copy_2d(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        """Copy inside the device `height` pieces of `width` bytes, which begin a pitch apart."""
        self.tally.add(device_copies=1)
        kind = self._cuda.cudaMemcpyKind.cudaMemcpyDeviceToDevice
        self._call("cudaMemcpy2DAsync", target, target_pitch, source, source_pitch, width, height, kind, stream)

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        """Fill with zero bytes."""
        self.tally.add(device_copies=1)
        self._call("cudaMemsetAsync", target, 0, nbytes, stream)

    def capture(self, stream: int, queue: Callable[[], bool]) -> int | None:
        """Record the work that `queue` puts on the stream instead of running it. Returns the graph, or None if it
        cannot be captured."""
        mode = self._cuda.cudaStreamCaptureMode.cudaStreamCaptureModeThreadLocal
        self._call("cudaStreamBeginCapture", stream, mode)
        queued = False
        try:
            queued = queue()
        finally:
            error, graph = self._cuda.cudaStreamEndCapture(stream)
        if error or not queued:
            self._cuda.cudaGetLastError()
            return None
        error, runnable = self._cuda.cudaGraphInstantiate(graph, 0)
        self._call("cudaGraphDestroy", graph)
        if error:
            self._cuda.cudaGetLastError()
            return None
        self._graphs[int(runnable)] = runnable
        return int(runnable)

    def launch(self, graph: int, stream: int) -> None:
        self.tally.add(graph_launches=1)
        self._call("cudaGraphLaunch", self._graphs[graph], stream)

    def destroy_graph(self, graph: int) -> None:
        self._call("cudaGraphExecDestroy", self._graphs.pop(graph))

    def _answer(self, name: str, *arguments: Any) -> Any:
        """Returns the result of a call that has one."""
        return self._call(name, *arguments)[0]

    def _call(self, name: str, *arguments: Any) -> tuple[Any, ...]:
        error, *results = getattr(self._cuda, name)(*arguments)
        self._check(name, error)
        return tuple(results)

    def _check(self, name: str, error: Any) -> None:
        codes = self._cuda.cudaError_t
        if error == codes.cudaSuccess:
            return
        if error == codes.cudaErrorNoDevice:
            raise BackendError(_NO_GPU)
        if error == codes.cudaErrorInsufficientDriver:
            _, driver = self._cuda.cudaDriverGetVersion()
            _, needed = self._cuda.cudaRuntimeGetVersion()
            raise no_driver(int(driver), int(needed))
        _, text = self._cuda.cudaGetErrorString(error)
        reason = text.decode(errors="replace")
        raise BackendError(f"the GPU failed in {name} ({reason}); start again, and look at nvidia-smi if it stays so")


_NO_GPU = "the NVIDIA driver sees no GPU; look at nvidia-smi and CUDA_VISIBLE_DEVICES"


def no_driver(served: int, needed: int) -> BackendError:
    """Returns the error for a missing or old driver. served, needed: CUDA versions as the driver counts them (13000 is
    13.0); served is 0 where no driver is installed. A driver serves every minor version of the majors it knows."""
    major = needed // 1000
    release = OLDEST_DRIVER.get(major)
    hint = f"install driver {release} or newer" if release else f"install a driver for CUDA {major}"
    if served == 0:
        return BackendError(f"no NVIDIA driver is installed; {hint}")
    return BackendError(f"the NVIDIA driver serves CUDA up to {cuda_version(served)}, but {major}.0 is needed; {hint}")


def out_of_memory(needed: int, free: int, total: int) -> BackendError:
    """Returns the error for memory that does not suffice. needed, free, total: bytes."""
    return BackendError(
        f"the GPU's memory is full: {needed / 1e9:.2f} GB are needed, {free / 1e9:.2f} GB of {total / 1e9:.2f} GB are "
        "free; lower the context, use an int8 or int4 bundle, build its engines with weight streaming, or end the "
        "process that holds the rest"
    )
