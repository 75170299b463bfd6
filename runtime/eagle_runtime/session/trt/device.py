"""Memory on a GPU, whatever the library that computes there: rows, caches, and the stream that orders all work.

Everything is queued on one stream, so a copy sees what was queued before it, and memory may be used again as soon as
its last use is queued.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.cache import ALIGNMENT, Cache
from eagle_runtime.session.trt.driver import Driver
from eagle_runtime.session.trt.padding import PAST_STEP, round_up
from eagle_runtime.tree import Int

SLACK = 64  # rows behind a cache's capacity, for the padded rows of a pass
SMALLEST = 1 << 12  # bytes; memory for rows comes in powers of two from here


class Device:
    """A GPU's memory and stream, shared by the sessions that hand each other rows. Freed when the last one closes."""

    def __init__(self, driver: Driver, users: int = 1) -> None:
        self.driver = driver
        self.stream = driver.create_stream()
        self._users = users
        self._addresses: set[int] = set()
        self._pinned: list[int] = []
        self._spare: dict[int, list[int]] = defaultdict(list)  # size -> addresses

    @property
    def open(self) -> bool:
        """Whether a session still uses it."""
        return self._users > 0

    def reserve(self, nbytes: int) -> int:
        """Memory for as long as the device is open, 256-byte aligned; address 0 for no bytes."""
        if nbytes == 0:
            return 0
        address = self.driver.allocate(nbytes)
        self._addresses.add(address)
        return address

    def reserve_host(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Page-locked bytes of the host for as long as the device is open."""
        address = self.driver.allocate_host(nbytes)
        self._pinned.append(address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def take(self, nbytes: int) -> Block:
        """Memory that is taken again, for whatever fits, once nothing refers to it any more."""
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        spare = self._spare[size]
        return Block(self, spare.pop() if spare else self.reserve(size), size, kept=True)

    def borrow(self, nbytes: int) -> Block:
        """Memory that is freed once nothing refers to it any more."""
        return Block(self, self.reserve(nbytes), nbytes, kept=False)

    def give_back(self, block: Block) -> None:
        """A block's end."""
        if not self.open:
            return
        if block.kept:
            self._spare[block.size].append(block.address)
            return
        self.wait()
        self._addresses.remove(block.address)
        self.driver.free(block.address)

    def wait(self) -> None:
        """Until all that was queued is done."""
        self.driver.synchronize(self.stream)

    def release(self) -> None:
        """One user less; the last one frees all memory."""
        self._users -= 1
        if self._users != 0:
            return
        self.wait()
        for address in self._addresses:
            self.driver.free(address)
        for address in self._pinned:
            self.driver.free_host(address)
        self.driver.destroy_stream(self.stream)


class Block:
    """Device memory in use. kept: whether it goes to others afterwards instead of being freed."""

    __slots__ = ("_device", "address", "kept", "size")

    def __init__(self, device: Device, address: int, size: int, kept: bool) -> None:
        self._device = device
        self.address = address
        self.size = size
        self.kept = kept

    def __del__(self) -> None:
        self._device.give_back(self)


class DeviceRows:
    """Rows [n, width] on the device: session.Rows."""

    def __init__(
        self, device: Device, address: int, count: int, width: int, dtype: npt.DTypeLike, block: Block | None = None
    ) -> None:
        """block: what the rows lie in and keep from being given back; None for memory that outlives them."""
        self.address = address
        self.dtype = np.dtype(dtype)
        self.row_bytes = width * self.dtype.itemsize
        self._device = device
        self._count = count
        self._width = width
        self._block = block

    def __len__(self) -> int:
        return self._count

    @property
    def nbytes(self) -> int:
        """Of all rows together."""
        return self._count * self.row_bytes

    def __getitem__(self, index: slice | Int, /) -> DeviceRows:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            assert step == 1, "rows side by side, or an array of indices"
            count = max(0, stop - start)
            return DeviceRows(
                self._device, self.address + start * self.row_bytes, count, self._width, self.dtype, self._block
            )
        assert len(index) == 0 or (index.min() >= 0 and index.max() < self._count), "no such row"
        picked = empty_rows(self._device, len(index), self._width, self.dtype)
        for target, source, count in runs(index):
            self._device.driver.copy(
                picked.address + target * self.row_bytes,
                self.address + source * self.row_bytes,
                count * self.row_bytes,
                self._device.stream,
            )
        return picked

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        host = np.empty((self._count, self._width), self.dtype)
        if self.nbytes:
            self._device.driver.download(host.ctypes.data, self.address, self.nbytes, self._device.stream)
            self._device.wait()
        return host if dtype is None else host.astype(dtype, copy=False)


def empty_rows(device: Device, count: int, width: int, dtype: npt.DTypeLike) -> DeviceRows:
    """Rows with memory of their own, their content undefined."""
    block = device.take(max(1, count * width * np.dtype(dtype).itemsize))
    return DeviceRows(device, block.address, count, width, dtype, block)


def joined_rows(device: Device, parts: Sequence[DeviceRows]) -> DeviceRows:
    """The parts below each other, as a copy. All are of one width and type; there is at least one."""
    first = parts[0]
    whole = empty_rows(device, sum(map(len, parts)), first.row_bytes // first.dtype.itemsize, first.dtype)
    address = whole.address
    for part in parts:
        if part.nbytes:
            device.driver.copy(address, part.address, part.nbytes, device.stream)
        address += part.nbytes
    return whole


def runs(index: Int) -> list[tuple[int, int, int]]:
    """index [n] as runs of neighbours: (place in index, first row, rows)."""
    starts = [0, *(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)]
    return [(start, int(index[start]), stop - start) for start, stop in itertools.pairwise(starts) if start < stop]


class DeviceCache(Cache):
    """Key/value rows on the device: [2 * layers, rows, row_bytes], keys of layer i at 2i, values at 2i + 1.

    Behind `capacity` stand SLACK rows and what rounds the whole up to PAST_STEP. All are zero at first: a padded
    pass reads rows that were never written, and what is not a number would spoil even what no row looks at."""

    def __init__(self, device: Device, layers: int, capacity: int, row_bytes: int) -> None:
        super().__init__(capacity)
        self.halves = 2 * layers
        self.row_bytes = row_bytes
        self.pitch = cache_rows(capacity) * row_bytes  # bytes from one half to the next
        self._device = device
        self._block = device.borrow(self.halves * self.pitch)
        device.driver.clear(self._block.address, self.halves * self.pitch, device.stream)

    def address(self, half: int, row: int = 0) -> int:
        """Where a row begins: of the keys of layer i for half 2i, of its values for 2i + 1."""
        return self._block.address + half * self.pitch + row * self.row_bytes

    def append(self, source: int, pitch: int, count: int) -> None:
        """Copy `count` rows of every half, which lie `pitch` bytes apart at `source`, behind the committed rows."""
        self._device.driver.copy_2d(
            self.address(0, self.length),
            self.pitch,
            source,
            pitch,
            count * self.row_bytes,
            self.halves,
            self._device.stream,
        )

    def gather(self, path: Int) -> None:
        """One copy per moved row, of all layers; in order, since a row may lie where a later one goes."""
        for place, row in enumerate(path.tolist()):
            if place != row:
                self._device.driver.copy_2d(
                    self.address(0, self.length + place),
                    self.pitch,
                    self.address(0, self.length + row),
                    self.pitch,
                    self.row_bytes,
                    self.halves,
                    self._device.stream,
                )


def cache_rows(capacity: int) -> int:
    """Rows that a cache of this capacity takes in memory."""
    return round_up(capacity + SLACK, PAST_STEP)


def in_place(row_bytes: int) -> bool:
    """Whether every row of a cache begins where TensorRT may write: rows of other sizes are copied in."""
    return row_bytes % ALIGNMENT == 0
