"""A Gemma-4 assistant (eagle_export.heads.assistant), which attends to the target's own keys of verified tokens.

To a drafter it is a head like any other. The features of a verified row hold the keys and values that the target has of
it, and its cache keeps them. Rows of a growing tree see these alone, and all have the position of the tree's root.

Shapes: T rows of one forward pass, n rows of features.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from eagle_runtime.base.tree import Int
from eagle_runtime.core.head import WINDOW, Proposal, States
from eagle_runtime.core.session import SharedPass
from eagle_runtime.core.target import Features, Floating, row_numbers
from eagle_runtime.drafting.head import Head


class AssistantHead(Head):
    """A Head (head.py) whose positions are those of the text, since the target has rotated the keys by these."""

    most_ahead, keeps_ahead = 0, False

    def note(self, features: Features) -> None:
        """As in DraftHead. The rows that wait are read as soon as they are WINDOW, and none is left out: the target may
        attend to the first keys of a text wherever it is, and to keep a row's keys takes no computation."""
        for start in range(0, len(features), WINDOW):
            part = features[start : start + WINDOW]
            if self._unread + len(part) > WINDOW:
                self.catch_up([0] * self._unread)  # a token counts where something is drafted after it
            super().note(part)

    def reading(self, tokens: Sequence[int]) -> SharedPass | None:
        """None: windows are counted in the columns of one text's cache."""
        return None

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        """As in DraftHead. parents: not looked at, since no row sees another."""
        end = self.cache.length - committed + len(tokens)
        positions = np.full(len(tokens), self._first + committed, np.int64)
        unseen = self._scratch_masks[: len(tokens), :end]
        proposal = self._run(tokens, hidden, positions, unseen, row_numbers(len(tokens)))
        return replace(proposal, position=proposal.position + depth + 1)

    def _rows_to_read(self, ids: Int, features: Features) -> tuple[Int, Features, Int, Floating, Int]:
        ids, features, rows, mask, wanted = super()._rows_to_read(ids, features)
        return ids, features, self._first + rows + 1, mask, wanted

    def _proposal(self, positions: Int, out: Mapping[str, Any]) -> Proposal:
        return super()._proposal(positions - self._first - 1, out)
