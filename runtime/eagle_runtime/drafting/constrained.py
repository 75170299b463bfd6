"""Drafts of outputs that follow a grammar: only what it allows, and what it forces without asking the head.

A drafter sees the grammar through a grammar_lookahead.Lookahead. The sampler draws from the grammar's mask whatever
was drafted, so what is left out here changes the speed and never the output.

Shapes: R rows, k candidates per row, N tree nodes.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence

import numpy as np

from eagle_runtime.base.tree import MAX_DEPTH, Int, Tree, chain_of, node_depths, with_nodes
from eagle_runtime.core.accept import Step
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.head import WINDOW, DraftHead, Proposal, Ranker, States, WrappedHead
from eagle_runtime.drafting.head import NEVER
from eagle_runtime.sampling.grammar_matcher import Lookahead

LIKELY = float(np.log(0.5))  # of a path: below it what is forced after it is more likely lost than not


class ConstrainedHead(WrappedHead):
    """A head whose proposals leave out what the grammar does not allow after each row's path. What the grammar forces
    after the root it reads first, as if it were verified, and it proposes what comes after that."""

    def __init__(self, head: DraftHead, lookahead: Lookahead) -> None:
        super().__init__(head)
        self._lookahead = lookahead
        self._ahead = 0  # rows of them that the cache holds
        self._forced: tuple[int, ...] = ()  # after the root, of the tree that is growing
        self._paths: list[tuple[int, ...]] = []  # of the scratch rows of the tree that is growing

    @contextlib.contextmanager
    def after(self, forced: Sequence[int]) -> Iterator[bool]:
        """Within the block the text that `catch_up` gets ends with tokens that are forced after the root. Gives whether
        the head can read them; the rows of theirs are dropped at the block's end."""
        count = len(forced)
        able = count <= self._head.most_ahead
        if able and self._head.keeps_ahead:
            room = self.cache.capacity - self.cache.length - self.scratch
            able = self.unread + count <= min(WINDOW, room)
        self._forced, self._ahead = tuple(forced) if able else (), 0
        try:
            yield able
        finally:
            if self._ahead:
                self.cache.truncate(self.cache.length - self._ahead)
            self._forced = ()

    def catch_up(self, tokens: Sequence[int], ranker: Ranker | None = None, rows: int | None = None) -> Proposal:
        self._paths, forced = [], self._forced
        if forced:
            proposal = self._head.read_ahead(tokens[: -len(forced)], forced, rows)
            self._ahead = len(forced) if self._head.keeps_ahead else 0
        else:
            proposal = self._head.catch_up(tokens, ranker, rows)
        return self._masked(proposal, [()])

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        paths = [
            (*(self._paths[parent] if parent >= 0 else ()), token)
            for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True)
        ]
        self._paths += paths
        return self._masked(self._head.feed(tokens, hidden, parents, committed, depth), paths)

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
                left = log_probs[row, :count] - log_probs[row, 0]
                log_probs[row, :count] = np.minimum(left - np.log(np.exp(left).sum()), 0)
        return Proposal(tokens, log_probs, proposal.hidden, proposal.position)


class ConstrainedDrafter(Drafter):
    """Drafts the tokens that the grammar forces, and lets another drafter draft where it leaves a choice: after those
    that are forced after the root. Where its likely paths end, what is forced there is added. Where the grammar forces
    a token, no other can be drawn, so all this costs no draft."""

    def __init__(self, drafter: Drafter, lookahead: Lookahead, prune: bool, head: ConstrainedHead | None) -> None:
        """drafter: sees the same lookahead. prune: it does not, but learns nothing from nodes by their numbers, and its
        trees lose the nodes that the grammar does not allow. head: of the drafter, whose trees may then begin after
        what is forced; None drafts what is forced alone."""
        self._drafter = drafter
        self._lookahead = lookahead
        self._prune = prune
        self._head = head
        self._forced = 0  # nodes after the root that were forced
        self._own = 0  # nodes of the drafter's tree, its root included; 0 without one

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        self._lookahead.begin()
        forced = self._lookahead.forced(min(MAX_DEPTH, max_nodes - 1))
        self._forced, self._own = len(forced), 0
        if not forced:
            return self._drafted(tokens, max_nodes)
        if self._head is None or max_nodes - len(forced) < 2:
            return chain_of(tokens[-1], forced)
        with self._head.after(forced) as able:
            if not able:
                return chain_of(tokens[-1], forced)
            self._lookahead.begin(forced)
            drafted = self._drafted([*tokens, *forced], max_nodes - len(forced))
        if len(forced) + int(node_depths(drafted.parents).max()) > MAX_DEPTH:
            self._own = 0
            return chain_of(tokens[-1], forced)
        return joined(chain_of(tokens[-1], forced), drafted)

    def _drafted(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        """The drafter's tree, with what is forced after its likely ends."""
        tree = self._drafter.grow(tokens, max_nodes)
        if self._prune:
            tree = pruned(tree, self._lookahead)
        self._own = tree.num_nodes
        return with_forced_ends(tree, self._lookahead, max_nodes)

    def learn(self, step: Step) -> None:
        """The drafter learns of its own nodes; where it took no part, the rows wait until the head reads them, as in a
        pause."""
        forced, own = self._forced, self._own
        if own == 0 or len(step.path) <= forced:
            return
        path = step.path[forced:] - forced
        path = path[path < own]
        tokens = step.tokens[forced : forced + len(path)]
        logits = step.logits if step.nodes == own else None
        if logits is None and isinstance(step.logits, np.ndarray):
            logits = step.logits[forced : forced + own]
        self._drafter.learn(Step(path, tokens, logits, step.nodes))


def constrained(
    drafter: Drafter, lookahead: Lookahead | None, *, prune: bool = False, head: DraftHead | None = None
) -> Drafter:
    """Returns the drafter itself where there is no grammar, else as ConstrainedDrafter. head: that it asks, if that is
    a ConstrainedHead."""
    own = head if isinstance(head, ConstrainedHead) else None
    return drafter if lookahead is None else ConstrainedDrafter(drafter, lookahead, prune, own)


def joined(chain: Tree, tree: Tree) -> Tree:
    """Returns a tree whose root is the last node of a chain, with the chain before it: node i becomes i + the chain's
    drafted nodes."""
    count = chain.num_nodes - 1
    return Tree(
        np.concatenate([chain.tokens, tree.tokens[1:]]),
        np.concatenate([chain.parents, tree.parents[1:] + count]),
        np.concatenate([chain.scores, tree.scores[1:]]),
    )


def with_forced_ends(tree: Tree, lookahead: Lookahead, max_nodes: int) -> Tree:
    """Returns the tree with the tokens that the grammar forces after those of its leaves that are likely to be reached,
    the likeliest first, as nodes after all others."""
    leaves = np.setdiff1d(np.arange(tree.num_nodes), tree.parents)
    leaves = leaves[(tree.scores[leaves] >= LIKELY) & (leaves > 0)]
    depths, room = node_depths(tree.parents), max_nodes - tree.num_nodes
    tokens, parents, scores = [tree.tokens], [tree.parents], [tree.scores]
    for leaf in leaves[np.argsort(-tree.scores[leaves], kind="stable")].tolist():
        most = min(room, MAX_DEPTH - int(depths[leaf]))
        forced = lookahead.forced(most, path_to(tree, leaf)) if most > 0 else []
        if forced:
            first = max_nodes - room
            tokens.append(np.array(forced, np.int64))
            parents.append(np.array([leaf, *range(first, first + len(forced) - 1)], np.int64))
            scores.append(np.full(len(forced), tree.scores[leaf], np.float32))
            room -= len(forced)
    return tree if len(tokens) == 1 else Tree(np.concatenate(tokens), np.concatenate(parents), np.concatenate(scores))


def path_to(tree: Tree, node: int) -> list[int]:
    """Returns the tokens of a node and of those above it under the root, the upper first."""
    path = []
    while node > 0:
        path.append(int(tree.tokens[node]))
        node = int(tree.parents[node])
    return path[::-1]


def pruned(tree: Tree, lookahead: Lookahead) -> Tree:
    """Returns the tree without the nodes that the grammar does not allow, and those below them."""
    paths: list[tuple[int, ...] | None] = [()]
    for node in range(1, tree.num_nodes):
        above = paths[tree.parents[node]]
        path = None if above is None else (*above, int(tree.tokens[node]))
        paths.append(path if path is not None and len(lookahead.cut(path)) == len(path) else None)
    return with_nodes(tree, np.flatnonzero([path is not None for path in paths[1:]]))
