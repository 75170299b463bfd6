"""A fake GPU (session.trt.driver.CudaDriver) in host memory, as strict as a real one.

Queued work runs only when the stream is synchronised, so a host buffer that is overwritten too early, or read too soon,
makes a test fail. New memory is all ones (NaN in every float type), every access must lie inside one live allocation, a
destroyed graph can neither be launched nor destroyed again, and every call is recorded.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.cache import ALIGNMENT
from eagle_runtime.errors import BackendError
from eagle_runtime.machine.nvidia import DeviceInfo
from eagle_runtime.session.trt.driver import CudaDriver, out_of_memory

Work = Callable[[], None]
STREAM = 7


class FakeDriver(CudaDriver):
    """calls: (name, arguments...) of every call, in order. total: bytes of its memory."""

    def __init__(self, total: int = 1 << 32, compute_capability: str = "8.9", name: str = "Fake RTX") -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.total = total
        self.compute_capability = compute_capability
        self.name = name
        self.capturing: list[Work] | None = None
        self.capturable = True
        self.streams: set[int] = set()
        self.graphs: dict[int, list[Work]] = {}
        self._captures = 0
        self._queue: list[Work] = []
        self._device: dict[int, npt.NDArray[np.uint8]] = {}  # address -> memory
        self._host: dict[int, npt.NDArray[np.uint8]] = {}

    @property
    def used(self) -> int:
        """Bytes of allocated device memory."""
        return sum(memory.size for memory in self._device.values())

    @property
    def pinned(self) -> int:
        """Bytes of page-locked memory."""
        return sum(memory.size for memory in self._host.values())

    def named(self, name: str) -> list[tuple[Any, ...]]:
        """Returns the arguments of every call of that name, in order."""
        return [call[1:] for call in self.calls if call[0] == name]

    def describe(self) -> DeviceInfo:
        return DeviceInfo(self.name, self.compute_capability, "13.0", self.total, self.total - self.used)

    def allocate(self, nbytes: int) -> int:
        self._note("allocate", nbytes)
        assert nbytes > 0
        if self.used + nbytes > self.total:
            raise out_of_memory(nbytes, self.total - self.used, self.total)
        return _new(self._device, nbytes)

    def free(self, address: int) -> None:
        self._note("free", address)
        assert not self._queue, "freed while work is queued"
        del self._device[address]

    def allocate_host(self, nbytes: int) -> int:
        self._note("allocate_host", nbytes)
        return _new(self._host, nbytes)

    def free_host(self, address: int) -> None:
        self._note("free_host", address)
        del self._host[address]

    def create_stream(self) -> int:
        self._note("create_stream")
        self.streams.add(STREAM)
        return STREAM

    def destroy_stream(self, stream: int) -> None:
        self._note("destroy_stream", stream)
        self.streams.remove(stream)

    def synchronize(self, stream: int) -> None:
        self._note("synchronize", stream)
        assert self.capturing is None, "a stream cannot be synchronised while it is captured"
        self._check_stream(stream)
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def upload(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._note("upload", target, source, nbytes, stream)
        self.enqueue(lambda: _move(self.device(target, nbytes), _bytes_at(source, nbytes)), stream)

    def download(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._note("download", target, source, nbytes, stream)
        self.enqueue(lambda: _move(_bytes_at(target, nbytes), self.device(source, nbytes)), stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._note("copy", target, source, nbytes, stream)
        assert target + nbytes <= source or source + nbytes <= target, "the copy overlaps itself"
        self.enqueue(lambda: _move(self.device(target, nbytes), self.device(source, nbytes)), stream)

    def copy_2d(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        self._note("copy_2d", target, target_pitch, source, source_pitch, width, height, stream)
        assert width <= min(target_pitch, source_pitch)

        def work() -> None:
            for row in range(height):
                piece = self.device(source + row * source_pitch, width)
                _move(self.device(target + row * target_pitch, width), piece)

        self.enqueue(work, stream)

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        self._note("clear", target, nbytes, stream)
        self.enqueue(lambda: self.device(target, nbytes).fill(0), stream)

    def capture(self, stream: int, queue: Callable[[], bool]) -> int | None:
        self._note("capture", stream)
        self._check_stream(stream)
        assert self.capturing is None
        captured: list[Work] = []
        self.capturing = captured
        try:
            queued = queue()
        finally:
            self.capturing = None
        if not (queued and self.capturable):
            return None
        self._captures += 1  # the id of a destroyed graph is never used again
        self.graphs[self._captures] = captured
        return self._captures

    def launch(self, graph: int, stream: int) -> None:
        self._note("launch", graph, stream)
        self._check_graph(graph, "launched")
        for work in self.graphs[graph]:
            self.enqueue(work, stream)

    def destroy_graph(self, graph: int) -> None:
        self._note("destroy_graph", graph)
        self._check_graph(graph, "destroyed")
        del self.graphs[graph]

    # For fake libraries that compute on this GPU.

    def enqueue(self, work: Work, stream: int) -> None:
        """Queue work, or add it to the graph that is being captured."""
        self._check_stream(stream)
        (self._queue if self.capturing is None else self.capturing).append(work)

    def device(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Returns device memory, which must lie inside one live allocation."""
        for start, memory in self._device.items():
            if start <= address and address + nbytes <= start + memory.size:
                return memory[address - start : address - start + nbytes]
        raise AssertionError(f"{nbytes} bytes at {address} are not allocated on the device")

    def _note(self, *call: Any) -> None:
        self.calls.append(call)

    def _check_graph(self, graph: int, verb: str) -> None:
        if graph not in self.graphs:
            raise BackendError(f"the GPU failed: graph {graph} is {verb}, but no longer exists")

    def _check_stream(self, stream: int) -> None:
        assert stream in self.streams, "no such stream; the default one is never used"


def _new(memories: dict[int, npt.NDArray[np.uint8]], nbytes: int) -> int:
    raw = np.full(nbytes + 2 * ALIGNMENT, 0xFF, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    memory = raw[start : start + nbytes]
    memories[memory.ctypes.data] = memory
    return memory.ctypes.data


def _bytes_at(address: int, nbytes: int) -> npt.NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))


def _move(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    target[:] = source
