"""Method vanilla: decoding without drafts."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from eagle_runtime.base.tree import Tree, root_only
from eagle_runtime.core.accept import Step
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.drafting.cost_measurement import CycleTimer
from eagle_runtime.drafting.cost_storage import CostSource
from eagle_runtime.drafting.method import Method, Trees


class NoDraft(Drafter):
    """Drafts nothing: vanilla decoding through the same loop, sampler and stop code."""

    def __init__(self, costs: CostSource | None = None, clock: Callable[[], float] = time.perf_counter) -> None:
        """costs: learns what a verification without drafts costs."""
        self._timer = CycleTimer(costs, clock)

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        self._timer.begin(len(tokens) - 1)
        return root_only(tokens[-1])

    def learn(self, step: Step) -> None:
        self._timer.end(1)


VANILLA = Method("vanilla", (Trees((), "nothing", lambda choice, parts: NoDraft(parts.costs)),), drafts_nothing=True)
