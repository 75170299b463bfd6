"""The costs of one loaded bundle, learned from the forward passes of its generations, and the file in the user's cache
folder that keeps them from run to run."""

from __future__ import annotations

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol

import numpy as np

from eagle_runtime.base.errors import BundleError
from eagle_runtime.bundle.typed_json import from_json
from eagle_runtime.core.rounds import Timed
from eagle_runtime.drafting.cost_learning import (
    COUNT,
    OLD_SCALE_OFF,
    SCALE,
    SCALE_OFF,
    Array,
    Belief,
    learned,
    table,
    unknown,
)
from eagle_runtime.drafting.cost_model import LARGEST, Costs, Pass, Timings, shared
from eagle_runtime.machine.user_cache import machine_key, read_cached, write_cached

MOVED = 0.03  # of a correction, before the table in use is made again: an eighth of a pass's noise
NOTABLE = 0.1  # the same before the file is written again at the end of a generation; chosen, to write it seldom
PLAIN_FIRST, PLAIN_LATER = 2, 16  # cycles: six of the first 160 draft nothing
FEW = 32  # passes that a table of shapes must have seen to be worth a file; chosen
ALL, SOME = 256, 4  # cycles that all teach; of later ones, one of SOME; chosen, since learning costs the host time
ROUNDING = 1e-9  # of a covariance's least eigenvalue
# Limits of a table that is read; no measurement exceeds them.
FAR = 1 << 30  # rows before a pass
SLOWEST_S = 1e6  # seconds of a pass
TIMED = "cycles, all levels of the head alike"  # to be changed with what is timed


class CostSource(Protocol):
    """What a drafter asks of costs: LearnedCosts, or those with another way to draft."""

    @property
    def now(self) -> Costs:
        """The table to size trees by."""

    @property
    def others(self) -> int:
        """How many other texts share the pass that comes next."""

    @property
    def asks_for_plain(self) -> bool:
        """Whether the next verification should be one of a single token."""

    def learn(self, passes: Sequence[Pass]) -> None:
        """Learn from the timed passes of a cycle, the verification last."""


class LearnedCosts(CostSource):
    """The costs of one loaded bundle, shared by its twins. Passes are noted as they run, within a step of generation;
    callers that let several threads use a model hold its lock around each step. Reading needs no lock: the
    estimate is replaced, never changed in place."""

    def __init__(self, belief: Belief, file: str | None = None, *, known: bool = False) -> None:
        """file: in the user's cache folder, keeps the estimate from run to run; None: nothing does. known: the belief
        comes from that file."""
        self._file = file
        self._others: Callable[[], int] = lambda: 0
        self._timed: deque[Timed] = deque()
        self._together: Belief | None = None  # of passes that several texts share; None before the first
        self._together_made_of = belief.corrections
        self._together_seen = 0
        self._belief = belief
        self._now = table(belief)
        self._shared: dict[int, Costs] = {}  # by the number of other texts
        self._made_of = belief.corrections
        # The corrections that the file holds; None: it holds nothing.
        self._written: Array | None = belief.corrections if known else None
        self._passes = 0
        self._due = FEW  # passes before the file is written at the end of a generation
        self._plain = 0
        self._cycles = 0

    @property
    def now(self) -> Costs:
        """The table to size trees by; the same object until a correction has moved by MOVED, or other texts share the
        passes."""
        if (others := self.others) == 0:
            return self._now
        self._learn_together()
        if others not in self._shared:
            costs = self._now if self._together is None else table(self._together)
            self._shared[others] = shared(costs, others)
        return self._shared[others]

    @property
    def others(self) -> int:
        return self._others()

    def share(self, others: Callable[[], int], timed: deque[Timed]) -> None:
        """others: returns how many other texts are in the pass that comes next; timed: gets such passes, which teach
        what rows of several texts cost, and nothing of a text alone."""
        self._others, self._timed = others, timed

    def _learn_together(self) -> None:
        """Learn from the passes of several texts since the last time."""
        while self._timed:
            rows, context, seconds = self._timed.popleft()
            self._together_seen += 1
            if rows > LARGEST or (self._together_seen > ALL and self._together_seen % SOME):
                continue
            before = self._together or unknown(dataclasses.replace(self._now, plain=None))
            self._together = learned(before, [Pass("target", rows, context, seconds)])
            if _moved(self._together.corrections, self._together_made_of) > MOVED:
                self._together_made_of, self._shared = self._together.corrections, {}

    @property
    def asks_for_plain(self) -> bool:
        """Whether the next verification should be one of a single token. All drafts are compared with it, and where
        they pay it would never be seen: so the first ones of a table of shapes are, and later one more for every
        doubling of the cycles."""
        first = PLAIN_FIRST if self._written is None else 0
        return self.others == 0 and self._plain < first + (self._cycles // PLAIN_LATER).bit_length()

    def latest(self) -> Costs:
        """Returns the table as estimated now, the machine's speed of late included."""
        return table(self._belief)

    def learn(self, passes: Sequence[Pass]) -> None:
        if self.others > 0:
            return
        self._cycles += 1
        if self._cycles > ALL and self._cycles % SOME and not self.asks_for_plain:
            return
        self._belief = learned(self._belief, passes)
        self._plain += any(one.kind == "plain" for one in passes)
        self._passes += len(passes)
        if _moved(self._belief.corrections, self._made_of) > MOVED:
            self._now, self._made_of, self._shared = table(self._belief), self._belief.corrections, {}

    def save(self, *, last: bool = True) -> None:
        """Write the corrected table, and the covariance of what is not known of it, if there is no file yet, or a
        correction has changed since. last: else only if it has changed a lot, and not before twice as many passes have
        taught as when the file was written last: a server would write it for most answers, which takes milliseconds."""
        if self._passes < (FEW if last else self._due):
            return
        least = MOVED if last else NOTABLE
        if self._written is None or _moved(self._belief.corrections, self._written) > least:
            self._written, self._due = self._belief.corrections, 2 * self._passes
            if self._file is not None:
                costs, spread = dataclasses.asdict(table(self._belief)), self._belief.spread.tolist()
                write_cached(self._file, {"costs": costs, "spread": spread})


def open_costs(file: str, prior: Callable[[], Costs]) -> LearnedCosts:
    """Returns the costs of earlier runs that `file` holds; where there is no such file, or it cannot be read, those
    that `prior` returns."""
    kept, assumed = read_belief(file), prior()
    if kept is not None and (kept.base.head is None) != (assumed.head is None):  # of another bundle
        kept = None
    return LearnedCosts(unknown(assumed) if kept is None else kept, file, known=kept is not None)


def _moved(corrections: Array, before: Array) -> float:
    """Returns the largest change of a correction, the scale left out."""
    return float(np.abs(corrections - before)[SCALE + 1 :].max())


def file_name(facts: Iterable[str]) -> str:
    """Returns the name of the file that costs are kept in: equal for equal facts on a machine that looks the same.
    facts: on the bundle, and on all that the times of its forward passes depend on (backends.facts_of_times)."""
    return f"costs-{machine_key([TIMED, *facts])}.json"


def read_belief(file: str) -> Belief | None:
    """Returns the estimate of an earlier run that `file` holds; None if there is none, or it cannot be used."""
    data = read_cached(file)
    try:
        base: Costs = from_json(Costs, data["costs"], file)
        spread = np.array(data["spread"], np.float64)
        if not all(_holds_times(one) for one in (base.target, base.head, base.plain) if one is not None):
            return None
        if spread.shape != (COUNT, COUNT) or not np.isfinite(spread).all() or not np.allclose(spread, spread.T):
            return None
        if np.abs(spread).max() > 2 * SCALE_OFF**2 or np.linalg.eigvalsh(spread).min() < -ROUNDING:
            return None
    except (BundleError, ValueError, KeyError, TypeError, OverflowError, np.linalg.LinAlgError):
        return None
    spread[SCALE, SCALE] = max(spread[SCALE, SCALE], OLD_SCALE_OFF**2)
    return Belief(base, np.zeros(COUNT), spread)


def _holds_times(timings: Timings) -> bool:
    """Whether numbers that were read are a table's."""
    shaped = [len(timings.rows)] * len(timings.contexts) == [len(line) for line in timings.seconds]
    counted = all(0 < row <= LARGEST for row in timings.rows) and all(0 <= rows < FAR for rows in timings.contexts)
    rising = all(a < b for numbers in (timings.rows, timings.contexts) for a, b in itertools.pairwise(numbers))
    timed = all(0 < second < SLOWEST_S for line in timings.seconds for second in line)
    return shaped and counted and rising and timed and len(timings.rows) > 0 and len(timings.contexts) in (1, 2)
