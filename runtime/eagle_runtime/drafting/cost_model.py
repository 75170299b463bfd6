"""What forward passes cost: the tables that draft trees are sized by. cost_prior.py estimates them from the shapes of
the weights, and cost_learning.py corrects them by each pass of a generation.

A pass over n rows that follow P others takes about a(n) + P * b(n) seconds: it reads every weight once, multiplies it n
times, and reads the keys and values of P rows; each layer costs the engine some time whatever its size. Tables hold
some n at two lengths of context, and in between straight lines.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
import numpy.typing as npt

Seconds = npt.NDArray[np.float64]
# Forward passes: a verification of a tree, one of a single token that follows another such, a level of the head's tree.
Kind = Literal["target", "plain", "head"]

LARGEST = 64  # nodes of a tree whose size follows the costs: the best of 30 sizes have 8 (toy_results.md)
# Rows of the tables, chosen: closer where passes of one more row differ most; between them are straight lines.
TARGET_ROWS = (1, 2, 4, 8, 10, 16, 24, 32, 48, LARGEST)
HEAD_ROWS = (1, 4, 10, 32)
CONTEXTS = (64, 2048)  # rows before a pass, chosen: times grow in proportion to them


@dataclass(frozen=True, slots=True)
class Timings:
    """seconds[c][r]: of a forward pass over rows[r] rows that follow contexts[c] others."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, context: int) -> Seconds:
        """Returns [LARGEST + 1] seconds of a pass over 0, 1, 2 ... rows that follow `context` others."""
        near, slope = line_of(self)
        seconds: Seconds = near + slope * max(0, context - self.contexts[0])
        return seconds

    def of(self, rows: int, context: int) -> float:
        """Returns the seconds of a pass over `rows` rows that follow `context` others."""
        near, slope = line_of(self)
        return float(near[rows]) + float(slope[rows]) * max(0, context - self.contexts[0])


@functools.lru_cache(maxsize=16)
def line_of(timings: Timings) -> tuple[Seconds, Seconds]:
    """Returns [LARGEST + 1] seconds of passes after the shorter context, and [LARGEST + 1] more for each row before."""
    counts = np.arange(LARGEST + 1)
    # A pass over more rows never takes less; where it seems to, the smaller one was disturbed.
    near, *far = (np.interp(counts, timings.rows, np.minimum.accumulate(line[::-1])[::-1]) for line in timings.seconds)
    if not far:
        return near, np.zeros_like(near)
    short, long = timings.contexts
    return near, np.maximum(far[0] - near, 0) / (long - short)


class Pass(NamedTuple):
    """One forward pass with the host's work around it. rows: of the pass; context: rows before it."""

    kind: Kind
    rows: int
    context: int
    seconds: float


@dataclass(frozen=True, slots=True)
class Costs:
    """Seconds of verifying a tree (target), and of growing one by a level (head; None without one), each with the
    host's own work.

    A pass takes less time after one of the same graph than after the other, whose threads and weights come in between.
    plain: of verifications of one row that follow each other; None: as in `target`."""

    target: Timings
    head: Timings | None
    plain: Timings | None = None

    def plain_at(self, context: int) -> float:
        """Returns the seconds of a token without drafts."""
        return (self.plain or self.target).of(1, context)


def shared(costs: Costs, others: int) -> Costs:
    """Costs of a text whose passes `others` more texts share: of a pass in which each has one row, its part; and what
    its further rows add to that, if it alone has more, or its part of that if all have as many, whichever is more: in
    kernels that compute twelve rows at a time the next row is expensive, and the eleven after it are not. Rows are more
    expensive than alone where the first ones of a pass wait for memory, so trees shrink as load grows (Sequoia, arXiv
    2402.12374, measures the same of batches)."""
    contexts, lines = costs.target.contexts, []
    texts, rows = 1 + others, np.array(TARGET_ROWS)
    for context in contexts:
        seconds = costs.target.at(context)
        of_all = _of_rows(seconds, np.array([texts]))  # a row of each text
        alone = _of_rows(seconds, rows + others) - of_all
        by_all = (_of_rows(seconds, rows * texts) - of_all) / texts
        lines.append(tuple((np.maximum(alone, by_all) + of_all / texts).tolist()))
    return Costs(Timings(TARGET_ROWS, contexts, tuple(lines)), costs.head)


def _of_rows(seconds: Seconds, rows: npt.NDArray[np.int64]) -> Seconds:
    """Seconds of passes over so many rows: those beyond LARGEST cost what the last one of the table does."""
    known = np.minimum(rows, LARGEST)
    of_rows: Seconds = seconds[known] + (rows - known) * (seconds[-1] - seconds[-2])
    return of_rows
