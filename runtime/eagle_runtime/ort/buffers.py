"""Rows and caches in device memory, which ONNX Runtime allocates, copies and selects from, so that no other library is
needed. `device` is "cuda", or "cpu" to run the same code without a GPU."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Int
from eagle_runtime.core.cache import Cache
from eagle_runtime.core.session import Array
from eagle_runtime.ort import small_graphs
from eagle_runtime.ort.library import CPU, Providers, open_graph, run_graph

WORD = 4  # bytes; rows are moved in units of it
SPARE = 3  # rows after the last one, which may pad a forward pass to a multiple of four


@dataclass(frozen=True, slots=True)
class Block:
    """Memory as words. shape: its last dimension is the number of words in a row."""

    address: int
    shape: tuple[int, ...]


class OrtMemory:
    """Allocates and copies on one device, by small graphs. Its memory is freed with the last value allocated in it."""

    def __init__(self, device: str = "cpu", providers: Providers = CPU) -> None:
        self.device, self._providers = device, providers
        self._allocate, self._pick, self._move = map(
            self.open, (small_graphs.allocate, small_graphs.pick, small_graphs.move)
        )

    def open(self, graph: Callable[[], bytes]) -> Any:
        """Returns an InferenceSession on the device of one of small_graphs."""
        return open_graph(Path(graph.__name__), self._providers, 1, graph())

    def allocate(self, nbytes: int) -> Any:
        """Returns an OrtValue of `nbytes` zero bytes, a multiple of WORD."""
        return self._run(self._allocate, {"shape": np.array([nbytes // WORD])}, {}, self.device)

    def pick(self, rows: Block, index: Int, to: Block | None = None) -> Any:
        """Returns the rows index [m] of a block as a new OrtValue, or writes them to the block `to`."""
        return self._run(self._pick, {"index": index}, {"rows": rows}, self.device, to)

    def download(self, rows: Block) -> Array:
        """Returns a copy of a block on the host: uint8 [rows, bytes of a row]."""
        host = np.empty((rows.shape[0], rows.shape[1] * WORD), np.uint8)
        to = Block(host.ctypes.data, rows.shape)
        self._run(self._pick, {"index": np.arange(rows.shape[0])}, {"rows": rows}, "cpu", to)
        return host

    def move(self, cache: Block, index: Int, start: int) -> None:
        """Copy the rows index [m] of each of the A arrays of cache [A, n, words] to rows start, start + 1, ..."""
        arrays = np.arange(cache.shape[0])[:, None]
        places = np.stack(np.broadcast_arrays(arrays, start + np.arange(len(index))), -1)
        self._run(self._move, {"index": index, "places": places}, {"cache": cache}, self.device, cache)

    def _run(
        self, graph: Any, feeds: Mapping[str, Int], blocks: Mapping[str, Block], device: str, to: Block | None = None
    ) -> Any:
        """Returns the output. feeds: inputs on the host; blocks: inputs on the device. to: where the output is written,
        on `device`; None lets ONNX Runtime allocate it there."""
        binding = graph.io_binding()
        host = {name: np.ascontiguousarray(value, np.int64) for name, value in feeds.items()}
        for name, value in host.items():
            binding.bind_input(name, "cpu", 0, np.int64, value.shape, value.ctypes.data)
        for name, block in blocks.items():
            binding.bind_input(name, self.device, 0, np.float32, block.shape, block.address)
        (output,) = graph.get_outputs()
        if to is None:
            binding.bind_output(output.name, device)
        else:
            binding.bind_output(output.name, device, 0, np.float32, to.shape, to.address)
        run_graph(graph, binding)
        return binding.get_outputs()[0]


class OrtRows:
    """Rows [n, width] on a device (protocol.Rows). A slice shares memory with these, rows of an index array are a copy.

    spare: number of rows after the last one, in the same memory, that hold finite numbers."""

    def __init__(
        self, memory: OrtMemory, value: Any, count: int, width: int, dtype: npt.DTypeLike, first: int, spare: int
    ) -> None:
        """value: the OrtValue that holds the rows; first: index of the first one in it."""
        self._memory, self._value, self._first = memory, value, first
        self._count, self._width, self._dtype, self._spare = count, width, np.dtype(dtype), spare

    @property
    def address(self) -> int:
        """Address of the first row, on the device."""
        return int(self._value.data_ptr()) + self._first * self._width * self._dtype.itemsize

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: slice | npt.NDArray[np.int64], /) -> OrtRows:
        if not isinstance(index, slice):
            return self._picked(np.arange(self._count)[index])
        start, stop, step = index.indices(self._count)
        assert step == 1
        count = max(0, stop - start)
        spare = self._count + self._spare - start - count
        return OrtRows(self._memory, self._value, count, self._width, self._dtype, self._first + start, spare)

    def with_spare(self, spare: int) -> OrtRows:
        """Returns these rows, or a copy of them, with at least `spare` rows after the last one."""
        return self if spare <= self._spare else self._picked(np.arange(self._count))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        host = self._memory.download(self._block)
        return host.view(self._dtype).astype(dtype or self._dtype, copy=False)

    @classmethod
    def joined(cls, parts: Sequence[OrtRows]) -> OrtRows:
        """Returns the parts, concatenated. A single part is returned as it is, since its memory is not written
        again."""
        first, total = parts[0], sum(map(len, parts))
        if len(parts) == 1:
            return first
        words = first._block.shape[1]
        value = first._memory.allocate((total + SPARE) * words * WORD)
        address = int(value.data_ptr())
        for part in parts:
            index = np.arange(len(part))
            if part is parts[-1]:
                index = _with_spare(index)
            part._memory.pick(part._block, index, Block(address, (len(index), words)))
            address += len(part) * words * WORD
        return cls(first._memory, value, total, first._width, first._dtype, 0, SPARE)

    @property
    def _block(self) -> Block:
        return Block(self.address, (self._count, self._width * self._dtype.itemsize // WORD))

    def _picked(self, index: Int) -> OrtRows:
        value = self._memory.pick(self._block, _with_spare(index))
        return OrtRows(self._memory, value, len(index), self._width, self._dtype, 0, SPARE)


def _with_spare(index: Int) -> Int:
    """Returns the index with its last entry repeated SPARE times: copies of a row are finite too."""
    return np.concatenate([index, np.repeat(index[-1:], SPARE)])


class OrtCache(Cache):
    """2 * layers arrays of capacity + SPARE rows each: keys of layer i at 2i, values at 2i + 1."""

    def __init__(
        self, memory: OrtMemory, layers: int, capacity: int, kv_heads: int, head_dim: int, dtype: npt.DTypeLike
    ) -> None:
        super().__init__(capacity)
        self.row_bytes = kv_heads * head_dim * np.dtype(dtype).itemsize
        self._memory = memory
        self._shape = (2 * layers, capacity + SPARE, self.row_bytes // WORD)
        self._value: Any = memory.allocate(2 * layers * (capacity + SPARE) * self.row_bytes)

    @property
    def addresses(self) -> list[int]:
        """Address of the first row of each array."""
        start = int(self._value.data_ptr())
        return [start + array * self._shape[1] * self.row_bytes for array in range(self._shape[0])]

    def gather(self, path: Int) -> None:
        self._memory.move(Block(self.addresses[0], self._shape), self.length + path, self.length)

    def close(self) -> None:
        """Free the rows."""
        self._value = None
