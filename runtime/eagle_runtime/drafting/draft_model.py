"""A small language model that drafts for a large one of the same vocabulary: speculative sampling (arXiv 2211.17192,
2302.01318), with trees in place of chains.

To a drafter it is a head like any other (head.DraftHead), but for two things: it needs no features of the large model,
and it reads the whole text, since a language model that has read only the end of one proposes badly.

Shapes: R rows that are proposed for, k proposed tokens per row, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle_runtime.base.tree import Bool, Float, Int
from eagle_runtime.core.decoding_state import common_prefix
from eagle_runtime.core.head import ForgettingHead, Proposal, Ranker, States
from eagle_runtime.core.target import Features, Target, row_numbers
from eagle_runtime.drafting.build import cost_aware_drafter, sequoia_drafter, shaped_drafter
from eagle_runtime.drafting.head import MOST_AHEAD, SCRATCH, OutputCheck, nothing
from eagle_runtime.drafting.method import Method, Trees

CHILDREN = 16  # tokens proposed per row: more than the ten of a beam


class DraftModelHead(ForgettingHead):
    """A DraftHead over the target of a second bundle, and what that has read of one text.

    Its cache holds a row of every token that it has read, the root's too. Where the text, or the tree with it, needs
    more rows than the cache has, it proposes nothing: NEVER."""

    most_ahead = MOST_AHEAD  # their rows stay, and are found again in the text that comes

    def __init__(self, model: Target) -> None:
        """model: the small one; its cache is this head's."""
        self._model = model
        self.cache = model.cache
        self.top_k = min(CHILDREN, model.vocab_size)
        self.scratch = SCRATCH
        self._read: list[int] = []  # tokens whose rows the cache holds, or held
        self._noted = 0  # rows of the text that the large model has verified: all tokens but the root
        self._tree = ROOT_ALONE
        self._output_check = OutputCheck(model.vocab_size)

    def note(self, features: Features) -> None:
        """As in DraftHead; their number is all that counts."""
        self._noted += len(features)

    @property
    def unread(self) -> int:
        return max(1, self._noted + 1 - self.cache.length)

    def truncate(self, length: int) -> None:
        self._noted = length
        self.cache.truncate(self.cache.reach(min(length, self.cache.length)))
        del self._read[self.cache.length :]

    def catch_up(self, tokens: Sequence[int], ranker: Ranker | None = None, rows: int | None = None) -> Proposal:
        """As in DraftHead, but reads the whole text."""
        if len(tokens) > self.cache.capacity:
            return nothing(1, self.top_k, len(tokens))
        kept = self.cache.reach(min(common_prefix(self._read, tokens), self.cache.length, len(tokens) - 1))
        self.cache.truncate(kept)
        del self._read[kept:]
        for start in range(kept, len(tokens), self._model.chunk):
            piece = tokens[start : start + self._model.chunk]
            logits, _ = self._model.read(piece)
            self._read += piece
        return self._proposal(logits, len(tokens))

    def read_ahead(self, tokens: Sequence[int], ahead: Sequence[int], rows: int | None = None) -> Proposal:
        return self.catch_up([*tokens, *ahead])

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        """As in DraftHead; `hidden` says nothing here. Each level is read together with those above it, in one pass:
        graphs whose attention is exact to the bit take no rows of a tree from the cache."""
        tree = self._tree if depth else ROOT_ALONE
        self._tree = tree = tree.with_level(tokens, parents, depth)
        if len(tree.tokens) > self.cache.room:
            return nothing(len(tokens), self.top_k, committed + depth + 1)
        new = row_numbers(len(tree.tokens))[-len(tokens) :]
        logits = self._model.look_at(tree.tokens, tree.depths, tree.visible, new)
        return self._proposal(logits, committed + depth + 1)

    def _proposal(self, logits: Any, position: int) -> Proposal:
        """logits [R, V], on the host or where the engine keeps them."""
        tokens, log_probs = self._output_check.checked(*likeliest(np.asarray(logits), self.top_k))
        return Proposal(tokens, log_probs, row_numbers(len(tokens)), position)


@dataclass(frozen=True, slots=True)
class _Grown:
    """A tree under the root that grows level by level. tokens, depths [N]: of its nodes, the root's children having
    depth 0; visible [N, N]: each node's row marks it and its ancestors."""

    tokens: Int
    depths: Int
    visible: Bool

    def with_level(self, tokens: Int, parents: Int, depth: int) -> _Grown:
        """Returns the tree with one more level. parents [T]: nodes, -1 under the root."""
        old, count = len(self.tokens), len(tokens)
        visible = np.eye(old + count, dtype=np.bool_)
        visible[:old, :old] = self.visible
        below = parents >= 0
        visible[old:][below, :old] = self.visible[parents[below]]
        depths = np.concatenate([self.depths, np.full(count, depth, np.int64)])
        return _Grown(np.concatenate([self.tokens, tokens]), depths, visible)


ROOT_ALONE = _Grown(row_numbers(0), row_numbers(0), np.zeros((0, 0), np.bool_))


def likeliest(logits: Float, count: int) -> tuple[Int, Float]:
    """logits [R, V] -> the `count` likeliest tokens of each row, best first, and their log-probabilities, both
    [R, count]. Rows that hold NaN or infinities give what OutputCheck makes harmless."""
    with np.errstate(all="ignore"):
        shifted = logits - logits.max(1, keepdims=True)
        log_sums = np.log(np.exp(shifted, dtype=np.float32).sum(1, keepdims=True))
        best = np.argpartition(shifted, -count, axis=1)[:, -count:]
        log_probs = np.take_along_axis(shifted, best, 1) - log_sums
        order = np.argsort(-log_probs, axis=1, kind="stable")
    return np.take_along_axis(best, order, 1).astype(np.int64), np.take_along_axis(log_probs, order, 1)


DRAFTS = "a smaller model's proposals (`--draft-bundle FOLDER`), in the trees of `eagle`"
DRAFT_MODEL = Method(
    "draft-model",
    (
        Trees(("cost-aware",), DRAFTS, cost_aware_drafter),
        Trees(("dynamic", "static", "chain"), "the same", shaped_drafter),
        Trees(("sequoia",), "the same", sequoia_drafter),
    ),
    proposer="draft model",
    any_shape=shaped_drafter,
    default="with a draft bundle",
    is_default=lambda loaded, fixed: "draft model" in loaded.per_row,
)
