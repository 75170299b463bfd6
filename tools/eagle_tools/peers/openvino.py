"""OpenVINO: decoding with a stateful model on its processor plugin, with the plugin's defaults.

On a processor that multiplies in bf16 the plugin does so by default, and the cache is in eight bits. Its own lookup
needs a pipeline with a tokenizer, so it is not compared."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import openvino as ov

from eagle_tools.peers.engine import Decoding, Logits

PIECE = 64  # rows of a forward pass that scores


class OpenVino:
    """A folder that `openvino_build` wrote."""

    def __init__(self, folder: Path, threads: int) -> None:
        settings = {"INFERENCE_NUM_THREADS": threads, "PERFORMANCE_HINT": "LATENCY"}
        self._model = ov.Core().compile_model(folder / "openvino_model.xml", "CPU", settings)

    def decoding(self, mode: str, token_ids: Sequence[int], max_new_tokens: int) -> Decoding:
        return _Decoding(_Text(self._model), token_ids)

    def score(self, token_ids: Sequence[int]) -> Iterator[Logits]:
        text = _Text(self._model)
        for start in range(0, len(token_ids), PIECE):
            yield text.forward(token_ids[start : start + PIECE]).copy()

    def pass_seconds(self, context: int, rows: int, count: int) -> list[float]:
        times = []
        for _ in range(count):
            text = _Text(self._model)
            text.forward([0] * context)
            started = time.perf_counter()
            text.forward([0] * rows)
            times.append(time.perf_counter() - started)
        return times


class _Text:
    """A request, whose state holds the tokens so far."""

    def __init__(self, model: Any) -> None:
        self._request = model.create_infer_request()
        self._length = 0

    def forward(self, tokens: Sequence[int]) -> Logits:
        """Append tokens; returns the logits after each, valid until the next pass."""
        before, self._length = self._length, self._length + len(tokens)
        feeds = {
            "input_ids": np.array([tokens], np.int64),
            "attention_mask": np.ones((1, self._length), np.int64),
            "position_ids": np.arange(before, self._length, dtype=np.int64)[None],
        }
        self._request.infer(feeds)
        logits: Logits = self._request.get_tensor("logits").data[0]
        return logits


class _Decoding:
    def __init__(self, text: _Text, token_ids: Sequence[int]) -> None:
        self.passes = -1
        self._text, self._next = text, list(token_ids)

    def advance(self) -> list[int]:
        self.passes += 1
        self._next = [int(self._text.forward(self._next)[-1].argmax())]
        return self._next
