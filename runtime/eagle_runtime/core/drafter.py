"""What the loop asks of whoever proposes trees. The loop in generate.py verifies them and knows no kind of drafter.

A new kind of drafter is a class with `grow` and `learn`; nothing else in the loop changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from eagle_runtime.base.tree import Float, Tree
from eagle_runtime.core.accept import Step
from eagle_runtime.core.target import Features


class Drafter(Protocol):
    """Proposes tokens that may follow, as a tree."""

    def grow(self, tokens: Sequence[int], features: Features, max_nodes: int) -> Tree:
        """Returns a tree of at most max_nodes nodes (2 or more) whose root is tokens[-1].

        tokens: all so far, prompt included. features [n, Hd]: the target's, of the n positions before the root
        that were verified since the last call (on the first, of the prompt's last positions: core.head.WINDOW or
        more, if it has so many)."""

    def learn(self, step: Step) -> None:
        """Called after every verification with what was accepted of the tree, and the logits of all its nodes."""


@runtime_checkable
class PromptLearner(Drafter, Protocol):
    """A drafter that learns from the target's logits after tokens of the prompt too."""

    def learn_prompt(self, tokens: Sequence[int], logits: Float) -> None:
        """Called for every part of the prompt that was read. tokens: the text up to its end; logits [R, V]: after the
        last R of them."""
