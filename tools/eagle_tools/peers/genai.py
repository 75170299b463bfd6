"""onnxruntime-genai: decoding with a folder that its model builder wrote.

Lookup is its n-gram decoding (microsoft/onnxruntime-genai, docs/SpeculativeDecoding.md) with adaptive drafts of at most
8 tokens."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime_genai as og

from eagle_tools.peers.engine import LOOKUP, Decoding, Logits

SPECULATIVE = {"ngram_size": 3, "max_draft_tokens": 8, "min_adaptive_k": 2}
PIECE = 64  # rows of a forward pass that scores
SPARE = 16  # positions after the last token, which a draft may write to


class GenAi:
    """A folder that the builder wrote."""

    def __init__(self, folder: Path, threads: int) -> None:
        config = og.Config(str(folder))
        settings = json.loads((folder / "genai_config.json").read_text(encoding="utf-8"))
        self.vocab_size = int(settings["model"]["vocab_size"])
        config.overlay(json.dumps({"model": {"decoder": {"session_options": {"intra_op_num_threads": threads}}}}))
        self._model = og.Model(config)

    def decoding(self, mode: str, token_ids: Sequence[int], max_new_tokens: int) -> Decoding:
        speculative = SPECULATIVE if mode == LOOKUP else {}
        return _Decoding(self._generator(len(token_ids) + max_new_tokens, speculative), token_ids, mode)

    def score(self, token_ids: Sequence[int]) -> Iterator[Logits]:
        generator = self._generator(len(token_ids), {})
        for start in range(0, len(token_ids), PIECE):
            generator.append_tokens(np.array(token_ids[start : start + PIECE], np.int32))
            yield np.array(generator.get_output("logits")[0], np.float32)

    def pass_seconds(self, context: int, rows: int, count: int) -> list[float]:
        generator = self._generator(context + rows, {})
        generator.append_tokens(np.arange(context, dtype=np.int32) % self.vocab_size)
        times = []
        for _ in range(count):
            started = time.perf_counter()
            generator.append_tokens(np.arange(rows, dtype=np.int32) % self.vocab_size)
            times.append(time.perf_counter() - started)
            generator.rewind_to(context)
        return times

    def _generator(self, length: int, speculative: dict[str, int]) -> Any:
        params = og.GeneratorParams(self._model)
        params.set_search_options(max_length=length + SPARE, do_sample=False)
        if speculative:
            params.set_speculative_options(**speculative)
        return og.Generator(self._model, params)


class _Decoding:
    """With lookup a forward pass may give several tokens, which the engine hands out one by one."""

    def __init__(self, generator: Any, token_ids: Sequence[int], mode: str) -> None:
        self._generator, self._token_ids, self._mode = generator, np.array(token_ids, np.int32), mode
        self._calls = 0

    @property
    def passes(self) -> int:
        if self._mode == LOOKUP:
            stats = self._generator.get_speculative_stats()
            return int(stats["target_forward_passes"] + stats["standard_fallback_steps"]) - 1
        return max(0, self._calls - 1)

    def advance(self) -> list[int]:
        if not self._calls:
            self._generator.append_tokens(self._token_ids)
        self._calls += 1
        self._generator.generate_next_token()
        return [int(self._generator.get_next_tokens()[0])]
