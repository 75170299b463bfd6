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

import numpy as np

from eagle_runtime.base.tree import Bool, Float, Int, additive_mask
from eagle_runtime.bundle.manifest import BlockSpec
from eagle_runtime.core.head import Proposal, Ranker, States
from eagle_runtime.core.session import Session
from eagle_runtime.core.target import causal, row_numbers
from eagle_runtime.drafting.head import Head, nothing
from eagle_runtime.drafting.transitions import LOWEST, Transitions


class BlockHead(Head):
    """A Head (head.py) that drafts in blocks."""

    free_levels = True
    keeps_ahead = False

    def __init__(
        self,
        session: Session,
        capacity: int,
        scratch: int,
        block: BlockSpec,
        transitions: Transitions | None,
        vocab_size: int,
    ) -> None:
        """As in Head. scratch: rows that a tree may be grown with; they take no room in the cache."""
        super().__init__(session, capacity, scratch, vocab_size)
        self._ids = np.full(block.size, block.mask_id, np.int64)
        self._offsets = row_numbers(block.size)
        self._drafting = drafting_rows(block)
        self.most_ahead = len(self._drafting) - 1
        # Engines have a fixed number of rows, and rows that see later ones draft other tokens without them.
        fixed = isinstance(session.inputs["input_ids"].shape[1], int) or not block.causal
        self.row_counts = range(block.size if fixed else int(self._drafting[0]) + 1, block.size + 1)
        self._mask = additive_mask(seen_rows(block), session.inputs["tree_mask"].dtype)
        self._tokens: Int = np.empty((0, self.top_k), np.int64)  # [D, k] of the last pass
        self._log_probs: Float = np.empty((0, self.top_k), np.float32)  # [D, k], without transitions
        self._scores: Float = np.empty((0, 0), np.float32)  # [D, Vd]: the same of all tokens, where there are some
        self._transitions = transitions
        self._position = 0  # that the root's children are for

    def catch_up(self, tokens: Sequence[int], ranker: Ranker | None = None, rows: int | None = None) -> Proposal:
        return self.read_ahead(tokens, (), rows)

    def read_ahead(self, tokens: Sequence[int], ahead: Sequence[int], rows: int | None = None) -> Proposal:
        """As in DraftHead: the block is longer by the positions ahead, whose tokens it does not know."""
        _, features = self._to_read(tokens)
        root = self._first + self.cache.length + len(features)
        known = len(ahead)
        count = min((rows or self.row_counts[-1]) + known, self.row_counts[-1])
        self._ids[0] = tokens[-1]
        positions, mask = root + self._offsets[:count], self._mask[:count, :count]
        wanted = self._drafting[: count - int(self._drafting[0])]
        feeds = self._feeds(self._ids[:count], features, positions, mask, wanted)
        out = self._session.run(feeds, self.cache)
        self.cache.advance(len(features))
        self._have_read()
        self._position = root + 1 + known
        proposed, log_probs = self._output_check.checked(out["token_ids"], out["log_probs"])
        self._tokens, self._log_probs = proposed[known:], log_probs[known:]
        if self._transitions is not None:
            self._scores = np.clip(out["scores"][known:], LOWEST, 0)  # a copy
            if ahead:
                last = np.array(ahead[-1:], np.int64)
                children = self._transitions.given(last, self._scores[0], self._tokens[0])
                return Proposal(*self._output_check.checked(*children), np.zeros(1, np.int64), self._position)
        return Proposal(self._tokens[:1], self._log_probs[:1], np.zeros(1, np.int64), self._position)

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        """As in DraftHead, without a forward pass. hidden: not looked at."""
        count, place = len(tokens), depth + 1
        position = self._position + place
        if place >= len(self._tokens):
            return nothing(count, self.top_k, position)
        states = np.zeros(count, np.int64)
        if self._transitions is None:
            rows = np.full(count, place)
            return Proposal(self._tokens[rows], self._log_probs[rows], states, position)
        children = self._transitions.given(tokens, self._scores[place], self._tokens[place])
        return Proposal(*self._output_check.checked(*children), states, position)


def drafting_rows(block: BlockSpec) -> Int:
    """Returns the rows [D] of a block that draft, in the order of their positions."""
    return row_numbers(block.size)[0 if block.anchor else 1 :]


def seen_rows(block: BlockSpec) -> Bool:
    """Returns [B, B]: which rows of its block a row sees."""
    return causal(block.size) if block.causal else np.ones((block.size, block.size), np.bool_)
