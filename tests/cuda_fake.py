"""A fake GPU (trt.driver.CudaDriver) in host memory, as strict as a real one.

Queued work runs only when the stream is synchronised, so a host buffer that is overwritten too early, or read too soon,
makes a test fail. New memory is all ones (NaN in every float type), and an address is never given out twice. What a
real GPU does not survive raises a BackendError here: access outside one live allocation or to page-locked memory that
was freed, freeing twice, a destroyed stream, a graph that is launched or destroyed after it was destroyed, and memory
that a queued copy still needs. Every call is recorded, and counted as CudaDriver counts it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.errors import BackendError
from eagle_runtime.core.cache import ALIGNMENT
from eagle_runtime.core.counters import Tally
from eagle_runtime.machine.nvidia import DeviceInfo
from eagle_runtime.trt.driver import CudaDriver, out_of_memory

Work = Callable[[], None]
STREAM = 7


class FakeDriver(CudaDriver):
    """calls: (name, arguments...) of every call, in order. total: bytes of its memory."""

    def __init__(self, total: int = 1 << 32, compute_capability: str = "8.9", name: str = "Fake RTX") -> None:
        self.tally = Tally()
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
        self._freed: list[npt.NDArray[np.uint8]] = []  # kept, so that no address comes a second time
        self._freed_host: dict[int, npt.NDArray[np.uint8]] = {}

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
        self.tally.add(allocations=1)
        if self.used + nbytes > self.total:
            raise out_of_memory(nbytes, self.total - self.used, self.total)
        return _new(self._device, nbytes)

    def free(self, address: int) -> None:
        self._note("free", address)
        if self._queue:
            raise BackendError("the GPU failed: device memory is freed while work is queued")
        if address not in self._device:
            raise BackendError(f"the GPU failed: no device memory begins at {address}, which is freed")
        self._freed.append(self._device.pop(address))

    def allocate_host(self, nbytes: int) -> int:
        self._note("allocate_host", nbytes)
        self.tally.add(allocations=1)
        return _new(self._host, nbytes)

    def free_host(self, address: int) -> None:
        self._note("free_host", address)
        if self._queue:
            raise BackendError("the GPU failed: page-locked memory is freed while work is queued")
        if address not in self._host:
            raise BackendError(f"the GPU failed: no page-locked memory begins at {address}, which is freed")
        self._freed_host[address] = self._host.pop(address)

    def create_stream(self) -> int:
        self._note("create_stream")
        self.streams.add(STREAM)
        return STREAM

    def destroy_stream(self, stream: int) -> None:
        self._note("destroy_stream", stream)
        self._check_stream(stream)
        self.streams.remove(stream)

    def synchronize(self, stream: int) -> None:
        self._note("synchronize", stream)
        if self.capturing is not None:
            raise BackendError("the GPU failed: a stream is synchronised while it is captured")
        self._check_stream(stream)
        self.tally.add(synchronisations=1)
        queue, self._queue = self._queue, []
        for work in queue:
            work()

    def upload(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._note("upload", target, source, nbytes, stream)
        self.tally.add(uploads=1, bytes_up=nbytes)
        self.device(target, nbytes)
        self.host(source, nbytes)
        self.enqueue(lambda: _move(self.device(target, nbytes), self.host(source, nbytes)), stream)

    def download(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._note("download", target, source, nbytes, stream)
        self.tally.add(downloads=1, bytes_down=nbytes)
        self.device(source, nbytes)
        self.host(target, nbytes)
        self.enqueue(lambda: _move(self.host(target, nbytes), self.device(source, nbytes)), stream)

    def copy(self, target: int, source: int, nbytes: int, stream: int) -> None:
        self._note("copy", target, source, nbytes, stream)
        self.tally.add(device_copies=1)
        if source < target + nbytes and target < source + nbytes:
            raise BackendError("the GPU failed: a copy overlaps itself")
        self.device(target, nbytes)
        self.device(source, nbytes)
        self.enqueue(lambda: _move(self.device(target, nbytes), self.device(source, nbytes)), stream)

    def copy_2d(
        self, target: int, target_pitch: int, source: int, source_pitch: int, width: int, height: int, stream: int
    ) -> None:
        self._note("copy_2d", target, target_pitch, source, source_pitch, width, height, stream)
        self.tally.add(device_copies=1)
        if width > min(target_pitch, source_pitch):
            raise BackendError("the GPU failed: the pieces of a copy are wider than their pitch")

        def work() -> None:
            for row in range(height):
                piece = self.device(source + row * source_pitch, width)
                _move(self.device(target + row * target_pitch, width), piece)

        self.enqueue(work, stream)

    def clear(self, target: int, nbytes: int, stream: int) -> None:
        self._note("clear", target, nbytes, stream)
        self.tally.add(device_copies=1)
        self.device(target, nbytes)
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
        self.tally.add(graph_launches=1)
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
        raise BackendError(f"the GPU failed: {nbytes} bytes at {address} are not allocated on the device")

    def host(self, address: int, nbytes: int) -> npt.NDArray[np.uint8]:
        """Returns host memory: page-locked, or the caller's, which was not page-locked before."""
        for start, memory in self._freed_host.items():
            if address < start + memory.size and start < address + nbytes:
                raise BackendError(f"the GPU failed: page-locked memory at {address} is used after it was freed")
        for start, memory in self._host.items():
            if start <= address < start + memory.size and address + nbytes > start + memory.size:
                raise BackendError(f"the GPU failed: {nbytes} bytes at {address} exceed their page-locked memory")
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def _note(self, *call: Any) -> None:
        self.calls.append(call)

    def _check_graph(self, graph: int, verb: str) -> None:
        if graph not in self.graphs:
            raise BackendError(f"the GPU failed: graph {graph} is {verb}, but no longer exists")

    def _check_stream(self, stream: int) -> None:
        if stream not in self.streams:
            raise BackendError(f"the GPU failed: there is no stream {stream}; the default one is never used")


def _new(memories: dict[int, npt.NDArray[np.uint8]], nbytes: int) -> int:
    raw = np.full(nbytes + 2 * ALIGNMENT, 0xFF, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    memory = raw[start : start + nbytes]
    memories[memory.ctypes.data] = memory
    return memory.ctypes.data


def _move(target: npt.NDArray[np.uint8], source: npt.NDArray[np.uint8]) -> None:
    target[:] = source
