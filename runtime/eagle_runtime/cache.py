"""Key/value rows of one model: one allocation, a length, and the two ways to shorten it."""

from __future__ import annotations

from abc import ABC, abstractmethod

import numpy as np
import numpy.typing as npt

from eagle_runtime.tree import Int

ALIGNMENT = 256  # bytes; what TensorRT asks of a tensor address, and a cache line's multiple on CPUs


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """An uninitialised array whose first byte lies on an ALIGNMENT boundary. Pages are committed on first touch."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


class Cache(ABC):
    """How many rows there are, wherever they lie.

    Rows below `length` are settled; a pass writes its T new rows at length.. and leaves `length` alone until
    `advance` or `keep` says which of them stay. Only sessions write rows."""

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0

    @abstractmethod
    def gather(self, path: Int) -> None:
        """Copy rows length + path to length.., all layers. path [n] ascends from 0, so that no row is overwritten
        before it is read."""

    @property
    def room(self) -> int:
        """Rows that can still be written."""
        return self.capacity - self.length

    def advance(self, count: int) -> None:
        """Settle the first `count` of the rows just written."""
        assert 0 <= count <= self.room
        self.length += count

    def keep(self, path: Int) -> None:
        """Settle the rows of an accepted path and drop the rest of the tree.

        path [a + 1]: ascending node indices of the tree just written at length.., the root (0) first."""
        count = len(path)
        assert count <= self.room and path[0] == 0
        if path[-1] != count - 1:  # not already contiguous
            self.gather(path)
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        assert 0 <= length <= self.length
        self.length = length


class KVCache(Cache):
    """On the host. rows [2 * layers, capacity, kv_heads, head_dim]: keys of layer i at 2i, values at 2i + 1; heads: the
    addresses of each."""

    def __init__(
        self, layers: int, capacity: int, kv_heads: int, head_dim: int, dtype: npt.DTypeLike = np.float32
    ) -> None:
        super().__init__(capacity)
        self.layers = layers
        self.rows = aligned_empty((2 * layers, capacity, kv_heads, head_dim), dtype)
        self.heads = [self.rows.ctypes.data + index * self.rows.strides[0] for index in range(2 * layers)]

    def gather(self, path: Int) -> None:
        self.rows[:, self.length : self.length + len(path)] = self.rows[:, self.length + path]
