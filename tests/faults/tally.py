"""What came of a campaign's cases, counted, and the one line of figures that docs/dev/reliability.md quotes."""

from __future__ import annotations

import os
import random
import time
from collections import Counter

SEED = 20
LONGEST = 400  # characters of a failure's message
SCALE = float(os.environ.get("EAGLE_FAULTS", "1"))  # how many times the usual number of cases


def scaled(count: int) -> int:
    """`count` cases at the usual size."""
    return max(1, round(count * SCALE))


class Tally:
    """Outcomes of one campaign by name, and the cases that must not be."""

    def __init__(self, campaign: str) -> None:
        self.campaign = campaign
        self.random = random.Random(f"{campaign} {SEED}")
        self.wrong: list[str] = []
        self._counts: Counter[str] = Counter()
        self._started = time.perf_counter()

    def add(self, outcome: str) -> None:
        """One case that ended as it may."""
        self._counts[outcome] += 1

    def fail(self, case: object, what: object) -> None:
        """One case that ended as none may."""
        self._counts["WRONG"] += 1
        self.wrong.append(f"{case}: {what}"[:LONGEST])

    @property
    def line(self) -> str:
        """The figures."""
        outcomes = ", ".join(f"{count} {name}" for name, count in self._counts.most_common())
        seconds = time.perf_counter() - self._started
        wrong = "" if self.wrong else ", nothing else"
        return f"{self.campaign}: {self._counts.total()} cases: {outcomes}{wrong}; {seconds:.0f} s, seed {SEED}"
