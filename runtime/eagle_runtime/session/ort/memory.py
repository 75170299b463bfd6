"""Rows that stay in a device's memory, which ONNX Runtime allocates, copies and picks from: no other library is
needed. `device` is "cuda", or "cpu" to run the very same code without a card."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.cache import Cache
from eagle_runtime.session.ort import row_graphs
from eagle_runtime.session.ort.session import CPU, Providers, open_graph, run_graph
from eagle_runtime.session.protocol import Array
from eagle_runtime.tree import Int

WORD = 4  # bytes; rows are moved in units of it
SPARE = 3  # rows that may be wanted behind the last one, to fill a pass up to a multiple of four


@dataclass(frozen=True, slots=True)
class Block:
    """Memory seen as words. shape: the last dimension is the words of a row."""

    address: int
    shape: tuple[int, ...]


class OrtMemory:
    """One device, on which graphs allocate and copy. Freed when nothing that was allocated with it is left."""

    def __init__(self, device: str = "cpu", providers: Providers = CPU) -> None:
        self.device = device
        self._allocate, self._pick, self._move = (
            open_graph(Path(graph.__name__), providers, 1, graph())
            for graph in (row_graphs.allocate, row_graphs.pick, row_graphs.move)
        )

    def allocate(self, nbytes: int) -> Any:
        """An OrtValue of `nbytes`, a multiple of WORD, all zero."""
        return self._run(self._allocate, {"shape": np.array([nbytes // WORD])})

    def pick(self, rows: Block, index: Int, to: Block | None = None) -> Any:
        """Rows index [m] of a block, as a new OrtValue or written to another block."""
        return self._run(self._pick, {"index": index}, {"rows": rows}, self.device, to)

    def download(self, rows: Block) -> Array:
        """A block on the host [rows, bytes of a row], as bytes."""
        host = np.empty((rows.shape[0], rows.shape[1] * WORD), np.uint8)
        to = Block(host.ctypes.data, rows.shape)
        self._run(self._pick, {"index": np.arange(rows.shape[0])}, {"rows": rows}, "cpu", to)
        return host

    def move(self, cache: Block, index: Int, start: int) -> None:
        """cache [A, n, words]: in each of the A arrays copy rows index [m] to start.. ."""
        arrays = np.arange(cache.shape[0])[:, None]
        places = np.stack(np.broadcast_arrays(arrays, start + np.arange(len(index))), -1)
        self._run(self._move, {"index": index, "places": places}, {"cache": cache}, self.device, cache)

    def _run(
        self,
        graph: Any,
        feeds: Mapping[str, Int],
        blocks: Mapping[str, Block] | None = None,
        device: str | None = None,
        to: Block | None = None,
    ) -> Any:
        """feeds: inputs on the host; blocks: on the device. to: where the output goes on `device`; without it ONNX
        Runtime allocates one, which is returned."""
        binding = graph.io_binding()
        host = {name: np.ascontiguousarray(value, np.int64) for name, value in feeds.items()}
        for name, value in host.items():
            binding.bind_input(name, "cpu", 0, np.int64, value.shape, value.ctypes.data)
        for name, block in (blocks or {}).items():
            binding.bind_input(name, self.device, 0, np.float32, block.shape, block.address)
        (output,) = graph.get_outputs()
        if to is None:
            binding.bind_output(output.name, self.device)
        else:
            binding.bind_output(output.name, device, 0, np.float32, to.shape, to.address)
        run_graph(graph, binding)
        return binding.get_outputs()[0]


class OrtRows:
    """Rows [n, width] on a device; see session.Rows. A slice shares memory with these, picked rows are a copy.

    spare: rows of finite numbers in the same memory right behind the last one."""

    def __init__(
        self, memory: OrtMemory, value: Any, count: int, width: int, dtype: npt.DTypeLike, first: int, spare: int
    ) -> None:
        """value: the OrtValue that holds the rows; first: where they start in it, in rows."""
        self._memory, self._value, self._first = memory, value, first
        self._count, self._width, self._dtype, self._spare = count, width, np.dtype(dtype), spare

    @property
    def address(self) -> int:
        """Of the first row, on the device."""
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
        """These rows, or a copy of them, with at least so many rows behind the last."""
        return self if spare <= self._spare else self._picked(np.arange(self._count))

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        host = self._memory.download(self._block)
        return host.view(self._dtype).astype(dtype or self._dtype, copy=False)

    @classmethod
    def joined(cls, parts: Sequence[OrtRows]) -> OrtRows:
        """One part below the other. A single part is returned as it is: nobody writes to it."""
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
    """The last one SPARE times more: a copy of a row is a finite row too."""
    return np.concatenate([index, np.repeat(index[-1:], SPARE)])


class OrtCache(Cache):
    """Keys of layer i at 2i, values at 2i + 1, each of capacity + SPARE rows, one behind the other."""

    def __init__(
        self, memory: OrtMemory, layers: int, capacity: int, kv_heads: int, head_dim: int, dtype: npt.DTypeLike
    ) -> None:
        super().__init__(capacity)
        self.row_bytes = kv_heads * head_dim * np.dtype(dtype).itemsize
        self._memory = memory
        self._shape = (2 * layers, capacity + SPARE, self.row_bytes // WORD)
        self._value: Any = memory.allocate(2 * layers * (capacity + SPARE) * self.row_bytes)

    @property
    def heads(self) -> list[int]:
        """Addresses of the first rows."""
        start = int(self._value.data_ptr())
        return [start + array * self._shape[1] * self.row_bytes for array in range(self._shape[0])]

    def gather(self, path: Int) -> None:
        self._memory.move(Block(self.heads[0], self._shape), self.length + path, self.length)

    def close(self) -> None:
        """Free the rows."""
        self._value = None
