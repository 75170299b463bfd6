"""GPU memory (Device, Block), rows in it (DeviceRows) and the key/value cache (DeviceCache), whichever library
computes.

All work is queued on one stream and runs in that order. So a copy reads what was queued before it, and memory can be
reused as soon as its last use is queued.
"""

from __future__ import annotations

import ctypes
import itertools
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.errors import call_all
from eagle_runtime.base.tree import Int
from eagle_runtime.core.cache import ALIGNMENT, Cache
from eagle_runtime.trt.driver import CudaDriver
from eagle_runtime.trt.fixed_shapes import PAST_STEP, round_up

SLACK = 64  # rows after a cache's capacity: an accepted path comes with up to padding.KEPT_ROWS rows that are no rows
SMALLEST = 1 << 12  # bytes; blocks for rows have sizes of powers of two, at least this; chosen


class Device:
    """A GPU's memory and stream, shared by the sessions that exchange rows, and freed when the last one closes."""

    def __init__(self, driver: CudaDriver, users: int = 1) -> None:
        self.driver = driver
        self.stream = driver.create_stream()
        self._users = users
        self._addresses: set[int] = set()
        self._pinned: list[int] = []
        self._spare: dict[int, list[int]] = defaultdict(list)  # size -> addresses

    def reserve(self, nbytes: int) -> int:
        """Returns the address of memory that lasts until the device closes, 256-byte aligned; 0 for no bytes."""
        if nbytes == 0:
            return 0
        address = self.driver.allocate(nbytes)
        self._addresses.add(address)
        return address

    def reserve_host(self, nbytes: int) -> npt.NDArray[np.uint8]:
        """Returns page-locked host memory that lasts until the device closes."""
        address = self.driver.allocate_host(nbytes)
        self._pinned.append(address)
        return np.ctypeslib.as_array((ctypes.c_uint8 * nbytes).from_address(address))

    def take(self, nbytes: int) -> Block:
        """Returns a block that is reused for other rows when its last reference is gone."""
        size = max(SMALLEST, 1 << (nbytes - 1).bit_length())
        spare = self._spare[size]
        return Block(self, spare.pop() if spare else self.reserve(size), size, reused=True)

    def give_back(self, block: Block) -> None:
        """Keep the block's memory for reuse, or free it. Does nothing after the device has closed, which freed it."""
        if self._users > 0 and block.reused:
            self._spare[block.size].append(block.address)
        elif self._users > 0:
            self.wait()
            self._addresses.remove(block.address)
            self.driver.free(block.address)

    def wait(self) -> None:
        """Wait until all queued work is done."""
        self.driver.synchronize(self.stream)

    def release(self) -> None:
        """Called by each session as it closes; the last call frees all memory, and then raises the first error."""
        self._users -= 1
        if self._users == 0:
            driver = self.driver
            call_all(
                [
                    self.wait,
                    *(partial(driver.free, address) for address in self._addresses),
                    *(partial(driver.free_host, address) for address in self._pinned),
                    partial(driver.destroy_stream, self.stream),
                ]
            )


@dataclass(slots=True)
class Block:
    """Device memory in use. reused: whether it serves other rows afterwards instead of being freed."""

    device: Device
    address: int
    size: int
    reused: bool

    def __del__(self) -> None:
        self.device.give_back(self)


class DeviceRows:
    """Rows [n, width] on the device (protocol.Rows)."""

    def __init__(
        self, device: Device, address: int, count: int, width: int, dtype: npt.DTypeLike, block: Block | None = None
    ) -> None:
        """block: the memory that holds the rows, which they keep in use; None for memory that outlives them."""
        self.address = address
        self.dtype = np.dtype(dtype)
        self.row_bytes = width * self.dtype.itemsize
        self.nbytes = count * self.row_bytes
        self._device = device
        self._count = count
        self._width = width
        self._block = block

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: slice | Int, /) -> DeviceRows:
        if isinstance(index, slice):
            start, stop, step = index.indices(self._count)
            assert step == 1, "a slice of adjacent rows, or an array of indices"
            address = self.address + start * self.row_bytes
            return DeviceRows(self._device, address, max(0, stop - start), self._width, self.dtype, self._block)
        assert len(index) == 0 or (index.min() >= 0 and index.max() < self._count), "no such row"
        picked = empty_rows(self._device, len(index), self._width, self.dtype)
        for place, row, rows in runs(index):
            target, source = picked.address + place * self.row_bytes, self.address + row * self.row_bytes
            self._device.driver.copy(target, source, rows * self.row_bytes, self._device.stream)
        return picked

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        host = np.empty((self._count, self._width), self.dtype)
        if self.nbytes:
            self._device.driver.download(host.ctypes.data, self.address, self.nbytes, self._device.stream)
            self._device.wait()
        return host if dtype is None else host.astype(dtype, copy=False)


def empty_rows(device: Device, count: int, width: int, dtype: npt.DTypeLike) -> DeviceRows:
    """Returns rows in newly taken memory, with undefined content."""
    block = device.take(max(1, count * width * np.dtype(dtype).itemsize))
    return DeviceRows(device, block.address, count, width, dtype, block)


def joined_rows(device: Device, parts: Sequence[DeviceRows]) -> DeviceRows:
    """Returns a copy of the parts, concatenated: one or more, all of one width and type."""
    first = parts[0]
    joined = empty_rows(device, sum(map(len, parts)), first.row_bytes // first.dtype.itemsize, first.dtype)
    address = joined.address
    for part in parts:
        if part.nbytes:
            device.driver.copy(address, part.address, part.nbytes, device.stream)
        address += part.nbytes
    return joined


def runs(index: Int) -> list[tuple[int, int, int]]:
    """Returns index [n] as runs of consecutive rows: (position in index, first row, number of rows)."""
    starts = [0, *(np.flatnonzero(np.diff(index) != 1) + 1).tolist(), len(index)]
    return [(start, int(index[start]), stop - start) for start, stop in itertools.pairwise(starts) if start < stop]


@dataclass(frozen=True, slots=True)
class Staged:
    """Where an engine writes new keys and values: arrays of the same order as a cache's, `pitch` bytes apart."""

    address: int
    pitch: int

    @staticmethod
    def reserve(device: Device, arrays: int, rows: int, row_bytes: int) -> Staged:
        """Returns a place for `rows` rows of every array."""
        pitch = round_up(rows * row_bytes, ALIGNMENT)
        return Staged(device.reserve(arrays * pitch), pitch)

    def of(self, array: int) -> int:
        """Returns the address of an array's first row."""
        return self.address + array * self.pitch


class DeviceCache(Cache):
    """Key/value rows on the device: [2 * layers, rows, row_bytes], keys of layer i at 2i, values at 2i + 1. `staged`
    is where each forward pass writes its rows, from where the accepted ones are copied.

    There are at least SLACK rows more than `capacity`, in all a multiple of PAST_STEP. All are zero at first: a padded
    pass reads rows that were never written, and NaN there would spread even from masked columns (0 * NaN is NaN)."""

    in_place = False

    def __init__(self, device: Device, layers: int, capacity: int, row_bytes: int, staged: Staged) -> None:
        super().__init__(capacity)
        self._staged = staged
        self.arrays = 2 * layers
        self.row_bytes = row_bytes
        self.pitch = cache_rows(capacity) * row_bytes  # bytes from one array to the next
        self._device = device
        nbytes = self.arrays * self.pitch
        self._block = Block(device, device.reserve(nbytes), nbytes, reused=False)
        device.driver.clear(self._block.address, nbytes, device.stream)

    def address(self, array: int, row: int = 0) -> int:
        """Returns where a row of an array begins: 2i for the keys of layer i, 2i + 1 for its values."""
        return self._block.address + array * self.pitch + row * self.row_bytes

    def append(self, source: int, pitch: int, count: int, place: int = 0) -> None:
        """Copy `count` rows of every array to rows length + place, length + place + 1, ... source: address of those of
        the first array; pitch: bytes from there to those of the next."""
        target = self.address(0, self.length + place)
        nbytes, stream = count * self.row_bytes, self._device.stream
        self._device.driver.copy_2d(target, self.pitch, source, pitch, nbytes, self.arrays, stream)

    def gather(self, path: Int) -> None:
        """One copy per run of adjacent rows, for all layers."""
        for place, row, rows in runs(path):
            self.append(self._staged.address + row * self.row_bytes, self._staged.pitch, rows, place)


class FilledCache(DeviceCache):
    """A cache whose rows are copied to it from elsewhere: those that a block head's engine reads, the features of
    verified rows."""

    in_place = True

    def fill(self, features: DeviceRows) -> None:
        """Copy rows [n, Hd] of features to the rows after the committed ones. They begin with the keys of the first
        layer, its values, the keys of the second, ..."""
        driver, stream = self._device.driver, self._device.stream
        for array in range(self.arrays):
            target, source = self.address(array, self.length), features.address + array * self.row_bytes
            driver.copy_2d(target, self.row_bytes, source, features.row_bytes, self.row_bytes, len(features), stream)


def cache_rows(capacity: int) -> int:
    """Returns the number of rows in memory of a cache of this capacity."""
    return round_up(capacity + SLACK, PAST_STEP)
