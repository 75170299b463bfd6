"""The costs of one loaded bundle, learned from the forward passes of its generations and kept from run to run."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from eagle_runtime.drafting.costs.estimate import SCALE, Array, Belief, learned, measured, table, unknown
from eagle_runtime.drafting.costs.storage import read_belief, write_belief
from eagle_runtime.drafting.costs.tables import Costs, Pass

MOVED = 0.03  # of a correction, before the table in use is made again
NOTABLE = 0.1  # the same before it is written at the end of a generation
PLAIN_FIRST, PLAIN_LATER = 2, 16  # cycles
FEW = 32  # passes that a table of shapes must have seen to be worth a file
ALL, SOME = 256, 4  # cycles that all teach; of later ones, one of SOME


class LearnedCosts:
    """The costs of one loaded bundle, shared by its twins. Passes are noted as they run, within a step of generation;
    callers that let several threads use a model hold its lock around each step. Reading needs no lock: the
    estimate is replaced, never changed in place."""

    def __init__(self, belief: Belief, file: str | None = None, *, known: bool = False) -> None:
        """file: in the user's cache folder, keeps the estimate from run to run; None: nothing does. known: the belief
        comes from that file."""
        self._file = file
        self._start_from(belief, belief.corrections if known else None)

    def _start_from(self, belief: Belief, written: Array | None) -> None:
        """written: the corrections that the file holds; None: it holds nothing."""
        self._belief = belief
        self._now = table(belief)
        self._made_of = belief.corrections
        self._written = written
        self._passes = 0
        self._plain = 0
        self._cycles = 0

    @property
    def now(self) -> Costs:
        """The table to size trees by; the same object until a correction has moved by MOVED."""
        return self._now

    @property
    def asks_for_plain(self) -> bool:
        """Whether the next verification should be one of a single token. All drafts are compared with it, and where
        they pay it would never be seen: so the first ones of a table of shapes are, and later one more for every
        doubling of the cycles."""
        first = PLAIN_FIRST if self._written is None else 0
        return self._plain < first + (self._cycles // PLAIN_LATER).bit_length()

    def latest(self) -> Costs:
        """Returns the table as estimated now, the machine's speed of late included."""
        return table(self._belief)

    def learn(self, passes: Sequence[Pass]) -> None:
        """As in CostSource."""
        self._cycles += 1
        if self._cycles > ALL and self._cycles % SOME and not self.asks_for_plain:
            return
        self._belief = learned(self._belief, passes)
        self._plain += any(one.kind == "plain" for one in passes)
        self._passes += len(passes)
        if _moved(self._belief.corrections, self._made_of) > MOVED:
            self._now, self._made_of = table(self._belief), self._belief.corrections

    def measured(self, costs: Costs) -> Costs:
        """Go on from a table that was measured, and write it to the file. Returns it, in the sizes that are learned."""
        self._start_from(measured(costs), None)
        self._write()
        return self.latest()

    def end_generation(self) -> None:
        """Write the estimate to the file, if it differs much from what the file holds."""
        if self._passes >= FEW and self._differs > NOTABLE:
            self._write()

    def close(self) -> None:
        """Write the estimate to the file, if it differs from what the file holds."""
        if self._passes >= FEW and self._differs > MOVED:
            self._write()

    @property
    def _differs(self) -> float:
        """The furthest that a correction has moved since the file was written; infinite where there is none yet."""
        return np.inf if self._written is None else _moved(self._belief.corrections, self._written)

    def _write(self) -> None:
        belief = self._belief
        self._written = belief.corrections
        if self._file is not None:
            write_belief(self._file, belief)


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
