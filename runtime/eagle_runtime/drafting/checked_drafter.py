"""Drafters that applications write: their trees are checked before they are verified."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_runtime.base.arguments import checked_int, short_repr
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.tree import Float, Tree
from eagle_runtime.core.accept import Step
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.target import PROMPT_ROWS


class CheckedDrafter(Drafter):
    """A drafter that the caller wrote. `grow` raises RequestError for a tree that cannot be verified, so that a wrong
    tree is an error and never another output."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        if not all(callable(getattr(drafter, verb, None)) for verb in ("grow", "learn")):
            raise RequestError(
                f"drafter is {short_repr(drafter)}, but must be an object with the methods `grow` and `learn`"
            )
        self._drafter = drafter
        self._vocab_size = vocab_size
        self.prompt_rows = checked_int("prompt_rows", getattr(drafter, "prompt_rows", 1), 1, PROMPT_ROWS)

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        tree = self._drafter.grow([*tokens], max_nodes)  # a copy: the loop goes on with the list itself
        ids, parents = np.asarray(tree.tokens, np.int64), np.asarray(tree.parents, np.int64)
        if not 1 <= len(ids) <= max_nodes or len(parents) != len(ids):
            raise RequestError(f"the drafter's tree has {len(ids)} nodes, but must have 1 to {max_nodes}")
        if ids[0] != tokens[-1]:
            raise RequestError(f"the root of the drafter's tree is {ids[0]}, but must be the last token, {tokens[-1]}")
        if parents[0] != -1 or (parents[1:] < 0).any() or (parents[1:] >= np.arange(1, len(ids))).any():
            raise RequestError("a node of the drafter's tree has no parent before it; number parents before children")
        if ids.min() < 0 or ids.max() >= self._vocab_size:
            raise RequestError(f"the drafter's tree holds an id outside the vocabulary of {self._vocab_size}")
        return Tree(ids, parents, np.asarray(tree.scores, np.float32))

    def learn(self, step: Step) -> None:
        self._drafter.learn(step)

    def learn_prompt(self, tokens: Sequence[int], logits: Float) -> None:
        if (learn := getattr(self._drafter, "learn_prompt", None)) is not None:
            learn([*tokens], logits)
