"""Logits that stay in device memory, with ONNX Runtime."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Float, Int
from eagle_runtime.ort import small_graphs
from eagle_runtime.ort.buffers import WORD, Block, OrtMemory
from eagle_runtime.ort.library import run_graph
from eagle_runtime.sampling.candidates import GREEDY_COUNT, DeviceLogits

COUNT = 64  # candidates of a row, more than the 50 of Hugging Face's usual top-k; and watched tokens


class LogitMemory:
    """Device memory for the logits of one forward pass, and the graph that finds their candidates."""

    def __init__(self, memory: OrtMemory, vocab_size: int) -> None:
        self._memory, self._vocab_size = memory, vocab_size
        self._graph = memory.open(small_graphs.candidates)
        self._rows = 0
        self._value: Any = None

    def reserve(self, rows: int) -> Block:
        """Returns memory of [rows, V], the same in every forward pass unless more rows are needed."""
        if rows > self._rows:
            self._value = None  # freed before more is allocated
            self._value, self._rows = self._memory.allocate(rows * self._vocab_size * WORD), rows
        return Block(int(self._value.data_ptr()), (rows, self._vocab_size))

    def read(self, block: Block, watched: Int | None, inverse_temperature: npt.NDArray[np.float32]) -> DeviceLogits:
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

        def fetch(first: int, count: int) -> Float:
            width = block.shape[1]
            part = Block(block.address + first * width * WORD, (count, width))
            rows: Float = self._memory.download(part).view(np.float32)
            return rows

        return DeviceLogits(block.shape[0], fetch, known, watched)

    def close(self) -> None:
        """Free the memory."""
        self._value, self._rows = None, 0
