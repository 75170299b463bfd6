"""Key/value rows of one model: one allocation, a length, and the two ways to shorten it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

import numpy as np
import numpy.typing as npt

from eagle_runtime.tree import Int

ALIGNMENT = 256  # bytes; what TensorRT asks of a tensor address, and a cache line's multiple on CPUs
STEP = 64  # rows by which a cache's layout grows at least
SPARE = 16  # or by one row in so many


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """An uninitialised array whose first byte lies on an ALIGNMENT boundary. Pages are committed on first touch."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


class Cache(ABC):
    """How many rows there are, wherever they lie.

    Rows below `length` are committed; a pass writes its T new rows at length.., or beside the cache where it is not
    `in_place`, and leaves `length` alone until `advance` or `keep` says which of them stay. Only sessions write
    rows."""

    in_place: ClassVar[bool] = True

    def __init__(self, capacity: int) -> None:
        self.capacity = capacity
        self.length = 0

    @abstractmethod
    def gather(self, path: Int) -> None:
        """Copy the rows `path` of those just written to length.., all layers. path [n] ascends from 0, so that no row
        is overwritten before it is read."""

    @property
    def room(self) -> int:
        """Rows that can still be written."""
        return self.capacity - self.length

    def advance(self, count: int) -> None:
        """Settle the first `count` of the rows just written."""
        assert 0 <= count <= self.room
        if not self.in_place:
            self.gather(np.arange(count))
        self.length += count

    def keep(self, path: Int) -> None:
        """Settle the rows of an accepted path and drop the rest of the tree.

        path [a + 1]: ascending node indices of the tree just written at length.., the root (0) first."""
        count = len(path)
        assert count <= self.room and path[0] == 0
        if not self.in_place or path[-1] != count - 1:  # not already where they belong
            self.gather(path)
        self.length += count

    def truncate(self, length: int) -> None:
        """Forget every row from `length` on."""
        assert 0 <= length <= self.length
        self.length = length

    def pretend(self, length: int) -> None:
        """Take `length` rows for committed, whatever they hold: passes behind them take the time they always take."""
        assert 0 <= length <= self.capacity
        self.length = length


class KVCache(Cache):
    """On the host, row by row. rows [2 * layers, capacity, kv_heads, head_dim]: keys of layer i at 2i, values at 2i +
    1; heads: the addresses of each."""

    def __init__(
        self, layers: int, capacity: int, kv_heads: int, head_dim: int, dtype: npt.DTypeLike = np.float32
    ) -> None:
        super().__init__(capacity)
        self.layers = layers
        self.rows = aligned_empty((2 * layers, capacity, kv_heads, head_dim), dtype)
        self.heads = [self.rows.ctypes.data + index * self.rows.strides[0] for index in range(2 * layers)]

    def gather(self, path: Int) -> None:
        self.rows[:, self.length : self.length + len(path)] = self.rows[:, self.length + path]


class HeadMajorCache(Cache):
    """On the host, head by head, as exact attention reads it (eagle_export.recipes.attention).

    keys [layers, kv_heads, columns, head_dim] and values [layers, kv_heads, pieces, columns, head_dim / pieces] are
    laid out for `columns` >= 1 rows, and anew when more are committed: by steps of STEP rows or of one in SPARE, with
    which moving rows costs about as much per token as reading the columns behind them, which hold zeros. Rows that were
    just written lie in `written` [2 * layers, T, kv_heads, head_dim]."""

    in_place = False

    def __init__(
        self, layers: int, capacity: int, kv_heads: int, head_dim: int, pieces: int, dtype: npt.DTypeLike = np.float32
    ) -> None:
        super().__init__(capacity)
        self.layers = layers
        self._shapes = (kv_heads, 1, head_dim), (kv_heads, pieces, head_dim // pieces)
        self._most = -(-max(capacity, 1) // STEP) * STEP
        self._store = aligned_empty((2 * layers, kv_heads * self._most * head_dim), dtype)
        self._row = (kv_heads, head_dim)
        self._passing = aligned_empty((0,), dtype)
        self.written = self._passing.reshape(2 * layers, 0, *self._row)
        self._halves = self._laid_out(0)
        self._lay_out(1)

    @property
    def keys(self) -> npt.NDArray[np.generic]:
        return self._halves[0][:, :, 0]

    @property
    def values(self) -> npt.NDArray[np.generic]:
        return self._halves[1]

    @property
    def columns(self) -> int:
        return int(self._halves[0].shape[3])

    def expect(self, rows: int) -> None:
        """Make `written` as large as a pass of `rows` rows needs it."""
        if self.written.shape[1] != rows:
            shape = (2 * self.layers, rows, *self._row)
            if (size := int(np.prod(shape))) > self._passing.size:
                self._passing = aligned_empty((size,), self._passing.dtype)
            self.written = self._passing[:size].reshape(shape)

    def gather(self, path: Int) -> None:
        end = self.length + len(path)
        if end > self.columns:
            self._lay_out(end)
        rows = self.written[:, path]
        for half, shape, new in zip(self._halves, self._shapes, (rows[0::2], rows[1::2]), strict=True):
            half[:, :, :, self.length : end] = np.moveaxis(new.reshape(self.layers, len(path), *shape), 1, 3)

    def truncate(self, length: int) -> None:
        before = self.length
        super().truncate(length)
        if length == 0:
            self._lay_out(1)
        else:
            for half in self._halves:
                half[:, :, :, length:before] = 0

    def pretend(self, length: int) -> None:
        super().truncate(0)
        self._lay_out(max(length, 1))
        super().pretend(length)

    def _laid_out(self, columns: int) -> tuple[npt.NDArray[np.generic], ...]:
        """Keys and values [layers, kv_heads, pieces, columns, width]: they lie at the start of what is kept for
        them."""
        found = []
        for half, (heads, pieces, width) in enumerate(self._shapes):
            flat = self._store[half::2, : heads * pieces * columns * width]
            found.append(flat.reshape(self.layers, heads, pieces, columns, width))
        return tuple(found)

    def _lay_out(self, rows: int) -> None:
        """Make room for that many rows, and then some."""
        columns = min(-(-(rows + rows // SPARE) // STEP) * STEP, self._most)
        before, self._halves = self._halves, self._laid_out(columns)
        for old, new, (heads, pieces, _) in zip(before, self._halves, self._shapes, strict=True):
            for head in reversed(range(heads)):  # what lies furthest moves first, so that nothing is overwritten
                for piece in reversed(range(pieces)):
                    new[:, head, piece, : self.length] = old[:, head, piece, : self.length]
                    new[:, head, piece, self.length :] = 0
