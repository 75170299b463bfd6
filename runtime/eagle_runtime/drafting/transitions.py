"""Transitions of a block head: what a token adds to the chances of the token after it.

A block head gives scores of every position, whatever stands at the one before. Its transitions are products of two
short vectors, one of the token before and one of the token itself (DSpark's vanilla Markov head). Of a position given a
token, two kinds of candidates are looked at: the position's own likeliest tokens, and those that it adds most to.

Shapes: V tokens of the target, Vd of the draft vocabulary, r rank, S successors, n tokens, k candidates of a position.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.errors import BundleError
from eagle_runtime.base.tree import Float, Int

LEAST_LEFT = 1e-6  # probability of all tokens that are no candidates, at least: a sum of 1 rounds
LOWEST = np.float32(-1e9)  # score of a token that is no candidate


@dataclass(frozen=True, slots=True)
class Transitions:
    """before [V, r], after [Vd, r]: vectors in fp16; successors [V, S]: draft ids, and what their products add [V, S];
    target_ids [Vd]: of draft ids; draft_ids [V]: the reverse, 0 for tokens that the head does not know."""

    before: npt.NDArray[np.float16]
    after: npt.NDArray[np.float16]
    successors: npt.NDArray[np.int32]
    added: npt.NDArray[np.float16]
    target_ids: Int
    draft_ids: Int

    def given(self, tokens: Int, scores: Float, likeliest: Int) -> tuple[Int, Float]:
        """Returns the likeliest tokens [n, k] of a position after each of `tokens` [n], best first, and their
        log-probabilities [n, k]. scores [Vd]: log-probabilities without transitions; likeliest [k]: the target's ids of
        the best of them.

        Tokens that are no candidates keep their share: a transition is taken to leave them alone."""
        own = self.draft_ids[likeliest]
        known = np.zeros(len(scores), np.bool_)
        known[own] = True
        others = self.successors[tokens]
        ids = np.concatenate([np.broadcast_to(own, (len(tokens), len(own))), others], 1)
        plain = scores[ids]
        plain[:, len(own) :][known[others]] = LOWEST  # twice among the candidates
        # Vectors of own candidates are read once for all tokens; those of successors would be read for each.
        products = self.before[tokens].astype(np.float32) @ self.after[own].astype(np.float32).T
        added = np.concatenate([products, self.added[tokens]], 1, dtype=np.float32)
        left = np.maximum(1 - np.exp(plain).sum(1, keepdims=True), LEAST_LEFT)
        with np.errstate(over="ignore", invalid="ignore"):  # scores of a broken head; its caller looks at the result
            raised = plain + added
            highest = raised.max(1, keepdims=True)
            total = highest + np.log(np.exp(raised - highest).sum(1, keepdims=True) + left * np.exp(-highest))
            order = np.argsort(-raised, axis=1, kind="stable")[:, : len(own)]
            chances = np.take_along_axis(raised - total, order, 1)
        return self.target_ids[np.take_along_axis(ids, order, 1)], chances


def read_transitions(content: bytes, vocab: int, draft_vocab: int, where: str) -> Transitions:
    """content: of the file that eagle_export.graphs.block_graph writes. Raises BundleError for one that does not
    fit the vocabularies."""
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        stored = load(content)
        names = ("before", "after", "successors", "added", "target_ids")
        before, after, successors, added, target_ids = (stored[name] for name in names)
        fits = (
            [part.dtype.name for part in (before, after, successors, added, target_ids)]
            == ["float16", "float16", "int32", "float16", "int64"]
            and before.shape == (vocab, after.shape[1])
            and after.shape[:1] == target_ids.shape == (draft_vocab,)
            and successors.shape[:1] == (vocab,)
            and added.shape == successors.shape
            and 0 <= successors.min() <= successors.max() < draft_vocab
            and 0 <= target_ids.min() <= target_ids.max() < vocab
        )
    except (SafetensorError, KeyError, IndexError, ValueError):
        fits = False
    if not fits:
        raise BundleError(f"{where} does not hold the transitions of this bundle's head; export the bundle again")
    draft_ids = np.zeros(vocab, np.int64)
    draft_ids[target_ids] = np.arange(draft_vocab)
    return Transitions(before, after, successors, added, target_ids, draft_ids)
