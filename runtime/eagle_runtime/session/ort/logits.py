"""Logits that stay in device memory (candidates.LogitRows), with ONNX Runtime."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.candidates import Candidates
from eagle_runtime.session.ort import small_graphs
from eagle_runtime.session.ort.library import open_graph, run_graph
from eagle_runtime.session.ort.memory import WORD, Block, OrtMemory
from eagle_runtime.tree import Float, Int

COUNT = 64  # candidates of a row, and watched tokens
GREEDY_COUNT = 8  # candidates where no tokens are watched, since the highest logit is the token


class OrtLogits:
    """The logits [R, V] of one forward pass, valid until the next."""

    def __init__(self, memory: OrtMemory, block: Block, known: Mapping[str, npt.NDArray[Any]], watched: Int) -> None:
        """block: the fp32 rows. known: outputs of small_graphs.candidates, and log_sum_exp [R]. watched [R, M]."""
        self._memory, self._block, self._known, self._watched = memory, block, known, watched

    def __len__(self) -> int:
        return self._block.shape[0]

    def __getitem__(self, row: int, /) -> OrtLogitRow:
        assert 0 <= row < len(self)
        known = self._known
        candidates = Candidates(
            ids=known["top_ids"][row].astype(np.int64),
            logits=known["top_logits"][row],
            log_sum_exp=float(known["log_sum_exp"][row]),
            watched_ids=self._watched[row],
            watched_logits=known["watched_logits"][row],
        )
        return OrtLogitRow(candidates, self, row)

    def rows(self, first: int, count: int) -> Float:
        """Returns a copy of some rows [count, V] on the host."""
        width = self._block.shape[1]
        block = Block(self._block.address + first * width * WORD, (count, width))
        rows: Float = self._memory.download(block).view(np.float32)
        return rows

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.rows(0, len(self)).astype(dtype or np.float32, copy=False)


class OrtLogitRow:
    """One row of OrtLogits (candidates.LogitRow)."""

    def __init__(self, candidates: Candidates, rows: OrtLogits, row: int) -> None:
        self.candidates = candidates
        self._rows, self._row = rows, row

    def whole(self) -> Float:
        """As in LogitRow."""
        row: Float = self._rows.rows(self._row, 1)[0]
        return row

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.whole().astype(dtype or np.float32, copy=False)


class LogitMemory:
    """Device memory for the logits of one forward pass, and the graph that finds their candidates."""

    def __init__(self, memory: OrtMemory, vocab_size: int) -> None:
        self._memory, self._vocab_size = memory, vocab_size
        self._graph = open_graph(Path("candidates"), memory.providers, 1, small_graphs.candidates())
        self._rows = 0
        self._value: Any = None

    def reserve(self, rows: int) -> Block:
        """Returns memory of [rows, V], the same in every forward pass unless more rows are needed."""
        if rows > self._rows:
            self._value = None  # freed before more is allocated
            self._value, self._rows = self._memory.allocate(rows * self._vocab_size * WORD), rows
        return Block(int(self._value.data_ptr()), (rows, self._vocab_size))

    def read(self, block: Block, watched: Int | None, inverse_temperature: npt.NDArray[np.float32]) -> OrtLogits:
        """Returns the logits of a block with their candidates. watched [R, M]: ids; None where the highest logit is the
        token."""
        rows = block.shape[0]
        count = min(GREEDY_COUNT if watched is None else COUNT, self._vocab_size)
        watched = np.zeros((rows, 1), np.int64) if watched is None else np.ascontiguousarray(watched, np.int64)
        feeds = {"count": np.array([count]), "first": np.zeros(1, np.int64), "watched": watched}
        binding = self._graph.io_binding()
        binding.bind_input("logits", self._memory.device, 0, np.float32, block.shape, block.address)
        for name, value in {**feeds, "inverse_temperature": inverse_temperature}.items():
            binding.bind_input(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)
        known: dict[str, npt.NDArray[Any]] = {
            "top_logits": np.empty((rows, count), np.float32),
            "top_ids": np.empty((rows, count), np.int32),
            "best_log_prob": np.empty((rows, 1), np.float32),
            "watched_logits": np.empty(watched.shape, np.float32),
        }
        for name, value in known.items():
            binding.bind_output(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)
        run_graph(self._graph, binding)
        with np.errstate(invalid="ignore", over="ignore"):
            best = known["top_logits"][:, 0] * inverse_temperature.astype(np.float64)
            known["log_sum_exp"] = best - known["best_log_prob"][:, 0]
        return OrtLogits(self._memory, block, known, watched)

    def close(self) -> None:
        """Free the memory."""
        self._value, self._rows = None, 0
