"""Drafters propose a tree under the last token. The loop in generate.py verifies it and knows no kind of drafter.

A new kind of drafter is a class with `grow` and `learn`; nothing else in the loop changes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Protocol

from eagle_runtime.accept import Step
from eagle_runtime.drafting.costs.tables import CostSource
from eagle_runtime.drafting.costs.timer import CycleTimer
from eagle_runtime.target import Features
from eagle_runtime.tree import Tree, root_only


class Drafter(Protocol):
    """Proposes tokens that may follow, as a tree."""

    def grow(self, tokens: Sequence[int], features: Features, max_nodes: int) -> Tree:
        """Returns a tree of at most max_nodes nodes (2 or more) whose root is tokens[-1].

        tokens: all so far, prompt included. features [n, Hd]: the target's, of the n positions before the root
        that were verified since the last call (all of the prompt on the first)."""

    def learn(self, step: Step) -> None:
        """Called after every verification with what was accepted of the tree."""


class NoDraft:
    """Drafts nothing: vanilla decoding through the same loop, sampler and stop code."""

    def __init__(self, costs: CostSource | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """costs: learns what a verification without drafts costs."""
        self._timer = CycleTimer(costs, clock)

    def grow(self, tokens: Sequence[int], features: Features, max_nodes: int) -> Tree:
        """Returns the root alone."""
        self._timer.begin(len(tokens) - 1)
        return root_only(tokens[-1])

    def learn(self, step: Step) -> None:
        """Reports the cycle's seconds to the costs."""
        self._timer.end(1)
