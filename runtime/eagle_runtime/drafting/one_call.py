"""A draft head whose engine grows a whole tree in one call (eagle_export.tensorrt.draft_graph).

To a drafter it is a head like any other. `catch_up` makes the call; `feed` looks up what the call has computed for a
node, so a drafter that walks the levels costs no forward pass. A node that did not grow children in the call has none
here: its proposals are NEVER. Which nodes grow children is decided by the chances that a ranker gives
(Ranker.weights), as it would be on the host.

Shapes: D levels below the root's children, k children per node, N = k + D k^2 candidates, C tokens that the head
proposes after the root, Vd tokens that it knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_runtime.base.tree import Float, Int
from eagle_runtime.core.head import Proposal, Ranker, States
from eagle_runtime.core.session import Drafted, OneCallSession, Weights
from eagle_runtime.drafting.head import NEVER, Head

UNWEIGHTED = Weights(np.array([1, 0, 0, 0, 0], np.float32))  # by the head's own log-probabilities


class OneCallHead(Head):
    """A Head (head.py) of such a session, which reads nothing ahead."""

    most_ahead = 0

    def __init__(self, session: OneCallSession, capacity: int, vocab_size: int = 2**62) -> None:
        """As in Head."""
        super().__init__(session, capacity, session.depth * session.top_k, vocab_size)
        self._engine = session
        self.top_k = session.top_k
        self._position = 0  # that the root's children are for
        self._children: tuple[Int, Float] = (np.empty((0, self.top_k), np.int64), np.empty((0, self.top_k), np.float32))
        self._row_of: dict[tuple[int, int], int] = {}  # (row of the parent, token) -> row of the token

    def catch_up(self, tokens: Sequence[int], ranker: Ranker | None = None, rows: int | None = None) -> Proposal:
        """As in DraftHead. The `hidden` of proposals numbers the rows of the call that made them: 0 the root's, then
        those of the tokens that grew children."""
        engine, self._position = self._engine, len(tokens)
        ids, features = self._to_read(tokens)
        weights = UNWEIGHTED
        if ranker is not None:
            weights = ranker.weights(self._position, engine.depth + 1, engine.known)
        for start in range(0, len(ids), engine.most_rows):
            piece = slice(start, start + engine.most_rows)
            drafted = engine.draft(ids[piece], features[piece], weights, self.cache)
            self.cache.advance(len(ids[piece]))
        self._have_read()
        self._hold(drafted)
        root = self._output_check.checked(drafted.root_tokens[None], drafted.root_log_probs[None])
        return Proposal(*root, np.zeros(1, np.int64), self._position)

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        """As in DraftHead, without a forward pass."""
        pairs = zip(np.asarray(hidden).tolist(), tokens.tolist(), strict=True)
        rows = np.array([self._row_of.get(pair, 0) for pair in pairs], np.int64)
        children, log_probs = self._children
        chances = np.where(rows[:, None] > 0, log_probs[rows - 1], np.float32(NEVER))
        return Proposal(children[rows - 1], chances, rows, self._position + 1 + depth)

    def _hold(self, drafted: Drafted) -> None:
        """Keep what a call returned for `feed`."""
        k, depth = self.top_k, self._engine.depth
        first, rest = drafted.tokens[:k], drafted.tokens[k:].reshape(depth * k, k)
        log_probs = drafted.log_probs[k:].reshape(depth * k, k)
        self._children = self._output_check.checked(np.ascontiguousarray(rest), log_probs)
        frontier = np.clip(drafted.frontier, 0, k * k - 1)  # a broken head computes anything
        above = k * np.arange(depth - 1)[:, None] + frontier // k  # rows of the parents, but one
        grown = np.concatenate([first, rest[above, frontier % k].ravel()])
        parents = np.concatenate([np.zeros(k, np.int64), 1 + above.ravel()])
        self._row_of = {pair: row for row, pair in enumerate(zip(parents.tolist(), grown.tolist(), strict=True), 1)}
