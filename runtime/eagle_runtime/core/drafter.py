"""What the loop asks of whoever proposes trees. The loop in generate.py verifies them and knows no kind of drafter.

A new kind of drafter is a class with `grow` and `learn`; nothing else in the loop changes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from eagle_runtime.base.tree import Float, Tree
from eagle_runtime.core.accept import Step
from eagle_runtime.core.session import SharedPass


class Drafter(Protocol):
    """Proposes tokens that may follow, as a tree. A drafter that derives from this class learns nothing of the prompt,
    unless it says otherwise.

    prompt_rows: rows of each part of the prompt whose logits `learn_prompt` gets, at most target.PROMPT_ROWS."""

    prompt_rows: int = 1

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        """Returns a tree of at most max_nodes nodes (2 or more) whose root is tokens[-1]. tokens: all so far, prompt
        included."""

    def reading(self, tokens: Sequence[int]) -> SharedPass | None:
        """Called before `grow`, with the same tokens. Returns the forward pass that `grow` would begin with, for the
        caller to run before, together with those of other texts; None where there is none."""
        return None

    def learn(self, step: Step) -> None:
        """Called after every verification with what was accepted of the tree, and the logits of all its nodes."""

    def learn_prompt(self, tokens: Sequence[int], logits: Float) -> None:
        """Called for every part of the prompt that was read. tokens: the text up to its end; logits [R, V]: after the
        last R of them."""
        return
