"""Drafts of outputs that follow a grammar: only what it allows, and what it forces without asking the head.

A drafter sees the grammar through a grammar_lookahead.Lookahead. The sampler draws from the grammar's mask whatever
was drafted, so what is left out here changes the speed and never the output.

Shapes: R rows, k candidates per row, N tree nodes.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_runtime.base.tree import MAX_DEPTH, Float, Int, Tree, chain_of, subtree
from eagle_runtime.core.accept import Step
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.head import DraftHead, Proposal, States, Weigher
from eagle_runtime.core.target import Features
from eagle_runtime.drafting.head import NEVER
from eagle_runtime.sampling.grammar_lookahead import Lookahead


class ConstrainedHead:
    """A head whose proposals leave out what the grammar does not allow after each row's path."""

    def __init__(self, head: DraftHead, lookahead: Lookahead) -> None:
        self._head = head
        self._lookahead = lookahead
        self._paths: list[tuple[int, ...]] = []  # of the scratch rows of the tree that is growing
        self.cache, self.top_k, self.scratch = head.cache, head.top_k, head.scratch
        self.free_levels, self.row_counts = head.free_levels, head.row_counts

    def note(self, features: Features) -> None:
        """As in DraftHead."""
        self._head.note(features)

    @property
    def unread(self) -> int:
        """As in DraftHead."""
        return self._head.unread

    def catch_up(self, tokens: Sequence[int], weigher: Weigher | None = None, rows: int | None = None) -> Proposal:
        """As in DraftHead."""
        self._paths = []
        return self._masked(self._head.catch_up(tokens, weigher, rows), [()])

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        """As in DraftHead."""
        paths = [
            (*(self._paths[parent] if parent >= 0 else ()), token)
            for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True)
        ]
        self._paths += paths
        return self._masked(self._head.feed(tokens, hidden, parents, committed, depth), paths)

    def learn(self, token: int) -> None:
        """As in DraftHead."""
        self._head.learn(token)

    def _masked(self, proposal: Proposal, paths: Sequence[tuple[int, ...]]) -> Proposal:
        """Candidates that are not allowed come last, with NEVER; where there are some, the others' chances add up to 1,
        as the sampler's will nearly do."""
        tokens, log_probs = proposal.tokens.copy(), proposal.log_probs.copy()
        for row, path in enumerate(paths):
            allowed = self._lookahead.allowed(path, tokens[row])
            if allowed.all():
                continue
            order = np.argsort(~allowed, kind="stable")
            count = int(allowed.sum())
            tokens[row], log_probs[row] = tokens[row, order], log_probs[row, order]
            log_probs[row, count:] = NEVER
            if count:
                log_probs[row, :count] = _scaled_to_one(log_probs[row, :count])
        return Proposal(tokens, log_probs, proposal.hidden, proposal.position)


def _scaled_to_one(log_probs: Float) -> Float:
    """log_probs [k], best first -> the same plus a number, so that the probabilities add up to 1."""
    scaled: Float = np.minimum(log_probs - log_probs[0] - np.log(np.exp(log_probs - log_probs[0]).sum()), 0)
    return scaled


class ConstrainedDrafter:
    """Drafts the tokens that the grammar forces as a chain of its own, and lets another drafter draft where it leaves a
    choice. Where the grammar forces a token, no other can be drawn."""

    def __init__(self, drafter: Drafter, lookahead: Lookahead, prune: bool) -> None:
        """drafter: sees the same lookahead. prune: it does not, but learns nothing from nodes by their numbers, and its
        trees lose the nodes that the grammar does not allow."""
        self._drafter = drafter
        self._lookahead = lookahead
        self._prune = prune
        self._forced = False

    def grow(self, tokens: Sequence[int], features: Features, max_nodes: int) -> Tree:
        """As in Drafter."""
        self._lookahead.begin()
        forced = self._lookahead.forced(min(MAX_DEPTH, max_nodes - 1))
        self._forced = len(forced) > 0
        if self._forced:
            return chain_of(tokens[-1], forced)
        tree = self._drafter.grow(tokens, features, max_nodes)
        return pruned(tree, self._lookahead) if self._prune else tree

    def learn(self, step: Step) -> None:
        """A forced chain teaches nothing of the drafter; the rows wait until the head reads them, as in a pause."""
        if not self._forced:
            self._drafter.learn(step)


def constrained(drafter: Drafter, lookahead: Lookahead | None, *, prune: bool = False) -> Drafter:
    """Returns the drafter itself where there is no grammar, else as ConstrainedDrafter."""
    return drafter if lookahead is None else ConstrainedDrafter(drafter, lookahead, prune)


def pruned(tree: Tree, lookahead: Lookahead) -> Tree:
    """Returns the tree without the nodes that the grammar does not allow, and those below them."""
    paths: list[tuple[int, ...] | None] = [()]
    for node in range(1, tree.num_nodes):
        above = paths[tree.parents[node]]
        path = None if above is None else (*above, int(tree.tokens[node]))
        paths.append(path if path is not None and len(lookahead.cut(path)) == len(path) else None)
    kept = np.flatnonzero([path is not None for path in paths[1:]])
    if len(kept) == tree.num_nodes - 1:
        return tree
    return subtree(int(tree.tokens[0]), tree.tokens[1:], tree.parents[1:] - 1, tree.scores[1:], kept)
