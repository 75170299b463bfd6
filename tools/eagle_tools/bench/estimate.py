"""Medians with bootstrap confidence intervals, of values and of paired ratios."""

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
    """A median and the interval that holds it with 95 % confidence, over `count` values."""

    value: float
    low: float
    high: float
    count: int


def median_of(values: Sequence[float], seed: int = 0) -> Estimate:
    """The median of one value or more; the interval is the bootstrap's percentiles, the same at every call."""
    array = np.asarray(values, np.float64)
    assert array.size and np.isfinite(array).all()
    rows = np.random.default_rng(seed).integers(0, array.size, (RESAMPLES, array.size))
    low, high = np.quantile(np.median(array[rows], axis=1), [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(np.median(array)), float(low), float(high), array.size)


def paired_ratio(ours: Mapping[Key, float], theirs: Mapping[Key, float]) -> Estimate | None:
    """How many times faster `ours` is: the median over prompts of the ratio of speeds on one prompt. Speeds by prompt;
    prompts that only one of them has, or where either is 0, are left out; None if that is all of them."""
    ratios = [ours[key] / theirs[key] for key in ours if theirs.get(key, 0) > 0 and ours[key] > 0]
    return median_of(ratios) if ratios else None
