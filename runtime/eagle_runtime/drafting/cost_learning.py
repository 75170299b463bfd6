"""How each pass of a generation corrects what forward passes are believed to cost.

What is believed is a table (from shapes alone, or of an earlier run), a correction of each of its sizes, and
the covariance of these corrections: a Kalman filter on the logarithms of seconds. A pass corrects its own size, and in
proportion the sizes near it, whose corrections are taken to be alike. A scale common to all passes may change from pass
to pass: a machine that is slower for some seconds makes no size look expensive, since the next pass, whatever its size,
is slower too. The scale is learned from a single pass, so of a table from shapes alone ratios count: of many rows to
one, and of the head to the target.

Shapes: S corrections, of them one of the scale, one of verifications that follow another, one of the context's share
for each graph, and those of the sizes of target and head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle_runtime.drafting.cost_model import (
    CONTEXTS,
    HEAD_ROWS,
    LARGEST,
    TARGET_ROWS,
    Costs,
    Pass,
    Timings,
    line_of,
)

Array = npt.NDArray[np.float64]

SCALE, PLAIN, TARGET_CONTEXT, HEAD_CONTEXT, SIZES = range(5)  # places of the corrections
STARTS = {"target": SIZES, "head": SIZES + len(TARGET_ROWS)}
ROWS = {"target": TARGET_ROWS, "head": HEAD_ROWS}
COUNT = STARTS["head"] + len(HEAD_ROWS)

# Standard deviations of logarithms: how far a table may be off before any pass was seen. They are assumptions; with
# them, trees on the five simulated machines of test_learned_costs.py reach 95 % of the best rate after 1200 tokens.
SCALE_OFF, OLD_SCALE_OFF = 2.0, 0.5  # the speed of a machine that is not known, and of one that is known from before
PLAIN_OFF, CONTEXT_OFF = 0.2, 0.7  # a pass after one of its kind, and the share of the context
HEAD_OFF = 0.5  # the head against the target
GROWTH_OFF, NEAR_OFF = 0.7, 0.3  # of 64 rows against one, and of a size against those near it
NOISE = 0.25  # of a pass
CLIPPED = 2.0  # deviations that a pass may be off at most; what was more disturbed counts as this
DRIFT = 0.05  # of the scale from pass to pass
RENEWED = 0.001  # of the first uncertainty comes back with every pass, so that learning goes on


@dataclass(frozen=True, slots=True)
class Belief:
    """base: the table corrected; corrections [S]: logarithms; spread [S, S]: their covariance."""

    base: Costs
    corrections: Array
    spread: Array


def _weights(rows: Sequence[int]) -> Array:
    """[LARGEST + 1, len(rows)]: what the correction of 0, 1, 2 ... rows takes of each size's, straight lines over the
    logarithm of rows."""
    counts = np.log(np.maximum(np.arange(LARGEST + 1), 1))
    return np.array([np.interp(counts, np.log(rows), one) for one in np.eye(len(rows))]).T


WEIGHTS = {kind: _weights(rows) for kind, rows in ROWS.items()}


def _first_spread() -> Array:
    """[S, S]: covariance of the corrections of a table made of shapes alone."""
    spread = np.zeros((COUNT, COUNT))
    spread[SCALE, SCALE] = SCALE_OFF**2
    spread[PLAIN, PLAIN] = PLAIN_OFF**2
    spread[[TARGET_CONTEXT, HEAD_CONTEXT], [TARGET_CONTEXT, HEAD_CONTEXT]] = CONTEXT_OFF**2
    spread[STARTS["head"] :, STARTS["head"] :] = HEAD_OFF**2
    for kind, start in STARTS.items():
        logs = np.log2(ROWS[kind]) / np.log2(LARGEST)
        apart = (logs[:, None] - logs[None]) * np.log2(LARGEST) / 2
        near = GROWTH_OFF**2 * np.outer(logs, logs) + NEAR_OFF**2 * np.exp(-(apart**2) / 2)
        spread[start : start + len(logs), start : start + len(logs)] += near
    return spread


FIRST_SPREAD = _first_spread()
LASTING = FIRST_SPREAD.copy()  # what uncertainty goes back to; the scale's grows by DRIFT alone
LASTING[SCALE, SCALE] = 0.0


def unknown(base: Costs) -> Belief:
    """Returns the belief that begins with a table of shapes alone."""
    return Belief(base, np.zeros(COUNT), FIRST_SPREAD)


def expected(belief: Belief, one: Pass) -> tuple[float, Array]:
    """Returns the logarithm of the seconds that a pass is expected to take, and its derivative by the corrections
    [S]."""
    graph = "target" if one.kind == "plain" else one.kind
    timings = getattr(belief.base, one.kind) or belief.base.target
    rows = min(one.rows, LARGEST)
    near, slope = line_of(timings)
    place = TARGET_CONTEXT if graph == "target" else HEAD_CONTEXT
    context = slope[rows] * max(0, one.context - timings.contexts[0]) * np.exp(belief.corrections[place])
    total = near[rows] + context
    by = np.zeros(COUNT)
    by[SCALE] = 1
    by[PLAIN] = one.kind == "plain"
    start, weights = STARTS[graph], WEIGHTS[graph][rows]
    by[start : start + len(weights)] = weights
    log = float(np.log(total) + by @ belief.corrections)
    by[place] = context / total
    return log, by


def learned(belief: Belief, passes: Sequence[Pass]) -> Belief:
    """Returns the belief after some passes, in the order they ran."""
    corrections, spread = belief.corrections, belief.spread
    for one in passes:
        log, by = expected(Belief(belief.base, corrections, spread), one)
        spread = spread + RENEWED * (LASTING - spread)
        spread[SCALE, SCALE] = min(spread[SCALE, SCALE] + DRIFT**2, SCALE_OFF**2)
        shared = spread @ by
        variance = float(by @ shared) + NOISE**2
        most = CLIPPED * variance**0.5
        off = min(max(float(np.log(one.seconds)) - log, -most), most)
        corrections = corrections + shared * (off / variance)
        spread = spread - np.outer(shared, shared) / variance
    return Belief(belief.base, corrections, spread)


def table(belief: Belief) -> Costs:
    """Returns the table with its corrections."""
    by_context = np.exp(belief.corrections[[TARGET_CONTEXT, HEAD_CONTEXT]])
    scale, plain = np.exp(belief.corrections[[SCALE, PLAIN]])

    def corrected(timings: Timings, kind: str, of_context: float, factor: float, rows: tuple[int, ...]) -> Timings:
        near, slope = line_of(timings)
        factors = factor * np.exp(WEIGHTS[kind] @ belief.corrections[STARTS[kind] :][: len(ROWS[kind])])
        lines = [factors * (near + slope * of_context * (context - timings.contexts[0])) for context in CONTEXTS]
        return Timings(rows, CONTEXTS, tuple(tuple(line[list(rows)].tolist()) for line in lines))

    base, (of_target, of_head) = belief.base, by_context.tolist()
    target = corrected(base.target, "target", of_target, scale, TARGET_ROWS)
    alone = corrected(base.plain or base.target, "target", of_target, scale * plain, (1,))
    if base.head is None:
        return Costs(target, None, alone)
    return Costs(target, corrected(base.head, "head", of_head, scale, HEAD_ROWS), alone)
