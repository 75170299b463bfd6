"""A block head (eagle_export.heads.block): one forward pass proposes tokens for a whole run of positions.

To a drafter it is a head like any other. `catch_up` makes the pass; `feed` looks up what it has computed, so levels
below the root's children cost no pass. With transitions a node's children depend on its token, else on its depth
alone. Beyond the last drafted position nothing is proposed: log-probabilities of NEVER.

The features of verified rows are the keys and values that they have in the head's layers, made by the target's graph.
So drafted tokens leave nothing in the cache.

Shapes: B rows of a block, D drafted positions, k tokens per position.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from eagle_runtime.bundle.manifest import BlockSpec
from eagle_runtime.drafting.head import NEVER, Head, Proposal, States, Weigher
from eagle_runtime.session.protocol import Session
from eagle_runtime.target import causal, row_numbers
from eagle_runtime.tree import Float, Int, additive_mask


class BlockHead(Head):
    """A Head (head.py) that drafts in blocks."""

    free_levels = True

    def __init__(self, session: Session, capacity: int, scratch: int, block: BlockSpec, vocab_size: int) -> None:
        """As in Head. scratch: rows that a tree may be grown with; they take no room in the cache."""
        super().__init__(session, capacity, scratch, vocab_size)
        rows, first = row_numbers(block.size), 0 if block.anchor else 1
        self.rows = block.size
        self._ids = np.full(block.size, block.mask_id, np.int64)
        self._offsets = rows
        self._drafting = rows[first:]
        visible = causal(block.size) if block.causal else np.ones((block.size, block.size), np.bool_)
        self._mask = additive_mask(visible, session.inputs["tree_mask"].dtype)
        self._tokens: Int = np.empty((0, self.top_k), np.int64)  # [D, k] of the last pass
        self._log_probs: Float = np.empty((0, 1, self.top_k), np.float32)  # [D, k or 1, k]: given the token before
        self._position = 0  # that the root's children are for

    def catch_up(self, tokens: Sequence[int], weigher: Weigher | None = None) -> Proposal:
        """As in DraftHead."""
        _, features = self._to_read(tokens)
        root = self._first + self.cache.length + len(features)
        self._ids[0] = tokens[-1]
        if isinstance(features, np.ndarray):
            features = np.ascontiguousarray(features, self._feature_dtype)
        out: dict[str, Any] = self._session.run(
            {
                "input_ids": self._ids,
                "features": features,
                "position_ids": root + self._offsets,
                "tree_mask": self._mask,
                "logit_rows": self._drafting,
            },
            self.cache,
        )
        self.cache.advance(len(features))
        self._have_read()
        self._position = root + 1
        token_ids, log_probs = out["token_ids"], out["log_probs"]
        given = out["transitions"] if "transitions" in out else log_probs[:, None]
        self._tokens, self._log_probs = token_ids.copy(), given.copy()
        first = self._output_check.checked(token_ids[:1], log_probs[:1])
        return Proposal(*first, np.zeros(1, np.int64), self._position)

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        """As in DraftHead, without a forward pass. hidden: not looked at."""
        count, place = len(tokens), depth + 1
        position = self._position + place
        states = np.zeros(count, np.int64)
        if place >= len(self._tokens):
            never = np.full((count, self.top_k), NEVER, np.float32)
            return Proposal(np.zeros((count, self.top_k), np.int64), never, states, position)
        candidates, given = self._tokens[place], self._log_probs[place]
        if len(given) == 1:
            row, chances = self._output_check.checked(candidates[None], given)
            return Proposal(np.repeat(row, count, 0), np.repeat(chances, count, 0), states, position)
        matches = tokens[:, None] == self._tokens[depth]
        rows = matches.argmax(1)
        chances = np.where(matches.any(1)[:, None], given[rows], np.float32(NEVER))
        order = np.argsort(-chances, axis=1, kind="stable")
        ranked = self._output_check.checked(candidates[order], np.take_along_axis(chances, order, 1))
        return Proposal(*ranked, states, position)
