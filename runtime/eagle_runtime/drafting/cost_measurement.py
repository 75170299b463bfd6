"""Measuring what forward passes cost: within the cycles of a generation, and beforehand for those who ask for it
(`eagle-bench --tune`)."""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable

import numpy as np

from eagle_runtime.base.tree import Tree
from eagle_runtime.core.head import DraftHead
from eagle_runtime.core.target import Target
from eagle_runtime.drafting.cost_model import (
    CONTEXTS,
    HEAD_ROWS,
    LARGEST,
    TARGET_ROWS,
    Costs,
    Kind,
    Pass,
    Seconds,
    Timings,
)
from eagle_runtime.drafting.cost_storage import CostSource
from eagle_runtime.drafting.head import Scratch

ROUNDS = 4  # at least: the least of four is rarely a disturbed pass
ENOUGH_S = 2.0  # further rounds are begun before this, as short passes need
MAX_S = 20.0  # no further round is begun after this

Key = tuple[Kind, int, int]  # kind of a pass, its rows, rows before it


class CycleTimer:
    """Times one cycle after another, each from a drafter's `grow` to its `learn`, with the host's work in it.

    Of a cycle, the seconds that are not those of the head's forward passes are the verification's."""

    def __init__(self, costs: CostSource | None, clock: Callable[[], float]) -> None:
        """costs: gets the passes of every cycle; None: nothing does."""
        self._costs = costs
        self._clock = clock
        self._begun: float | None = None
        self._lap = 0.0
        self._context = 0
        self._passes: list[Pass] = []

    def begin(self, context: int) -> None:
        """context: rows in the target's cache before the tree's."""
        self._begun, self._context, self._passes = self._clock(), context, []

    def start_lap(self) -> None:
        """The next pass of the head begins now; others begin where the one before ended."""
        self._lap = self._clock()

    def end_lap(self, rows: int, context: int) -> None:
        """A pass of the head, and the host's work on its output, ends. rows: 0 for one that teaches nothing."""
        now = self._clock()
        self._passes.append(Pass("head", rows, context, now - self._lap))
        self._lap = now

    def end(self, rows: int) -> None:
        """The cycle's verification of `rows` nodes is over; does nothing for a cycle that was not begun."""
        begun, self._begun = self._begun, None
        if begun is None or self._costs is None:
            return
        kind: Kind = "target" if self._passes or rows > 1 else "plain"
        seconds = self._clock() - begun - sum(one.seconds for one in self._passes)
        passes = [*self._passes, Pass(kind, rows, self._context, seconds)]
        self._costs.learn([one for one in passes if one.rows > 0 and one.seconds > 0])


def measure(target: Target, head: DraftHead | None) -> Costs:
    """Time forward passes of both graphs in the order of use; the caches are empty afterwards.

    Takes about 150 verifications, so it is never part of a generation. The work of the host between passes is not in
    the table, but for the ranking of the head's proposals; learning adds it."""
    _, features = target.prefill([0])
    first = None
    if head is not None:
        head.note(features)
        first = head.catch_up([0])
    rooms = [one.cache.capacity - LARGEST for one in (target, head) if one is not None]
    contexts = tuple(sorted({min(context, *rooms) for context in CONTEXTS if min(rooms) > 0} or {0}))
    verified = [count for count in TARGET_ROWS if count <= target.cache.capacity]

    def verify(rows: int) -> None:
        parents = np.zeros(rows, np.int64)
        parents[0] = -1
        target.verify(Tree(np.zeros(rows, np.int64), parents, np.zeros(rows, np.float32)))

    def level(rows: int) -> None:
        assert head is not None and first is not None
        if head.free_levels:
            head.note(features[:1])
            head.catch_up([0], rows=min(max(rows, head.row_counts[0]), head.row_counts[-1]))
            head.cache.truncate(head.cache.length - 1)
            return
        nodes = np.zeros(rows, np.int64)
        with Scratch(head) as scratch:
            scratch.feed(nodes, first.hidden[nodes], nodes - 1)

    def one_round() -> dict[Key, float]:
        """Seconds of every pass: cycles of a level of the head's tree and a verification, then verifications of one
        token in a row. Of passes that ran several times, the shortest."""
        times: dict[Key, float] = {}

        def run(kind: Kind, rows: int, context: int, one_pass: Callable[[int], None]) -> None:
            begun = time.perf_counter()
            one_pass(rows)
            key = kind, rows, context
            times[key] = min(time.perf_counter() - begun, times.get(key, np.inf))

        for context in contexts:
            target.cache.pretend(context)
            if head is not None:
                head.cache.pretend(context)
            for rows, level_rows in zip(verified, itertools.cycle(HEAD_ROWS), strict=False):
                if head is not None:
                    run("head", level_rows, context, level)
                run("target", rows, context, verify)
            for _ in range(2):
                run("plain", 1, context, verify)
        return times

    median = _medians(one_round)
    target.cache.truncate(0)
    if head is not None:
        head.cache.truncate(0)

    def timings(kind: Kind) -> Timings:
        rows = tuple(sorted({key[1] for key in median if key[0] == kind}))
        return Timings(
            rows, contexts, tuple(tuple(median[kind, count, context] for count in rows) for context in contexts)
        )

    if head is None:
        return Costs(timings("target"), None)
    return Costs(timings("target"), timings("head"), timings("plain"))


def _medians(one_round: Callable[[], dict[Key, float]]) -> dict[Key, float]:
    """Run rounds; returns for each pass the median of its share of a round, in the seconds of a median round: a machine
    that is slower in one round than in the next is so for all passes."""
    rounds: list[Seconds] = []
    started = time.perf_counter()
    for number in itertools.count():
        spent = time.perf_counter() - started
        if (number > ROUNDS and spent > ENOUGH_S) or (number > 1 and spent > MAX_S):
            break
        times = one_round()
        if number > 0:  # the first round warms up
            rounds.append(np.array(list(times.values())))
    seconds = np.array(rounds)
    totals = seconds.sum(1)
    usual = np.median(totals) * np.median(seconds / totals[:, None], axis=0)
    return dict(zip(times, usual.tolist(), strict=True))
