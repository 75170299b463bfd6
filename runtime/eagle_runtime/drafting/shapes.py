"""The drafter of EAGLE's papers, and its shapes of trees, which do not depend on what forward passes cost: EAGLE-2's,
EAGLE-1's, and chains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from eagle_runtime.base.arguments import checked_int
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.tree import (
    MAX_DEPTH,
    MAX_NODES,
    Int,
    Tree,
    best_first,
    choice_parents,
    node_depths,
    rerank,
    root_only,
)
from eagle_runtime.core.accept import Step
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.head import DraftHead, Proposal, Ranker
from eagle_runtime.drafting.coupling import RankedHead
from eagle_runtime.drafting.head import NEVER, Scratch


class TreeShape(Protocol):
    """Decides which of a head's proposals become a tree."""

    @property
    def children(self) -> int:
        """Proposals per row that the shape uses."""

    @property
    def scratch(self) -> int:
        """Head rows that growing one tree takes."""

    def grow(self, head: DraftHead, root: int, first: Proposal, max_nodes: int) -> Tree:
        """Returns a tree of at most max_nodes nodes. first: the proposal for the root's children (R = 1)."""


@dataclass(frozen=True, slots=True)
class DynamicTree:
    """EAGLE-2 (arXiv 2406.16858, section 4): grow the likeliest nodes, keep the likeliest.

    num_nodes counts the root (the paper's total_token); depth is growth passes, so depth + 1 levels below the
    root; top_k is both the beam and the children per node."""

    num_nodes: int = 60
    depth: int = 5
    top_k: int = 10

    def __post_init__(self) -> None:
        checked_int("total_token", self.num_nodes, 2, MAX_NODES)
        checked_int("depth", self.depth, 0, MAX_DEPTH - 1)
        checked_int("draft_top_k", self.top_k, 1, MAX_NODES)

    @property
    def children(self) -> int:
        return self.top_k

    @property
    def scratch(self) -> int:
        return self.depth * self.top_k

    def grow(self, head: DraftHead, root: int, first: Proposal, max_nodes: int) -> Tree:
        k = self.top_k
        tokens, scores = [first.tokens[0, :k]], [first.log_probs[0, :k]]  # the pool, one array per level
        parents: list[Int] = [np.full(k, -1, np.int64)]
        frontier = np.arange(k, dtype=np.int64)  # pool indices of the nodes to grow next
        scratch_parents = np.full(k, -1, np.int64)  # scratch rows of the frontier's parents
        hidden = first.hidden[np.zeros(k, np.int64)]
        pool = k
        with Scratch(head) as scratch:
            for level in range(self.depth):
                start = pool - len(tokens[-1])  # the frontier always lies in the newest level
                proposal = scratch.feed(tokens[-1][frontier - start], hidden, scratch_parents)
                level_scores = (scores[-1][frontier - start, None] + proposal.log_probs[:, :k]).ravel()
                tokens.append(proposal.tokens[:, :k].ravel())
                scores.append(level_scores)
                parents.append(np.repeat(frontier, k))
                best = best_first(level_scores, k)
                frontier = pool + best
                scratch_parents = level * k + best // k
                hidden = proposal.hidden[best // k]
                pool += len(level_scores)
        num_nodes = min(self.num_nodes, max_nodes)
        return rerank(root, np.concatenate(tokens), np.concatenate(parents), np.concatenate(scores), num_nodes)


@dataclass(frozen=True, slots=True)
class StaticTree:
    """EAGLE-1 (arXiv 2401.15077): a fixed tree of choices, each the list of child ranks from the root.

    Choices stand sorted by length, so any first few of them are a tree too."""

    choices: tuple[tuple[int, ...], ...]

    @property
    def children(self) -> int:
        return 1 + max(rank for choice in self.choices for rank in choice)

    @property
    def scratch(self) -> int:
        return len({choice[:-1] for choice in self.choices} - {()})

    def grow(self, head: DraftHead, root: int, first: Proposal, max_nodes: int) -> Tree:
        choices = self.choices[: max_nodes - 1]
        parents = choice_parents(choices)
        ranks = np.array([-1, *(choice[-1] for choice in choices)], np.int64)
        depths = node_depths(parents)
        tokens = np.full(len(parents), root, np.int64)
        scores = np.zeros(len(parents), np.float32)
        has_children = np.isin(np.arange(len(parents)), parents)
        row_of = np.full(len(parents), -1, np.int64)  # node -> scratch row
        fed = np.zeros(1, np.int64)  # nodes of the last level that were fed; proposal has a row for each
        proposal = first
        with Scratch(head) as scratch:
            for depth in range(1, int(depths.max()) + 1):
                level = np.flatnonzero(depths == depth)
                rows = np.searchsorted(fed, parents[level])
                tokens[level] = proposal.tokens[rows, ranks[level]]
                scores[level] = scores[parents[level]] + proposal.log_probs[rows, ranks[level]]
                if not np.any(inner := has_children[level]):
                    break
                fed, hidden = level[inner], proposal.hidden[rows[inner]]
                proposal = scratch.feed(tokens[fed], hidden, row_of[parents[fed]])
                row_of[fed] = row_of.max() + 1 + np.arange(len(fed))
        return Tree(tokens, parents, scores)


def chain(num_drafted: int) -> StaticTree:
    """Returns a tree without branches, of num_drafted tokens in a row."""
    if not 1 <= num_drafted <= MAX_DEPTH:
        raise RequestError(f"a chain of {num_drafted} tokens cannot be drafted; it must be 1 to {MAX_DEPTH}")
    return StaticTree(tuple((0,) * length for length in range(1, num_drafted + 1)))


def check_children(top_k: int, children: int) -> None:
    """Raises RequestError for more children per node than the top_k tokens that a head returns per row."""
    if children > top_k:
        raise RequestError(
            f"the tree asks for {children} children per node, but the bundle's head computes {top_k}; lower draft_top_k"
        )


class EagleDrafter(Drafter):
    """Grows the proposals of an EAGLE-1/2/3 head into a tree of a fixed shape."""

    def __init__(self, head: DraftHead, shape: TreeShape, ranker: Ranker | None = None) -> None:
        """ranker: of the head's proposals, if any is."""
        check_children(head.top_k, shape.children)
        if shape.scratch > head.scratch:
            raise RequestError(
                f"growing the tree takes {shape.scratch} rows, but the head has room for {head.scratch}; "
                "lower depth or draft_top_k"
            )
        self._head = head if ranker is None else RankedHead(head, ranker)
        self._shape = shape

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        first = self._head.catch_up(tokens)
        if first.log_probs[0, 0] <= NEVER / 2:  # nothing is proposed, whatever random numbers have added
            return root_only(tokens[-1])
        return self._shape.grow(self._head, tokens[-1], first, max_nodes)

    def learn(self, step: Step) -> None:
        """The trees do not depend on what was accepted."""
