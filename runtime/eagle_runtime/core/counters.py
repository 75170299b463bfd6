"""Counts of the work that a GPU was given. They do not depend on its speed, so tests on a fake GPU bound them."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Counters:
    """What was counted up to now, or between two moments (`since`).

    engine_calls: forward passes, those that were replayed as graphs included; graph_launches: these alone. shapes:
    distinct shapes of them. uploads, downloads: copies from the host and to it, with their bytes. device_copies: copies
    inside the device, and fills. synchronisations: waits of the host for the device. allocations: of device memory and
    of page-locked memory."""

    engine_calls: int = 0
    graph_launches: int = 0
    shapes: int = 0
    uploads: int = 0
    bytes_up: int = 0
    downloads: int = 0
    bytes_down: int = 0
    device_copies: int = 0
    synchronisations: int = 0
    allocations: int = 0

    def since(self, earlier: Counters) -> Counters:
        """Returns what was counted after `earlier`; of shapes, those that had not come before."""
        names = [field.name for field in dataclasses.fields(Counters)]
        return Counters(**{name: getattr(self, name) - getattr(earlier, name) for name in names})


class Tally:
    """Counts what Counters tells of."""

    def __init__(self) -> None:
        self._counts = dict.fromkeys((field.name for field in dataclasses.fields(Counters)), 0)
        self._shapes: set[Hashable] = set()

    def add(self, **counts: int) -> None:
        """Add to counters of these names."""
        for name, count in counts.items():
            self._counts[name] += count

    def engine_call(self, shape: Hashable) -> None:
        """Count a forward pass of an engine; `shape` names both."""
        self._shapes.add(shape)
        self._counts["engine_calls"] += 1

    @property
    def now(self) -> Counters:
        return Counters(**{**self._counts, "shapes": len(self._shapes)})
