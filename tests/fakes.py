"""A language model and a draft head that fit in a table, which implement the runtime's Session protocol.

Their key/value rows hold the tokens and positions that were fed, and each row's answer is a fixed pseudo-random
function of exactly the rows its mask shows it. So a wrong mask, position, `keep` or stale row is another prefix to
the fake as it would be to a network, and what it answers there has nothing to do with the right answer.

Shapes: T rows of one pass, P past rows, L masked columns, V vocabulary, k children per row. A *history* is
float32 [2, n]: tokens over positions, in cache order.
"""

from __future__ import annotations

import zlib
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from eagle_runtime.base.tree import Bool, Float
from eagle_runtime.bundle.manifest import TensorSpec
from eagle_runtime.core.cache import Cache, KVCache
from eagle_runtime.core.head import HeadOfText, Proposal
from eagle_runtime.core.session import Array, Session
from eagle_runtime.core.target import Features


def history_of(tokens: Sequence[int]) -> Float:
    """The history of a plain sequence: its tokens at positions 0, 1, 2, ..."""
    return np.array([tokens, range(len(tokens))], np.float32)


class Language(Protocol):
    """Anything that scores the token after a history."""

    @property
    def vocab_size(self) -> int: ...

    def logits(self, history: Float) -> Float:
        """history [2, n] -> [V]; not to be written to."""


class Table:
    """Normal logits of a given spread, drawn once for every history."""

    def __init__(self, vocab_size: int, seed: int, spread: float) -> None:
        self._vocab_size = vocab_size
        self._seed = seed
        self._spread = spread
        self._known: dict[bytes, Float] = {}

    @property
    def vocab_size(self) -> int:
        return self._vocab_size

    def logits(self, history: Float) -> Float:
        key = history.tobytes()
        if key not in self._known:
            rng = np.random.default_rng([self._seed, zlib.crc32(key)])
            self._known[key] = (self._spread * rng.standard_normal(self._vocab_size)).astype(np.float32)
        return self._known[key]


class Blend:
    """share * (one language) + (another): a drafter that knows the target well (share > 0) or tends to draft
    what the target avoids (share < 0)."""

    def __init__(self, share: float, one: Language, other: Language) -> None:
        self._share = share
        self._one = one
        self._other = other

    @property
    def vocab_size(self) -> int:
        return self._one.vocab_size

    def logits(self, history: Float) -> Float:
        mixed: Float = np.float32(self._share) * self._one.logits(history) + self._other.logits(history)
        return mixed


def rows_of(cache: Cache) -> Array:
    """All rows of a cache that lies row by row: [2 * layers, capacity, kv_heads, head_dim]."""
    assert isinstance(cache, KVCache)
    return cache.rows


class _FakeSession(Session):
    """What both fakes share: the cache, the mask, and outputs that do not outlive the next pass."""

    def __init__(self, row_width: int, inputs: Mapping[str, TensorSpec], outputs: Mapping[str, TensorSpec]) -> None:
        self._row_width = row_width
        self.inputs = inputs
        self.outputs = outputs
        self._returned: dict[str, Array] = {}

    def new_cache(self, capacity: int) -> KVCache:
        return KVCache(layers=1, capacity=capacity, kv_heads=1, head_dim=self._row_width)

    @abstractmethod
    def run(self, feeds: Mapping[str, Any], cache: KVCache) -> dict[str, Array]: ...

    def close(self) -> None:
        self._returned = {}

    def _append(self, keys: Array, values: Array, mask: Array, cache: KVCache) -> tuple[Float, Bool]:
        """Write rows after those of the cache; returns all rows [2, P + T, width] and who sees whom [T, P + T]."""
        count, columns = mask.shape
        total = cache.length + count
        assert count <= cache.room and count <= columns <= total and len(keys) == count
        cache.make_room(count)
        cache.rows[0, cache.length : total, 0] = keys
        cache.rows[1, cache.length : total, 0] = values
        visible = np.ones((count, total), np.bool_)
        visible[:, total - columns :] = mask == 0
        return cache.rows[:, :total, 0].astype(np.float32, copy=False), visible

    def _hand_out(self, outputs: dict[str, Array]) -> dict[str, Array]:
        """The arrays of the last pass are overwritten, as an engine that reuses its buffers does."""
        for array in self._returned.values():
            array.fill(-1)
        self._returned = outputs
        return outputs


class FakeTarget(_FakeSession):
    """A target that speaks a language. Its feature of a row is (token, position): all a row knows by itself."""

    def __init__(self, language: Language) -> None:
        self._language = language
        super().__init__(
            1,
            {
                "input_ids": TensorSpec("int64", (1, "T")),
                "position_ids": TensorSpec("int64", (1, "T")),
                "tree_mask": TensorSpec("float32", (1, 1, "T", "L")),
                "logit_rows": TensorSpec("int64", ("R",)),
            },
            {
                "logits": TensorSpec("float32", (1, "R", language.vocab_size)),
                "features": TensorSpec("float32", (1, "T", 2)),
            },
        )

    def run(self, feeds: Mapping[str, Any], cache: KVCache) -> dict[str, Array]:
        tokens, positions = feeds["input_ids"], feeds["position_ids"]
        rows, visible = self._append(tokens[:, None], positions[:, None], feeds["tree_mask"], cache)
        logits = [self._language.logits(rows[:, visible[row], 0]) for row in feeds["logit_rows"]]
        features = np.array([tokens, positions], np.float32).T
        return self._hand_out({"logits": np.array(logits), "features": features})


class FakeHead(_FakeSession):
    """A draft head that speaks a language of its own. Its hidden state of a row is the feature that the target
    would give the row's token: (token, position + 1)."""

    def __init__(self, language: Language, top_k: int) -> None:
        self._language = language
        self._top_k = top_k
        self._known: dict[bytes, tuple[Array, Float]] = {}
        super().__init__(
            2,
            {
                "input_ids": TensorSpec("int64", (1, "T")),
                "features": TensorSpec("float32", (1, "T", 2)),
                "position_ids": TensorSpec("int64", (1, "T")),
                "tree_mask": TensorSpec("float32", (1, 1, "T", "L")),
                "logit_rows": TensorSpec("int64", ("R",)),
            },
            {
                "log_probs": TensorSpec("float32", (1, "R", top_k)),
                "token_ids": TensorSpec("int64", (1, "R", top_k)),
                "hidden": TensorSpec("float32", (1, "R", 2)),
            },
        )

    def run(self, feeds: Mapping[str, Any], cache: KVCache) -> dict[str, Array]:
        tokens, positions = feeds["input_ids"], feeds["position_ids"]
        pairs = np.array([tokens, positions]).T
        rows, visible = self._append(feeds["features"], pairs, feeds["tree_mask"], cache)
        wanted = feeds["logit_rows"]
        proposals = [self._proposal(rows[:, seen]) for seen in visible[wanted]]
        return self._hand_out(
            {
                "token_ids": np.array([ids for ids, _ in proposals]),
                "log_probs": np.array([log_probs for _, log_probs in proposals]),
                "hidden": (pairs[wanted] + np.array([0, 1])).astype(np.float32),
            }
        )

    def _proposal(self, rows: Float) -> tuple[Array, Float]:
        """rows [2, n, 2]: (token, position) of the feature over (token, position) of the input -> the k best
        tokens and their log-probabilities [k]."""
        key = rows.tobytes()
        if key not in self._known:
            logits = self._language.logits(paired_history(rows)).astype(np.float64)
            log_probs = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
            best = np.argsort(-log_probs, kind="stable")[: self._top_k]
            self._known[key] = (best.astype(np.int64), log_probs[best].astype(np.float32))
        return self._known[key]


def paired_history(rows: Float) -> Float:
    """What a head's rows [2, n, 2] say: the first feature's token, then the token of every row, one position on. It
    is counted from the first feature, which may lie deep in a text.

    A row whose feature is not that of the token before it gets an impossible position, so it is another history."""
    rows = rows - np.array([[[0, rows[0, 0, 1]]], [[0, 0]]], np.float32)
    history = np.concatenate([rows[0, :1], rows[1] + np.array([0, 1], np.float32)]).T
    torn = np.any(rows[0] != history[:, :-1].T, axis=1)
    history[1, 1:][torn] = -1
    return np.ascontiguousarray(history)


def observed(head: HeadOfText, tokens: Sequence[int], features: Features) -> Proposal:
    """Lets a head read features [n, Hd]. tokens [n]: the token after each, the root last. Returns its proposal."""
    assert len(tokens) == len(features) > 0
    head.note(features)
    return head.catch_up(tokens)
