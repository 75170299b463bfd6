"""Drafts without a head: a model's habits (habits.py) as the proposals of a DraftHead, so that trees, the coupling with
the seed's random numbers and constraints work as with a head. Its levels cost the host's time alone.

Shapes: R rows that are proposed for, k proposed tokens per row.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from operator import itemgetter
from typing import NamedTuple

import numpy as np

from eagle_runtime.base.tree import Float, Int, Tree
from eagle_runtime.core.accept import Step
from eagle_runtime.core.cache import NoRows
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.head import DraftHead, Proposal, Ranker, States
from eagle_runtime.core.target import PROMPT_ROWS, Features, row_numbers
from eagle_runtime.drafting.acceptance import NEWEST
from eagle_runtime.drafting.build import cost_aware_drafter
from eagle_runtime.drafting.cost_model import HEAD_ROWS, Costs, Pass, Timings
from eagle_runtime.drafting.cost_storage import CostSource
from eagle_runtime.drafting.habits import SUCCESSORS, Context, Habits, Row
from eagle_runtime.drafting.head import NEVER, SCRATCH, OutputCheck
from eagle_runtime.drafting.matches import SuffixAutomaton
from eagle_runtime.drafting.method import Choice, Method, Parts, Trees

LONGEST = 2**62  # tokens of a text; there are no rows that would fill a memory
# Tokens that match before the next one follows the match in half of the cases, whatever habits say [+0.4 %, -0.1 %].
HALF = 8.0
LEAST_PROBABILITY = np.float32(1e-20)  # so that a logarithm is finite
LEVEL_S = 2e-4  # seconds of a level before any was timed, about what one takes (opened.HABITS_PAY_S) [+0.8 %, 0.0 %]


class RecyclingHead(DraftHead):
    """A DraftHead that looks proposals up. Levels are cheap, but are timed one by one (HostCosts). One object per
    generation."""

    unread = 1

    def __init__(self, habits: Habits) -> None:
        self.habits = habits
        self.index = SuffixAutomaton()
        self.cache = NoRows(LONGEST)
        self.top_k = min(SUCCESSORS, habits.vocab_size)
        self.scratch = SCRATCH
        self._root = _Path((), 0, 0)
        self._paths: list[_Path] = []  # of the scratch rows of the tree that is growing
        self._position = 0  # that the root's children are for
        self._output_check = OutputCheck(habits.vocab_size)

    def note(self, features: Features) -> None:
        """Features say nothing here."""

    def catch_up(self, tokens: Sequence[int], ranker: Ranker | None = None, rows: int | None = None) -> Proposal:
        self.index.extend(tokens)
        self._root, self._paths = _Path(tuple(tokens[-self.habits.order :]), *self.index.match()), []
        self._position = len(tokens)
        self.cache.pretend(len(tokens) - 1)
        return self._proposal([self._root], self._position)

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        """As in DraftHead, without a forward pass."""
        paths = [
            self._followed(self._root if parent < 0 else self._paths[parent], token)
            for token, parent in zip(tokens.tolist(), parents.tolist(), strict=True)
        ]
        self._paths += paths
        return self._proposal(paths, self._position + 1 + depth)

    def _followed(self, path: _Path, token: int) -> _Path:
        context = (*path.context, token)[-self.habits.order :]
        if path.matched and self.index.continuation(path.place, 1) == [token]:
            return _Path(context, path.place + 1, path.matched + 1)
        return _Path(context, 0, 0)

    def _proposal(self, paths: Sequence[_Path], position: int) -> Proposal:
        ids = np.zeros((len(paths), self.top_k), np.int64)
        log_probs = np.full((len(paths), self.top_k), NEVER, np.float32)
        for row, path in enumerate(paths):
            best = sorted(self._after(path).items(), key=itemgetter(1), reverse=True)[: self.top_k]
            if best:
                ids[row, : len(best)], log_probs[row, : len(best)] = zip(*best, strict=True)
                log_probs[row, : len(best)] = np.log(np.maximum(log_probs[row, : len(best)], LEAST_PROBABILITY))
        return Proposal(*self._output_check.checked(ids, log_probs), row_numbers(len(paths)), position)

    def _after(self, path: _Path) -> Row:
        """Probabilities of the next tokens: of the habits, and of the match with its share."""
        row = self.habits.after(path.context)
        following = self.index.continuation(path.place, 1) if path.matched else []
        if not following:
            return row
        share = path.matched / (path.matched + HALF)
        row = {token: (1 - share) * probability for token, probability in row.items()}
        row[following[0]] = row.get(following[0], 0.0) + share
        return row


class _Path(NamedTuple):
    """What proposals for a node depend on: the last tokens down to it, the position after an earlier occurrence of its
    last `matched` tokens, 0 for none."""

    context: Context
    place: int
    matched: int


class RecyclingDrafter(Drafter):
    """A drafter whose prompt and verified trees teach the habits."""

    prompt_rows = PROMPT_ROWS

    def __init__(self, drafter: Drafter, habits: Habits) -> None:
        self._drafter = drafter
        self._habits = habits
        self._before: Context = ()
        self._tree: Tree | None = None

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        self._before = tuple(tokens[-self._habits.order : -1])
        self._tree = self._drafter.grow(tokens, max_nodes)
        return self._tree

    def learn_prompt(self, tokens: Sequence[int], logits: Float) -> None:
        self._habits.learn(tokens, logits)

    def learn(self, step: Step) -> None:
        tree, self._tree = self._tree, None
        if tree is not None and step.logits is not None:
            rows = step.logits
            accepted = rows[step.path] if isinstance(rows, np.ndarray) else [rows[row] for row in step.path.tolist()]
            self._habits.learn([*self._before, *tree.tokens[step.path].tolist()], accepted)
        self._drafter.learn(step)


class HostCosts(CostSource):
    """What passes of a bundle cost, with levels of the tree that the host alone grows: the mean of their seconds."""

    def __init__(self, costs: CostSource) -> None:
        """costs: of the target, and of a head that is not used."""
        self._costs = costs
        self._level_s = self._shown_s = LEVEL_S
        self._made_of: Costs | None = None
        self._made = costs.now

    @property
    def now(self) -> Costs:
        moved = abs(self._level_s - self._shown_s) > 0.1 * self._shown_s
        if self._costs.now is not self._made_of or moved:
            self._made_of, self._shown_s = self._costs.now, self._level_s
            rows = tuple(HEAD_ROWS)
            head = Timings(rows, (0,), ((self._level_s,) * len(rows),))
            self._made = dataclasses.replace(self._made_of, head=head)
        return self._made

    @property
    def others(self) -> int:
        return self._costs.others

    @property
    def asks_for_plain(self) -> bool:
        return self._costs.asks_for_plain

    def learn(self, passes: Sequence[Pass]) -> None:
        """As in LearnedCosts, which gets those of the target."""
        for one in passes:
            if one.kind == "head":
                self._level_s += NEWEST * (one.seconds - self._level_s)
        self._costs.learn([one for one in passes if one.kind != "head"])


def _recycling(choice: Choice, parts: Parts) -> Drafter:
    head = RecyclingHead(parts.habits)
    drafter = cost_aware_drafter(choice, parts, (head, HostCosts(parts.costs)), lookup=True, index=head.index)
    return RecyclingDrafter(drafter, parts.habits)


DRAFTS = "what the target itself held likely after the same tokens, and matches of any length, in one tree"
RECYCLING = Method(
    "recycling",
    (Trees(("cost-aware",), DRAFTS, _recycling),),
    proposer="habits",
    default="without a head or a datastore where a pass takes 10 ms and more, or a file keeps habits",
    is_default=lambda loaded, fixed: loaded.habits_pay and not fixed,
)
