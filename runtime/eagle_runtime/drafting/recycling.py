"""Drafts without a head: a model's habits (habits.py) as the proposals of a DraftHead, so that trees, the coupling with
the seed's random numbers and constraints work as with a head. Its levels cost the host's time alone.

Shapes: R rows that are proposed for, k proposed tokens per row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

import numpy as np

from eagle_runtime.accept import Step
from eagle_runtime.cache import Cache
from eagle_runtime.drafting.costs.model import HEAD_ROWS, Costs, Pass, Timings
from eagle_runtime.drafting.costs.storage import LearnedCosts
from eagle_runtime.drafting.drafter import Drafter
from eagle_runtime.drafting.habits import SUCCESSORS, Context, Habits
from eagle_runtime.drafting.head import NEVER, ONE_ROW, OutputCheck, Proposal, States, Weigher
from eagle_runtime.target import Features, row_numbers
from eagle_runtime.tree import Int, Tree

SCRATCH = 1024  # rows that growing one tree may use; they cost no memory
LEVEL_S, NEWEST = 2e-4, 0.1  # seconds of a level before any was timed, and the weight of the newest in their mean


class RecyclingHead:
    """A DraftHead that looks proposals up. One object per generation."""

    free_levels = False  # they are cheap, but are timed one by one (HostCosts)
    row_counts = ONE_ROW

    def __init__(self, habits: Habits, cache: Cache) -> None:
        """cache: of the target, for its length; rows are neither written nor dropped."""
        self._habits = habits
        self.cache = cache
        self.top_k = min(SUCCESSORS, habits.vocab_size)
        self.scratch = SCRATCH
        self.unread = 1
        self._contexts: list[Context] = []  # of the scratch rows of the tree that is growing
        self._root: Context = ()
        self._position = 0  # that the root's children are for
        self._output_check = OutputCheck(habits.vocab_size)
        self._nothing = (np.zeros(self.top_k, np.int64), np.full(self.top_k, NEVER, np.float32))

    def note(self, features: Features) -> None:
        """Features say nothing here."""

    def catch_up(self, tokens: Sequence[int], weigher: Weigher | None = None, rows: int | None = None) -> Proposal:
        """As in DraftHead."""
        self._root, self._contexts = tuple(tokens[-self._habits.order :]), []
        self._position = len(tokens)
        return self._proposal([self._root], self._position)

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        """As in DraftHead, without a forward pass."""
        contexts = [
            (*(self._root if parent < 0 else self._contexts[parent]), token)[-self._habits.order :]
            for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True)
        ]
        self._contexts += contexts
        return self._proposal(contexts, self._position + 1 + depth)

    def learn(self, token: int) -> None:
        """What is learned comes with the logits (RecyclingDrafter)."""

    def _proposal(self, contexts: Sequence[Context], position: int) -> Proposal:
        rows = [self._habits.after(context) or self._nothing for context in contexts]
        ids, log_probs = np.stack([row[0] for row in rows]), np.stack([row[1] for row in rows])
        return Proposal(*self._output_check.checked(ids, log_probs), row_numbers(len(rows)), position)


class RecyclingDrafter:
    """A drafter whose verified trees teach the habits."""

    def __init__(self, drafter: Drafter, habits: Habits) -> None:
        self._drafter = drafter
        self._habits = habits
        self._before: Context = ()
        self._tree: Tree | None = None

    def grow(self, tokens: Sequence[int], features: Features, max_nodes: int) -> Tree:
        """As in Drafter."""
        self._before = tuple(tokens[-self._habits.order : -1])
        self._tree = self._drafter.grow(tokens, features, max_nodes)
        return self._tree

    def learn(self, step: Step) -> None:
        """As in Drafter."""
        tree, self._tree = self._tree, None
        if tree is not None:
            self._habits.learn(self._before, tree, step)
        self._drafter.learn(step)


class HostCosts:
    """What passes of a bundle cost, with levels of the tree that the host alone grows: the mean of their seconds."""

    def __init__(self, costs: LearnedCosts) -> None:
        """costs: of the target, and of a head that is not used."""
        self._costs = costs
        self._level_s = self._shown_s = LEVEL_S
        self._made_of: Costs | None = None
        self._made = costs.now

    @property
    def now(self) -> Costs:
        """As in LearnedCosts."""
        moved = abs(self._level_s - self._shown_s) > 0.1 * self._shown_s
        if self._costs.now is not self._made_of or moved:
            self._made_of, self._shown_s = self._costs.now, self._level_s
            rows = tuple(HEAD_ROWS)
            head = Timings(rows, (0,), ((self._level_s,) * len(rows),))
            self._made = dataclasses.replace(self._made_of, head=head)
        return self._made

    @property
    def asks_for_plain(self) -> bool:
        """As in LearnedCosts."""
        return self._costs.asks_for_plain

    def learn(self, passes: Sequence[Pass]) -> None:
        """As in LearnedCosts, which gets those of the target."""
        for one in passes:
            if one.kind == "head":
                self._level_s += NEWEST * (one.seconds - self._level_s)
        self._costs.learn([one for one in passes if one.kind != "head"])
