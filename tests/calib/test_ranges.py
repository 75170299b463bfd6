"""Histograms against NumPy's, thresholds against slow definitions, samples, and distributions whose answer is known."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import pytest
from scipy import stats

from eagle_calib.calibration import METHODS
from eagle_calib.ranges import BINS, COARSE, LEVELS, STEPS, Histogram, clipping_ranges, entropy, mse, percentile

RNG = np.random.default_rng(7)
OUTLIER = 30.0


def histogram_of(values: npt.NDArray[np.floating], pieces: int = 1) -> Histogram:
    histogram = Histogram()
    for piece in np.array_split(np.abs(values).astype(np.float32), pieces):
        histogram.add(piece)
    return histogram


def exact(cdf: Callable[[npt.NDArray[np.float64]], npt.NDArray[np.float64]], limit: float) -> npt.NDArray[np.int64]:
    """Counts of a distribution of |x| over [0, limit), without the noise of samples."""
    return np.rint(np.diff(cdf(np.linspace(0, limit, BINS + 1))) * 1e12).astype(np.int64)


SAMPLES = {
    "normal": RNG.standard_normal(20_000),
    "laplace": RNG.laplace(size=20_000),
    "normal and outliers": np.concatenate([RNG.standard_normal(20_000), [OUTLIER, -OUTLIER, 0.9 * OUTLIER]]),
    "mostly zeros": np.where(RNG.random(20_000) < 0.95, 0, RNG.standard_normal(20_000)),
    "tiny": 1e-30 * RNG.standard_normal(20_000),
    "few values": RNG.choice([0.5, 3.0, 100.0], 20_000, p=[0.9, 0.0999, 0.0001]),
}
samples = pytest.mark.parametrize("values", SAMPLES.values(), ids=SAMPLES.keys())


@samples
def test_histogram_is_that_of_all_values_in_any_order(values: npt.NDArray[np.floating]) -> None:
    small_first, small_last = np.sort(np.abs(values)), np.sort(np.abs(values))[::-1]
    found = histogram_of(values)
    limit = found.width * BINS
    assert limit / 2 <= np.abs(values.astype(np.float32)).max() < limit and math.frexp(limit)[0] == 0.5
    wanted, _ = np.histogram(np.abs(values.astype(np.float32)).astype(np.float64), BINS, (0, limit))
    np.testing.assert_array_equal(found.counts, wanted)
    for order in (small_first, small_last, values):
        again = histogram_of(order, pieces=37)
        assert again.exponent == found.exponent
        np.testing.assert_array_equal(again.counts, found.counts)


def test_zeros_do_not_set_the_limit() -> None:
    histogram = Histogram()
    for values in (np.zeros(5), np.full(3, 2.0**-20), np.zeros((2, 2))):
        histogram.add(values.astype(np.float32))
    assert histogram.width * BINS == 2.0**-19
    assert histogram.counts[0] == 9 and histogram.counts[BINS // 2] == 3 and histogram.counts.sum() == 12


@samples
def test_percentile_is_the_quantile(values: npt.NDArray[np.floating]) -> None:
    histogram = histogram_of(values)
    for share in (0.5, 0.99, 0.9999):
        wanted = np.quantile(np.abs(values), share, method="inverted_cdf")
        assert abs(percentile(histogram.counts, histogram.width, share) - wanted) <= histogram.width


def entropy_of_one(p: npt.NDArray[np.float64], bins: int) -> float:
    """Divergence of the quantised distribution from the one clipped after `bins` bins, by the definition."""
    reference = p[:bins].copy()
    reference[-1] += p[bins:].sum()
    quantised = np.zeros(bins)
    group = np.arange(bins) * LEVELS // bins
    for level in range(LEVELS):
        filled = (group == level) & (p[:bins] > 0)
        if filled.any():
            quantised[filled] = p[:bins][filled].mean()
    return float(stats.entropy(reference, quantised)) if quantised.any() else math.inf


@samples
def test_entropy_finds_the_least_divergence(values: npt.NDArray[np.floating]) -> None:
    histogram = histogram_of(values)
    p = histogram.counts.reshape(COARSE, -1).sum(axis=1).astype(np.float64)
    p[0] = p[1]
    found = entropy(histogram.counts, histogram.width) / (histogram.width * BINS) * COARSE
    assert found == round(found) and LEVELS <= found <= COARSE
    others = range(LEVELS + round(found) % 13, COARSE + 1, 13)
    assert entropy_of_one(p, round(found)) <= min(entropy_of_one(p, bins) for bins in others) + 1e-9


@samples
def test_mse_makes_about_the_least_error_on_the_values_themselves(values: npt.NDArray[np.floating]) -> None:
    def error(threshold: float) -> float:
        step = threshold / STEPS
        return float(np.mean((values - np.clip(np.rint(values / step), -STEPS, STEPS) * step) ** 2))

    histogram, absmax = histogram_of(values), float(np.abs(values).max())
    least = min(error(threshold) for threshold in absmax * np.geomspace(1 / 256, 1, 400))
    # A bin may be as wide as 1/64 of a step at the absmax, so no error can be told from that of such a shift.
    assert error(mse(histogram.counts, histogram.width, absmax)) <= 1.1 * least + (histogram.width / 2) ** 2


def test_mse_of_distributions_whose_best_threshold_is_published() -> None:
    """Banner et al., arXiv 1810.05723, section 3: 8 bits clip a normal distribution at 3.92 sigma, Laplace's at 9.89 b
    (there by uniform noise within the range; thresholds are tried in steps of 4.4 %)."""
    for cdf, wanted, limit in (
        (lambda x: 2 * stats.norm.cdf(x) - 1, 3.92, 8.0),
        (lambda x: 1 - np.exp(-x), 9.89, 16.0),
    ):
        counts = exact(cdf, limit)
        assert mse(counts, limit / BINS, limit * 0.999) == pytest.approx(wanted, rel=0.05)


def test_every_method_keeps_a_uniform_distribution_and_clips_outliers() -> None:
    flat = np.linspace(0, 1, 100_001)
    ranges = clipping_ranges(histogram_of(flat), 1.0)
    assert tuple(ranges) == METHODS and ranges["absmax"] == 1
    assert all(value == pytest.approx(1, abs=0.002) for value in ranges.values())
    far = clipping_ranges(histogram_of(SAMPLES["normal and outliers"]), OUTLIER)
    assert far["absmax"] == OUTLIER
    assert far["percentile"] < OUTLIER  # two of 20 003 values lie above
    assert 2 < far["entropy"] < 5 and 3 < far["mse"] < OUTLIER


@samples
def test_ranges_are_positive_within_the_absmax_and_scale_with_the_values(values: npt.NDArray[np.floating]) -> None:
    absmax = float(np.abs(values.astype(np.float32)).max())
    one, two = clipping_ranges(histogram_of(values), absmax), clipping_ranges(histogram_of(4 * values), 4 * absmax)
    assert all(0 < value <= absmax for value in one.values())
    assert two == pytest.approx({method: 4 * value for method, value in one.items()})
