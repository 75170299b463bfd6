"""The drafter of EAGLE's papers: a head's proposals in a tree of a fixed shape."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_runtime.accept import Step
from eagle_runtime.drafting.head import DraftHead
from eagle_runtime.drafting.shapes import TreeShape
from eagle_runtime.errors import RequestError
from eagle_runtime.target import Features
from eagle_runtime.tree import Tree


def check_children(top_k: int, children: int) -> None:
    """Raises RequestError for more children per node than the top_k tokens that a head returns per row."""
    if children > top_k:
        raise RequestError(
            f"the tree asks for {children} children per node, but the bundle's head computes {top_k}; lower draft_top_k"
        )


class EagleDrafter:
    """Grows the proposals of an EAGLE-1/2/3 head into a tree of a fixed shape. One object per generation: its first
    tree empties the head's cache."""

    def __init__(self, head: DraftHead, shape: TreeShape) -> None:
        check_children(head.top_k, shape.children)
        if shape.scratch > head.scratch:
            raise RequestError(
                f"growing the tree takes {shape.scratch} rows, but the head has room for {head.scratch}; "
                "lower depth or draft_top_k"
            )
        self._head = head
        self._shape = shape
        self._begun = False

    def grow(self, tokens: Sequence[int], features: Features, max_nodes: int) -> Tree:
        """As in Drafter."""
        if not self._begun:  # not before: until its first step another generation may have the cache
            self._begun = True
            self._head.cache.truncate(0)
        first = self._head.observe(tokens[len(tokens) - len(features) :], features)
        return self._shape.grow(self._head, tokens[-1], first, max_nodes)

    def learn(self, step: Step) -> None:
        """Tells the head what was emitted after the root."""
        self._head.learn(int(step.tokens[0]))
