"""The key/value rows of one model: a fixed allocation, a length, and the ways to commit and drop rows."""

from __future__ import annotations

import math
import mmap
import sys
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Int

ROWS_AXIS = 1  # of the arrays that `Cache.read` returns
ALIGNMENT = 256  # bytes; what TensorRT requires of a tensor's address, and a multiple of cache lines on CPUs
STEP = 64  # a head-major layout grows by at least so many rows,
SPARE = 16  # or by one row in so many; chosen, for the reason that HeadMajorCache gives
FIRST = 256  # rows that a cache in host memory is allocated for at first, chosen; then it doubles
MAPPED = 1 << 20  # bytes of an array from which on, as chosen, it has memory of its own,
HUGE = 4 << 20  # and from which on in huge pages, as NumPy asks for them
# Bytes that a cache in host memory keeps from text to text, chosen. Memory that was given back and is taken anew comes
# in pages: 6 ms for 12 MB, in the midst of an answer. Where it stays, answers of 48 tokens to short and long prompts by
# turns take 4 % less time (SmolLM2-135M-Instruct in int4, AMD EPYC (Zen 4), 48 answers each).
KEPT = 32 << 20


def aligned_empty(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
    """Returns an uninitialised array whose first byte lies on an ALIGNMENT boundary. The operating system provides its
    pages when they are first written, and has those of a large array back as soon as nothing refers to it. Raises
    MemoryError."""
    nbytes = int(np.prod(shape, dtype=np.int64)) * np.dtype(dtype).itemsize
    raw = _mapped(nbytes) if nbytes >= MAPPED else np.empty(nbytes + ALIGNMENT, np.uint8)
    start = -raw.ctypes.data % ALIGNMENT
    return raw[start : start + nbytes].view(dtype).reshape(shape)


def _mapped(nbytes: int) -> npt.NDArray[np.uint8]:
    """Memory straight from the operating system. Caches grow and shrink all the time, in every thread of a server, and
    malloc would keep what they leave for each thread apart."""
    try:
        if sys.platform == "win32":
            memory = mmap.mmap(-1, nbytes)
        else:
            memory = mmap.mmap(-1, nbytes, mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError:
        raise MemoryError(f"{nbytes / 1e6:.1f} MB for keys and values cannot be allocated") from None
    if sys.platform == "linux" and nbytes >= HUGE:
        memory.madvise(mmap.MADV_HUGEPAGE)
    return np.frombuffer(memory, np.uint8)


Kind = tuple[tuple[int, ...], np.dtype[Any]]


class Cache(ABC):
    """The number of rows of a cache, wherever they are stored.

    Rows below `length` are committed. A forward pass writes its T new rows at length, length + 1, ... (or to a separate
    place if `in_place` is false) and leaves `length` alone, until `advance` or `keep` commits the rows that stay. Only
    sessions write rows."""

    in_place: bool = True

    def __init__(self, capacity: int) -> None:
        """capacity: rows at most; caches in host memory are allocated for fewer, and grow."""
        self.capacity = capacity
        self.length = 0
        self.watch_growth(None)

    def watch_growth(self, called: Callable[[int], None] | None) -> None:
        """called: with the bytes that are allocated next, before they are; None for nobody. Whoever watches has many
        caches, of which each would keep what its longest text took: so they keep nothing from text to text."""
        self._before_growth = called or (lambda nbytes: None)
        self._kept = 0 if called else KEPT  # bytes that a shorter text does not free

    @property
    def nbytes(self) -> int:
        """Bytes that are allocated; 0 for memory of a device, which the session reserves."""
        return 0

    @property
    def token_bytes(self) -> int:
        """Bytes of one row in all layers; 0 as above."""
        return 0

    def each(self) -> Iterator[Any]:
        """The caches that hold the rows: itself, or one for each shape of heads (mixed_cache.py)."""
        yield self

    def shrink(self) -> None:
        """Free what an empty cache does not need."""
        assert self.length == 0

    def fit(self, rows: int) -> None:
        """Free what a text of `rows` rows does not need, where that is half or more of what is allocated, and more than
        KEPT bytes are, or somebody watches growth. The committed rows, which are of that text, stay."""
        assert self.length <= rows

    def read(self, most: int | None = None) -> list[npt.NDArray[np.generic]]:
        """Returns a copy of the committed rows, or of the first `most` of them, a number that `reach` gives: arrays
        whose axis ROWS_AXIS counts rows, and then what else there is (StateCache.read). Caches of one class and model
        take them with `write`. Raises NotImplementedError for memory of a device."""
        raise NotImplementedError

    def write(self, arrays: Sequence[npt.NDArray[np.generic]]) -> None:
        """Replace all rows by those that `read` returned. Raises ValueError for arrays of other shapes or types."""
        raise NotImplementedError

    @property
    def kinds(self) -> list[Kind]:
        """Shape without the axis of rows, and type, of each array that `read` returns."""
        return []

    def rows_in(self, arrays: Sequence[npt.NDArray[np.generic]]) -> int:
        """Returns how many rows `write` would take from arrays. Raises ValueError for other shapes or types."""
        counts = {array.shape[ROWS_AXIS] for array in arrays if array.ndim > ROWS_AXIS}
        given = [(array.shape[:ROWS_AXIS] + array.shape[ROWS_AXIS + 1 :], array.dtype) for array in arrays]
        if len(counts) != 1 or given != self.kinds:
            raise ValueError(f"rows of shapes and types {given} do not fit a cache of {self.kinds}")
        return int(counts.pop())

    @abstractmethod
    def gather(self, path: Int) -> None:
        """Copy the rows `path` of those just written to length, length + 1, ..., in all layers. path [n] ascends from
        0, so that no row is overwritten before it is read."""

    @property
    def room(self) -> int:
        """Number of rows that can still be written."""
        return self.capacity - self.length

    def advance(self, count: int) -> None:
        """Commit the first `count` of the rows just written."""
        assert 0 <= count <= self.room
        if not self.in_place:
            self.gather(np.arange(count))
        self.length += count

    def keep(self, path: Int) -> None:
        """Commit the rows of an accepted path and drop the rest of the tree.

        path [a + 1]: ascending indices of nodes of the tree just written, starting with the root (0)."""
        count = len(path)
        assert count <= self.room and path[0] == 0
        if not self.in_place or path[-1] != count - 1:  # else they are already where they belong
            self.gather(path)
        self.length += count

    def computed(self) -> None:
        """Called after each forward pass."""
        return

    def mark(self) -> None:
        """Remember this place, to which `truncate` may be asked to go back."""
        return

    def reach(self, length: int) -> int:
        """Returns how many rows, `length` at most, `truncate` can leave: other ones can be read again alone."""
        return length

    def truncate(self, length: int) -> None:
        """Drop every row from `length` on. length: a number that `reach` gives."""
        assert 0 <= length <= self.length
        self.length = length

    def pretend(self, length: int) -> None:
        """Treat `length` rows as committed, whatever they hold, so that forward passes after them can be timed."""
        assert 0 <= length <= self.capacity
        self.length = length


class KVCache(Cache):
    """A cache in host memory, row by row. rows [2 * layers, allocated, kv_heads, head_dim]: keys of layer i at 2i,
    values at 2i + 1; addresses [2 * layers]: where each of these arrays begins."""

    def __init__(
        self, layers: int, capacity: int, kv_heads: int, head_dim: int, dtype: npt.DTypeLike = np.float32
    ) -> None:
        super().__init__(capacity)
        self.layers = layers
        self.rows = aligned_empty((2 * layers, min(FIRST, capacity), kv_heads, head_dim), dtype)

    @property
    def count(self) -> int:
        """Rows before those that the next pass writes."""
        return self.length

    @property
    def addresses(self) -> list[int]:
        """Where each array begins."""
        first, size = self.rows.ctypes.data, self.rows.strides[0]
        return [first + index * size for index in range(len(self.rows))]

    @property
    def nbytes(self) -> int:
        return self.rows.nbytes

    @property
    def token_bytes(self) -> int:
        per_array: int = self.rows.itemsize * math.prod(self.rows.shape[2:])
        return len(self.rows) * per_array

    def shrink(self) -> None:
        super().shrink()
        self._reallocate(0)

    def make_room(self, rows: int) -> None:
        """See that `rows` more rows can be written after the committed ones."""
        allocated = self.rows.shape[1]
        if (needed := self.length + rows) <= allocated:
            return
        allocated = max(needed, min(max(2 * allocated, FIRST), self.capacity))
        self._before_growth(self.token_bytes * allocated - self.rows.nbytes)
        self._reallocate(allocated)

    def fit(self, rows: int) -> None:
        super().fit(rows)
        needed = min(max(rows, FIRST), self.capacity)
        if 2 * needed <= self.rows.shape[1] and self.nbytes > self._kept:
            self._reallocate(needed)

    def _reallocate(self, allocated: int) -> None:
        arrays, _, *shape = self.rows.shape
        moved = aligned_empty((arrays, allocated, *shape), self.rows.dtype)
        moved[:, : self.length] = self.rows[:, : self.length]
        self.rows = moved

    @property
    def kinds(self) -> list[Kind]:
        return [((self.rows.shape[0], *self.rows.shape[2:]), self.rows.dtype)]

    def read(self, most: int | None = None) -> list[npt.NDArray[np.generic]]:
        count = self.length if most is None else min(most, self.length)
        return [self.rows[:, :count].copy()]

    def write(self, arrays: Sequence[npt.NDArray[np.generic]]) -> None:
        count = self.rows_in(arrays)
        self.length = 0
        self.make_room(count)
        self.rows[:, :count] = arrays[0]
        self.length = count

    def pretend(self, length: int) -> None:
        super().pretend(0)
        self.make_room(length)
        super().pretend(length)

    def gather(self, path: Int) -> None:
        self.rows[:, self.length : self.length + len(path)] = self.rows[:, self.length + path]


class NewRows:
    """Where forward passes write their rows before they are committed. The caches of a session share it: what a pass
    has written is committed or dropped before the next one runs."""

    def __init__(
        self, layers: int, shapes: Sequence[tuple[int, int, int]], dtypes: Sequence[np.dtype[np.generic]]
    ) -> None:
        """shapes: (kv_heads, pieces, width) of each array."""
        self._shapes = [(layers, heads, pieces * width) for heads, pieces, width in shapes]
        self._stores = [aligned_empty((0,), kind) for kind in dtypes]
        self._made_for: dict[int, tuple[list[npt.NDArray[np.generic]], tuple[int, ...]]] = {}  # of numbers of rows

    def of(self, rows: int) -> tuple[list[npt.NDArray[np.generic]], tuple[int, ...]]:
        """Returns the arrays [layers, rows, kv_heads, pieces * width] of a pass of so many rows, and where they begin
        and how many rows they have."""
        if rows not in self._made_for:
            shapes = [(layers, rows, heads, width) for layers, heads, width in self._shapes]
            if math.prod(shapes[0]) > self._stores[0].size:
                self._made_for.clear()
                pairs = zip(shapes, self._stores, strict=True)
                self._stores = [aligned_empty((math.prod(shape),), store.dtype) for shape, store in pairs]
            pairs = zip(shapes, self._stores, strict=True)
            arrays = [store[: math.prod(shape)].reshape(shape) for shape, store in pairs]
            self._made_for[rows] = arrays, (*(array.ctypes.data for array in arrays), rows)
        return self._made_for[rows]


class HeadMajorCache(Cache):
    """A cache in host memory with the rows of each attention head together, as exact attention reads them
    (eagle_export.recipes).

    It holds several arrays [layers, kv_heads, pieces, columns, width]: keys in one piece of head_dim and values in
    `pieces`; or, if dtype is int8, keys in head_dim pieces of one, values in one piece, and one fp32 scale per row of
    each. They are laid out for `columns` rows, 0 only after `shrink`. A portable graph reads all columns, so that those
    not yet committed hold zeros. When more rows are committed they are laid out anew, for STEP more rows or one more in
    SPARE: then moving rows costs about as much per token as reading unused columns. Native operators read committed
    columns alone and put new rows after them, so for these they are laid out for as many as are allocated. `written`
    holds the rows that a portable graph wrote last, as one array [layers, T, kv_heads, pieces * width] for each, in
    `new_rows`. past, new: where `arrays` and `written` begin, and their columns and rows; the same object as long as
    they stay there. `past` also has the bytes from a layer of each array to the next, which depend on what is
    allocated: memory of another size may come back at an address that was freed."""

    def __init__(
        self,
        layers: int,
        capacity: int,
        kv_heads: int,
        head_dim: int,
        pieces: int,
        dtype: npt.DTypeLike = np.float32,
        *,
        native: bool = False,
        new_rows: NewRows | None = None,
    ) -> None:
        """native: whether native operators compute the graph. new_rows: of another cache of the same session; None
        makes some."""
        super().__init__(capacity)
        self.in_place = native
        self._layers = layers
        self._most = -(-max(capacity, 1) // STEP) * STEP
        self._shapes = [(kv_heads, 1, head_dim), (kv_heads, pieces, head_dim // pieces)]
        dtypes = [np.dtype(dtype)] * 2
        if np.int8 in dtypes:
            self._shapes = [(kv_heads, head_dim, 1), (kv_heads, 1, head_dim), (kv_heads, 1, 1), (kv_heads, 1, 1)]
            dtypes += [np.dtype(np.float32)] * 2
        self._dtypes = dtypes
        self._reallocate(min(FIRST, self._most))
        self.new_rows = NewRows(layers, self._shapes, dtypes) if new_rows is None else new_rows
        self.written, self.new = self.new_rows.of(0)
        self._show(0)
        self.expect(0)

    @property
    def columns(self) -> int:
        return int(self.arrays[0].shape[3])

    @property
    def nbytes(self) -> int:
        return sum(store.nbytes for store in self._stores)

    @property
    def token_bytes(self) -> int:
        kinds = zip(self._shapes, self._dtypes, strict=True)
        return self._layers * sum(math.prod(shape) * kind.itemsize for shape, kind in kinds)

    def shrink(self) -> None:
        super().shrink()
        self._reallocate(0)
        self._show(0)

    @property
    def kinds(self) -> list[Kind]:
        return [((self._layers, *shape), kind) for shape, kind in zip(self._shapes, self._dtypes, strict=True)]

    def read(self, most: int | None = None) -> list[npt.NDArray[np.generic]]:
        count = self.length if most is None else min(most, self.length)
        return [np.moveaxis(array[:, :, :, :count], 3, ROWS_AXIS).copy() for array in self.arrays]

    def write(self, arrays: Sequence[npt.NDArray[np.generic]]) -> None:
        count = self.rows_in(arrays)
        self.truncate(0)
        self._lay_out(max(count, 1))
        for array, rows in zip(self.arrays, arrays, strict=True):
            array[:, :, :, :count] = np.moveaxis(rows, ROWS_AXIS, 3)
        self.length = count

    def expect(self, rows: int) -> None:
        """Give `written` the size that a forward pass over `rows` rows needs, and `arrays` a column at least."""
        if self.columns == 0:
            self._lay_out(1)
        if not self.in_place:
            self.written, self.new = self.new_rows.of(rows)

    def make_room(self, rows: int) -> None:
        """Have columns for `rows` rows that a pass is about to put there, if it does."""
        if self.in_place and self.length + rows > self.columns:
            self._lay_out(self.length + rows)

    def gather(self, path: Int) -> None:
        end = self.length + len(path)
        if self.in_place:
            for array in self._by_rows:
                array[:, self.length : end] = array[:, self.length + path]
            return
        if end > self.columns:
            self._lay_out(end)
        chosen: Int | slice = path if len(path) and path[-1] >= len(path) else slice(len(path))
        for array, shape, new in zip(self._by_rows, self._shapes, self.written, strict=True):
            array[:, self.length : end] = new[:, chosen].reshape(self._layers, len(path), *shape)

    def truncate(self, length: int) -> None:
        before = self.length
        super().truncate(length)
        if self.in_place:
            return
        if length == 0:
            self._lay_out(min(self.columns, 1))
        else:
            for array in self.arrays:
                array[:, :, :, length:before] = 0

    def fit(self, rows: int) -> None:
        super().fit(rows)
        needed = min(-(-max(rows, FIRST) // STEP) * STEP, self._most)
        if 2 * needed <= self._allocated and self.nbytes > self._kept:
            self._reallocate(needed)
            self._move(min(self.columns, needed))

    def pretend(self, length: int) -> None:
        super().truncate(0)
        self._lay_out(max(length, 1))
        super().pretend(length)

    def _show(self, columns: int) -> None:
        """Make the arrays views of the start of their storage, for so many columns."""
        arrays: list[npt.NDArray[np.generic]] = []
        for store, (heads, pieces, width) in zip(self._stores, self._shapes, strict=True):
            flat = store[:, : heads * pieces * columns * width]
            arrays.append(flat.reshape(self._layers, heads, pieces, columns, width))
        by_rows = [np.moveaxis(array, 3, ROWS_AXIS) for array in arrays]
        past = (*(array.ctypes.data for array in arrays), columns, *(array.strides[0] for array in arrays))
        self.arrays, self._by_rows, self.past = arrays, by_rows, past  # all or, after an interrupt, none

    def _reallocate(self, allocated: int) -> None:
        """Make the arrays' memory new, [layers, values] for so many columns of each."""
        sizes = [allocated * math.prod(shape) for shape in self._shapes]
        self._stores = [
            aligned_empty((self._layers, size), kind) for size, kind in zip(sizes, self._dtypes, strict=True)
        ]
        self._allocated = allocated

    def _lay_out(self, rows: int) -> None:
        """Lay the arrays out for at least `rows` rows, and some to spare."""
        columns = min(-(-(rows + rows // SPARE) // STEP) * STEP, self._most)
        if columns > self._allocated:
            allocated = max(columns, min(max(2 * self._allocated, FIRST), self._most))
            self._before_growth(self.token_bytes * (allocated - self._allocated))
            self._reallocate(allocated)
        if self.in_place:
            columns = self._allocated
            if columns == self.columns:
                return
        self._move(columns)

    def _move(self, columns: int) -> None:
        """Make the arrays views of their storage for so many columns, with the rows that they have. An interrupt leaves
        none."""
        before, length = self.arrays, self.length
        self.length = 0
        self._show(columns)
        for old, new, (heads, pieces, _) in zip(before, self.arrays, self._shapes, strict=True):
            for head in reversed(range(heads)):  # the last one moves first, so that nothing is overwritten
                for piece in reversed(range(pieces)):
                    new[:, head, piece, :length] = old[:, head, piece, :length]
                    if not self.in_place:
                        new[:, head, piece, length:] = 0
        self.length = length


class NoRows(Cache):
    """The cache of a graph that keeps no keys or values: a length and nothing else."""

    def gather(self, path: Int) -> None:
        """There is nothing to move."""

    def read(self, most: int | None = None) -> list[npt.NDArray[np.generic]]:
        return []

    def write(self, arrays: Sequence[npt.NDArray[np.generic]]) -> None:
        if arrays:
            raise ValueError(f"{len(arrays)} arrays of rows do not fit a cache without rows")
        self.length = 0
