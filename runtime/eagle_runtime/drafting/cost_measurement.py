"""Measuring what forward passes cost, within the cycles of a generation."""

from __future__ import annotations

from collections.abc import Callable

from eagle_runtime.drafting.cost_model import Kind, Pass
from eagle_runtime.drafting.cost_storage import CostSource


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
