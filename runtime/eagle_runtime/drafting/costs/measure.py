"""Measuring what forward passes cost, for those who ask for it (`eagle-bench --tune`)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from eagle_runtime.cache import Cache
from eagle_runtime.drafting.costs.tables import CONTEXTS, FIRST_ROWS, HEAD_ROWS, TARGET_ROWS, Costs, Seconds, Timings
from eagle_runtime.drafting.head import Head
from eagle_runtime.target import Features, Target
from eagle_runtime.tree import Tree

BEFORE = 4  # rows of the head in the pass before a verification
ROUNDS = 4  # at least
ENOUGH_S = 2.0  # further rounds are begun before this, as short passes need
MAX_S = 20.0  # no further round is begun after this


class Drafting(Protocol):
    """What drafting does beside the verification, as often as asked, so that it can be timed."""

    @property
    def head(self) -> Head: ...

    def read(self, rows: int) -> None:
        """The first level of a tree, from `rows` verified ones: the pass of the head and the host's work."""

    def level(self, rows: int) -> None:
        """A level of a tree below `rows` nodes, likewise."""

    def tree(self) -> None:
        """The host's work on a tree, whatever its size."""


def measure(target: Target, rehearse: Callable[[Features], Drafting] | None) -> Costs:
    """Time passes of both graphs and the work between them; the caches are empty afterwards. Takes about 150
    verifications, so it is for those who ask for it (`eagle-bench --tune`), never part of a generation.

    rehearse: begins drafting from any features [1, Hd]; None without a head."""
    _, features = target.prefill([0])

    def verify(rows: int) -> None:
        parents = np.zeros(rows, np.int64)
        parents[0] = -1
        target.verify(Tree(np.zeros(rows, np.int64), parents, np.zeros(rows, np.float32)))

    if rehearse is None:
        alone = _Series(target.cache, verify, TARGET_ROWS, lambda: verify(1))
        found = Costs(_measured([alone])[0], None)
    else:
        drafting = rehearse(features)
        head = drafting.head
        rows = tuple(count for count in HEAD_ROWS if count <= head.scratch)
        before = min(BEFORE, head.scratch)

        def verify_tree(rows: int) -> None:
            drafting.tree()
            verify(rows)

        behind = _Series(target.cache, verify_tree, TARGET_ROWS, lambda: drafting.level(before))
        levels = _Series(head.cache, drafting.level, rows, lambda: drafting.level(before))
        plain = _Series(target.cache, verify, (1,), lambda: verify(1))
        first = _Series(head.cache, drafting.read, FIRST_ROWS, lambda: verify(1))
        found = Costs(*_measured([behind, levels, plain, first]))
        head.cache.truncate(0)
    target.cache.truncate(0)
    return found


class _Series:
    """Passes over several numbers of rows, at both ends of a cache."""

    def __init__(
        self, cache: Cache, one_pass: Callable[[int], None], rows: tuple[int, ...], before: Callable[[], None]
    ) -> None:
        """before: what comes before each pass in use; it is not timed."""
        self._cache = cache
        self._pass = one_pass
        self._before = before
        room = cache.capacity - max(rows)
        self._contexts = tuple(sorted({min(context, room) for context in CONTEXTS if room > 0} or {0}))
        self._rows = tuple(count for count in rows if count <= cache.capacity)

    def run(self) -> Seconds:
        """[contexts, rows] seconds of a pass."""
        seconds = np.zeros((len(self._contexts), len(self._rows)))
        for c, context in enumerate(self._contexts):
            self._cache.pretend(context)
            for r, count in enumerate(self._rows):
                self._before()
                begun = time.perf_counter()
                self._pass(count)
                seconds[c, r] = time.perf_counter() - begun
        return seconds

    def timings(self, seconds: Seconds) -> Timings:
        return Timings(self._rows, self._contexts, tuple(tuple(line) for line in seconds.tolist()))


def _measured(series: Sequence[_Series]) -> list[Timings]:
    """Rounds of all series in turns. Of a pass counts the median of its shares in the rounds' time, since a machine
    that is slower in one round than in the next is so for all passes."""
    rounds: list[list[Seconds]] = []
    started = time.perf_counter()
    for number in itertools.count():
        spent = time.perf_counter() - started
        if (number > ROUNDS and spent > ENOUGH_S) or (number > 1 and spent > MAX_S):
            break
        found = [one.run() for one in series]
        if number > 0:  # the first round warms up
            rounds.append(found)
    stacks = [np.stack(mine) for mine in zip(*rounds, strict=True)]  # of each series [rounds, contexts, rows]
    totals = np.sum([stack.sum((1, 2), keepdims=True) for stack in stacks], axis=0)
    usual = np.median(totals)
    return [one.timings(usual * np.median(stack / totals, axis=0)) for one, stack in zip(series, stacks, strict=True)]
