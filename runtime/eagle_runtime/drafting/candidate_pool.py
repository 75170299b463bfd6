"""The nodes that a tree of one cycle is chosen from: what the head proposes, and what follows an n-gram match."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_runtime.base.tree import Float, Int
from eagle_runtime.drafting.acceptance import AcceptanceStats, match_kinds
from eagle_runtime.drafting.datastore import NOTHING, Continuations


class Pool:
    """Candidates under the root, parents before children.

    tokens [M]; parents [M] in the pool, -1 under the root; values [M]; log_probs [M]: the head's, given the parent,
    NaN for tokens that it did not propose; matches [M]: kinds of n-gram matches (acceptance.match_kinds), 0 for tokens
    of none. Each is a list of arrays, one per level or chain."""

    def __init__(self) -> None:
        self.tokens: list[Int] = []
        self.parents: list[Int] = []
        self.values: list[Float] = []
        self.log_probs: list[Float] = []
        self.matches: list[Int] = []
        self.size = 0

    def add(self, tokens: Int, parents: Int, values: Float, log_probs: Float, matches: Int) -> None:
        """Add one level, or a chain."""
        self.tokens.append(tokens)
        self.parents.append(parents)
        self.values.append(values)
        self.log_probs.append(log_probs)
        self.matches.append(matches)
        self.size += len(tokens)


class MatchedChain:
    """The tokens of an n-gram match, a chain under the root that may run along nodes of the head's tree.

    values [n]: log-chances; matches [n]: kinds (acceptance.match_kinds); in_pool: how many of its tokens are nodes of
    the pool so far, `node` being the last of them, -1 for the root; nodes: all of them."""

    def __init__(
        self,
        tokens: Sequence[int],
        length: int,
        acceptance: AcceptanceStats,
        shares: Float | None = None,
        branches: Continuations = NOTHING,
        weighed: bool = False,
    ) -> None:
        """length: tokens that match before the first. shares [n]: log-chances of each token in addition, if several
        may follow. branches: a tree whose main path begins with them. weighed: whether the head knows the match."""
        self.tokens = np.array(tokens, np.int64)
        self.matches = match_kinds(length + np.arange(len(tokens)))
        chances = acceptance.matched(self.matches) + (0 if shares is None else shares)
        self.values: Float = np.cumsum(chances, dtype=np.float32)
        self.in_pool, self.node = 0, -1
        self.nodes: list[int] = []
        self.weighed = weighed
        self._branches = branches

    @property
    def values_left(self) -> Float:
        """Values of the tokens that are not in the pool."""
        return self.values[self.in_pool :]

    def follow(self, tokens: Int, parents: Int, values: Float, matches: Int, first: int) -> None:
        """Look for the chain's next token in a new level of the pool, whose nodes begin at index `first`. The node that
        holds it gets its kind of match, and the higher of both values unless the head knows the match, in place."""
        if self.in_pool == len(self.tokens):
            return
        nodes = np.flatnonzero((parents == self.node) & (tokens == self.tokens[self.in_pool]))
        if len(nodes) == 0:
            return
        node, place = nodes[0], self.in_pool
        matches[node] = self.matches[place]
        self.values[place:] += max(np.float32(-np.inf if self.weighed else 0), values[node] - self.values[place])
        values[node] = self.values[place]
        self.node = first + int(node)
        self.nodes.append(self.node)
        self.in_pool += 1

    def append_to(self, pool: Pool) -> None:
        """Add the tokens that are not in the pool, under the last node that is."""
        count = len(self.values_left)
        if count > 0:
            parents = np.arange(pool.size - 1, pool.size - 1 + count)
            parents[0] = self.node
            self.nodes += range(pool.size, pool.size + count)
            no_log_probs = np.full(count, np.nan, np.float32)
            pool.add(self.tokens[self.in_pool :], parents, self.values_left, no_log_probs, self.matches[self.in_pool :])
        if len(self._branches.tokens) > len(self.tokens):
            self._add_branches(pool)

    def _add_branches(self, pool: Pool) -> None:
        """Add the branches' nodes next to the main path. Nothing is learned from them: the counts of matches are of
        single continuations."""
        hits, main = self._branches, self._branches.main_path()
        place = dict(zip(main, zip(self.nodes, self.values.tolist(), strict=True), strict=True))
        place[-1] = (-1, 0.0)
        others = [node for node in range(len(hits.tokens)) if node not in place]
        shares = hits.shares()
        for number, node in enumerate(others):
            above = place[int(hits.parents[node])]
            place[node] = (pool.size + number, above[1] + float(shares[node]))
        parents = np.array([place[int(hits.parents[node])][0] for node in others], np.int64)
        values = np.array([place[node][1] for node in others], np.float32)
        none = np.full(len(others), np.nan, np.float32)
        pool.add(hits.tokens[others], parents, values, none, np.zeros(len(others), np.int64))
