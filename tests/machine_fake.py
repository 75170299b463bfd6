"""A fake machine with its own clock, whose forward passes take the times of a table, disturbed as on a real machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eagle_runtime.core.cache import KVCache
from eagle_runtime.core.session import Array
from eagle_runtime.drafting.cost_learning import unknown
from eagle_runtime.drafting.cost_model import LARGEST, Costs, Pass
from eagle_runtime.drafting.cost_storage import LearnedCosts
from fakes import FakeHead, FakeTarget, Language

NOISE = 0.1  # standard deviation of the logarithm of a forward pass's time
SLOW, STRETCH = 2.0, (100, 600)  # factor of time while the machine is slow, and for how many forward passes it is
SPIKE, SPIKES = 5.0, 0.03  # factor of time of an interrupted forward pass, and the share of those


class FixedCosts(LearnedCosts):
    """Costs that stay as they are, whatever passes take."""

    def __init__(self, costs: Costs) -> None:
        super().__init__(unknown(costs))
        self._now = costs

    @property
    def asks_for_plain(self) -> bool:
        return False

    def learn(self, passes: Sequence[Pass]) -> None:
        pass


class Machine:
    """Its clock advances by the time of each forward pass."""

    def __init__(self, costs: Costs, seed: int | None = None) -> None:
        """seed: of the disturbances; None for none."""
        self.now = 0.0
        self.passes = 0
        self._costs = costs
        self._rng = None if seed is None else np.random.default_rng(seed)
        self._last = "target"
        self._slow, self._left = SLOW, 0

    def clock(self) -> float:
        return self.now

    def spend(self, graph: str, rows: int, context: int) -> None:
        """Advance the clock by a forward pass of "target" or "head". After one of the other graph it takes another
        time."""
        costs, after_target = self._costs, self._last == "target"
        if graph == "target":
            alone = rows == 1 and after_target
            seconds = costs.plain_at(context) if alone else costs.target.at(context)[min(rows, LARGEST)]
        else:
            timings = costs.head
            assert timings is not None
            seconds = timings.at(context)[min(rows, LARGEST)]
        self._last = graph
        self.passes += 1
        self.now += float(seconds) * self._disturbed()

    def _disturbed(self) -> float:
        if self._rng is None:
            return 1.0
        self._left -= 1
        if self._left < 0:
            self._slow = SLOW + 1 - self._slow
            self._left = int(self._rng.integers(*STRETCH))
        spike = SPIKE if self._rng.random() < SPIKES else 1.0
        return self._slow * spike * float(np.exp(NOISE * self._rng.standard_normal()))


class TimedTarget(FakeTarget):
    def __init__(self, language: Language, machine: Machine) -> None:
        super().__init__(language)
        self._machine = machine

    def run(self, feeds: Mapping[str, Any], cache: KVCache) -> dict[str, Array]:
        self._machine.spend("target", len(feeds["input_ids"]), cache.length)
        return super().run(feeds, cache)


class TimedHead(FakeHead):
    def __init__(self, language: Language, top_k: int, machine: Machine) -> None:
        super().__init__(language, top_k)
        self._machine = machine

    def run(self, feeds: Mapping[str, Any], cache: KVCache) -> dict[str, Array]:
        self._machine.spend("head", len(feeds["input_ids"]), cache.length)
        return super().run(feeds, cache)
