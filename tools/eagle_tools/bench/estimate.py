"""Computes medians of values and of paired ratios, with bootstrap confidence intervals."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TypeVar

import numpy as np

RESAMPLES = 2000
LEVEL = 0.95

Key = TypeVar("Key")


@dataclass(frozen=True, slots=True)
class Estimate:
    """A median over `count` values and its 95 % confidence interval."""

    value: float
    low: float
    high: float
    count: int


def median_of(values: Sequence[float], seed: int = 0) -> Estimate:
    """Returns the median of at least one value. The interval consists of bootstrap percentiles, equal at every call."""
    array = np.asarray(values, np.float64)
    assert array.size and np.isfinite(array).all()
    rows = np.random.default_rng(seed).integers(0, array.size, (RESAMPLES, array.size))
    low, high = np.quantile(np.median(array[rows], axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(np.median(array)), float(low), float(high), array.size)


def paired_ratio(ours: Mapping[Key, float], theirs: Mapping[Key, float]) -> Estimate | None:
    """Returns the median over prompts of ours / theirs on one prompt. Prompts that only one of them has, or where a
    value is 0, are left out; None if no prompt is left."""
    ratios = [ours[key] / theirs[key] for key in ours if theirs.get(key, 0) > 0 and ours[key] > 0]
    return median_of(ratios) if ratios else None
