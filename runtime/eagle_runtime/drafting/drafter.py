"""Drafters propose a tree under the last token. The loop in generate.py verifies it and knows no kind of drafter.

A new kind of drafter is a class with `grow` and `learn`; nothing else in the loop changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

import numpy as np

from eagle_runtime.accept import Step
from eagle_runtime.arguments import short_repr
from eagle_runtime.errors import RequestError
from eagle_runtime.target import Features
from eagle_runtime.tree import Float, Tree


class Drafter(Protocol):
    """Proposes tokens that may follow, as a tree."""

    def grow(self, tokens: Sequence[int], features: Features, max_nodes: int) -> Tree:
        """Returns a tree of at most max_nodes nodes (2 or more) whose root is tokens[-1].

        tokens: all so far, prompt included. features [n, Hd]: the target's, of the n positions before the root
        that were verified since the last call (on the first, of the prompt's last positions: drafting.head.WINDOW
        or more, if it has so many)."""

    def learn(self, step: Step) -> None:
        """Called after every verification with what was accepted of the tree, and the logits of all its nodes."""


@runtime_checkable
class PromptLearner(Drafter, Protocol):
    """A drafter that learns from the target's logits after tokens of the prompt too."""

    def learn_prompt(self, tokens: Sequence[int], logits: Float) -> None:
        """Called for every part of the prompt that was read. tokens: the text up to its end; logits [R, V]: after the
        last R of them."""


class CheckedDrafter:
    """A drafter that the caller wrote. `grow` raises RequestError for a tree that cannot be verified, so that a wrong
    tree is an error and never another output."""

    def __init__(self, drafter: Drafter, vocab_size: int) -> None:
        if not all(callable(getattr(drafter, verb, None)) for verb in ("grow", "learn")):
            raise RequestError(
                f"drafter is {short_repr(drafter)}, but must be an object with the methods `grow` and `learn`"
            )
        self._drafter = drafter
        self._vocab_size = vocab_size

    def grow(self, tokens: Sequence[int], features: Features, max_nodes: int) -> Tree:
        """As in Drafter."""
        tree = self._drafter.grow([*tokens], features, max_nodes)  # a copy: the loop goes on with the list itself
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
        """As in Drafter."""
        self._drafter.learn(step)
