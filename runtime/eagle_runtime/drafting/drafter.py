"""Drafters: anything that proposes a tree under the last token. The verifier never knows which.

A new kind of drafter is a class with `grow`; nothing else in the loop changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from eagle_runtime.target import Features
from eagle_runtime.tree import Tree, root_only


class Drafter(Protocol):
    """Proposes what may follow."""

    def grow(self, tokens: Sequence[int], features: Features, max_nodes: int) -> Tree:
        """A tree of at most max_nodes nodes whose root is tokens[-1].

        tokens: all so far, prompt included. features [n, Hd]: the target's, of the n positions before the root
        that were verified since the last call (all of the prompt on the first). max_nodes >= 2."""


class NoDraft:
    """Drafts nothing: vanilla decoding through the same loop, sampler and stop code."""

    def grow(self, tokens: Sequence[int], features: Features, max_nodes: int) -> Tree:
        return root_only(tokens[-1])
