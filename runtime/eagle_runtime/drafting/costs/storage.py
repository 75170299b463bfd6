"""The file in the user's cache folder that keeps an estimate of costs from run to run."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterable
from typing import Any

import numpy as np

from eagle_runtime.drafting.costs.estimate import COUNT, OLD_SCALE_OFF, SCALE, SCALE_OFF, Belief, table
from eagle_runtime.drafting.costs.tables import LARGEST, Costs, Timings
from eagle_runtime.machine.user_cache import machine_key, read_cached, write_cached

ROUNDING = 1e-9  # of a covariance's least eigenvalue
# Limits of a table that is read; no measurement exceeds them.
FAR = 1 << 30  # rows before a pass
SLOWEST_S = 1e6  # seconds of a pass
TIMED = "cycles, all levels of the head alike"  # to be changed with what is timed


def file_name(facts: Iterable[str]) -> str:
    """Returns the name of the file that costs are kept in: equal for equal facts on a machine that looks the same."""
    return f"costs-{machine_key([TIMED, *facts])}.json"


def read_belief(file: str) -> Belief | None:
    """Returns the estimate of an earlier run that `file` holds; None if there is none, or it cannot be used."""
    data = read_cached(file)
    try:
        base, spread = costs_from_json(data["costs"]), np.array(data["spread"], np.float64)
        if spread.shape != (COUNT, COUNT) or not np.isfinite(spread).all() or not np.allclose(spread, spread.T):
            return None
        if np.abs(spread).max() > 2 * SCALE_OFF**2 or np.linalg.eigvalsh(spread).min() < -ROUNDING:
            return None
    except (ValueError, KeyError, TypeError, OverflowError, np.linalg.LinAlgError):
        return None
    spread[SCALE, SCALE] = max(spread[SCALE, SCALE], OLD_SCALE_OFF**2)
    return Belief(base, np.zeros(COUNT), spread)


def write_belief(file: str, belief: Belief) -> None:
    """Write the corrected table and the covariance of what is not known of it."""
    write_cached(file, {"costs": dataclasses.asdict(table(belief)), "spread": belief.spread.tolist()})


def costs_from_json(data: dict[str, Any]) -> Costs:
    """Returns the Costs that dataclasses.asdict made the data of. Raises ValueError, KeyError, TypeError or
    OverflowError for anything else, and for numbers that no table holds."""
    names = ("head", "plain")
    return Costs(_from_json(data["target"]), *(None if data[n] is None else _from_json(data[n]) for n in names))


def _from_json(data: dict[str, Any]) -> Timings:
    timings = Timings(
        tuple(int(count) for count in data["rows"]),
        tuple(int(context) for context in data["contexts"]),
        tuple(tuple(float(second) for second in line) for line in data["seconds"]),
    )
    shaped = len(timings.seconds) == len(timings.contexts) and all(
        len(line) == len(timings.rows) for line in timings.seconds
    )
    counted = all(0 < row <= LARGEST for row in timings.rows) and all(0 <= rows < FAR for rows in timings.contexts)
    rising = all(a < b for numbers in (timings.rows, timings.contexts) for a, b in itertools.pairwise(numbers))
    timed = all(0 < second < SLOWEST_S for line in timings.seconds for second in line)
    if not (shaped and counted and rising and timed and timings.rows and len(timings.contexts) in (1, 2)):
        raise ValueError
    return timings
