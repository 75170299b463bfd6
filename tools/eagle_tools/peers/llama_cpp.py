"""llama.cpp through llama-cpp-python's low-level functions, which spare the copies of logits that its `Llama` makes.

Lookup drafts with the package's LlamaPromptLookupDecoding, two tokens at most, as its README recommends for processors.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import llama_cpp
import numpy as np
from llama_cpp._internals import LlamaBatch, LlamaContext, LlamaModel
from llama_cpp.llama_speculative import LlamaPromptLookupDecoding

from eagle_tools.peers.engine import LOOKUP, Decoding, Logits

DRAFTED = 2  # tokens
PIECE = 64  # rows of a forward pass that scores, or reads a prompt whose logits are not needed


class LlamaCpp:
    """A GGUF file."""

    def __init__(self, path: Path, threads: int, context: int) -> None:
        llama_cpp.llama_backend_init()
        self._model = LlamaModel(path_model=str(path), params=llama_cpp.llama_model_default_params(), verbose=False)
        self.vocab_size = int(self._model.n_vocab())
        self._context, self._threads = context, threads
        self._caches: dict[str, Cache] = {}

    def decoding(self, mode: str, token_ids: Sequence[int], max_new_tokens: int) -> Decoding:
        cache = self._cache(mode)
        return _Decoding(
            cache, token_ids, LlamaPromptLookupDecoding(num_pred_tokens=DRAFTED) if mode == LOOKUP else None
        )

    def score(self, token_ids: Sequence[int]) -> Iterator[Logits]:
        cache = self._cache("score")
        for start in range(0, len(token_ids), PIECE):
            yield cache.forward(token_ids[start : start + PIECE], all_rows=True).copy()

    def pass_seconds(self, context: int, rows: int, count: int) -> list[float]:
        cache = self._cache("passes")
        cache.forward([index % self.vocab_size for index in range(context)], all_rows=False)
        times = []
        for _ in range(count):
            started = time.perf_counter()
            cache.forward([index % self.vocab_size for index in range(rows)], all_rows=True)
            times.append(time.perf_counter() - started)
            cache.keep(context)
        return times

    def _cache(self, use: str) -> Cache:
        """Returns the cache of one use, empty."""
        if use not in self._caches:
            self._caches[use] = Cache(self._model, self._threads, self._context, self.vocab_size)
        self._caches[use].keep(0)
        return self._caches[use]


class Cache:
    """A cache and what is in it."""

    def __init__(self, model: LlamaModel, threads: int, context: int, vocab_size: int) -> None:
        params: Any = llama_cpp.llama_context_default_params()
        params.n_ctx = params.n_batch = context
        params.n_threads = params.n_threads_batch = threads
        self._context = LlamaContext(model=model, params=params, verbose=False)
        self._batch = LlamaBatch(n_tokens=context, embd=0, n_seq_max=1, verbose=False)
        self._vocab_size = vocab_size
        self.length = 0

    def forward(self, tokens: Sequence[int], *, all_rows: bool) -> Logits:
        """Append tokens. Returns the logits after each, or after the last alone, valid until the next pass."""
        self._batch.set_batch(tokens, self.length, all_rows)
        self._context.decode(self._batch)
        self.length += len(tokens)
        rows = len(tokens) if all_rows else 1
        return np.ctypeslib.as_array(self._context.get_logits(), (rows, self._vocab_size))

    def keep(self, length: int) -> None:
        """Forget the tokens from position `length` on."""
        self._context.kv_cache_seq_rm(0, length, -1)
        self.length = length


class _Decoding:
    def __init__(self, cache: Cache, token_ids: Sequence[int], draft: Any) -> None:
        """draft: called with all tokens, returns drafted ones; or None."""
        self.passes = -1
        self._cache, self._tokens, self._draft = cache, list(token_ids), draft

    def advance(self) -> list[int]:
        self.passes += 1
        if not self.passes:
            new = [int(self._cache.forward(self._tokens, all_rows=False)[-1].argmax())]
        else:
            drafted = [] if self._draft is None else self._draft(np.array(self._tokens, np.intc)).tolist()
            before = len(self._tokens)
            best = self._cache.forward([self._tokens[-1], *drafted], all_rows=True).argmax(-1).tolist()
            accepted = next((i for i, token in enumerate(drafted) if token != best[i]), len(drafted))
            new = best[: accepted + 1]
            self._cache.keep(before + accepted)
        self._tokens += new
        return new
