"""Where a per-tensor quantiser should clip, from a histogram of |x|.

    absmax      nowhere
    percentile  where 99.99 % of the values lie below
    entropy     where 128 levels tell least apart from the distribution as it was (Kullback-Leibler), as TensorRT does
    mse         where 127 levels on either side of zero make the least squared error

The histogram's limit is a power of two that doubles when a larger value comes, two bins becoming one: the counts are
exact, and the same in whatever order values come.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eagle_calib.calibration import Float

BINS = 1 << 14  # with the limit under twice the absmax, at least half of them are used
SMALLEST = -126  # exponent of the first limit: below it lie only subnormal numbers
PERCENTILE = 0.9999
COARSE = 1 << 11  # bins that the entropy method looks at, as TensorRT's calibrator
LEVELS = 128  # of its quantiser
STEPS = 127  # of an int8 quantiser, on either side of zero
OCTAVES, PER_OCTAVE = 8, 16  # thresholds that the mse method tries, downwards from the absmax

Counts = npt.NDArray[np.int64]


class Histogram:
    """Counts of |x| in BINS equal intervals [0, limit), limit = 2 ** exponent above every value seen."""

    def __init__(self) -> None:
        self.counts: Counts = np.zeros(BINS, np.int64)
        self.exponent = SMALLEST

    @property
    def width(self) -> float:
        """Of a bin."""
        return float(np.ldexp(1.0, self.exponent)) / BINS

    def add(self, magnitudes: Float) -> None:
        """Count values of 0 or more, of any shape; all finite."""
        largest = magnitudes.max(initial=0)
        above = int(np.frexp(largest)[1]) if largest > 0 else SMALLEST  # 2 ** above is the first power beyond
        while self.exponent < above and self.counts.any():
            self.counts = np.concatenate([self.counts.reshape(-1, 2).sum(axis=1), np.zeros(BINS // 2, np.int64)])
            self.exponent += 1
        self.exponent = max(self.exponent, above)
        bins = np.ldexp(magnitudes, BINS.bit_length() - 1 - self.exponent).astype(np.int64)
        self.counts += np.bincount(bins.ravel(), minlength=BINS)


def clipping_ranges(histogram: Histogram, absmax: float) -> dict[str, float]:
    """Method -> threshold, above 0 and at most the absmax: the largest value counted, no subnormal number."""
    counts, width = histogram.counts, histogram.width
    return {
        "absmax": absmax,
        "percentile": min(percentile(counts, width), absmax),
        "entropy": min(entropy(counts, width), absmax),
        "mse": mse(counts, width, absmax),
    }


def percentile(counts: Counts, width: float, share: float = PERCENTILE) -> float:
    """The value below which this share of the counted lies, taken as even within a bin."""
    upto = np.cumsum(counts)
    wanted = share * upto[-1]
    index = int(np.searchsorted(upto, wanted))
    return float(index + 1 - (upto[index] - wanted) / counts[index]) * width


def entropy(counts: Counts, width: float) -> float:
    """The threshold whose quantised distribution diverges least from the one that clips there.

    For a threshold after i bins, p has the counts of those bins, the last also all above; q spreads the counts of each
    of LEVELS equal groups of bins evenly over the group's bins that are not empty. In the sum p log(p / q) the first
    part is a running sum, and q is one number per group: all thresholds are done at once."""
    p = counts.reshape(COARSE, -1).sum(axis=1).astype(np.float64)
    p[0] = p[1]  # a spike at zero would outweigh all else and is exact at any threshold
    bins = np.arange(LEVELS, COARSE + 1)  # every i
    below = np.concatenate([[0.0], np.cumsum(p)])
    filled = np.concatenate([[0.0], np.cumsum(p > 0)])
    log_p = np.concatenate([[0.0], np.cumsum(_times_log(p, p))])
    edges = -(-bins[:, None] * np.arange(LEVELS + 1) // LEVELS)  # [thresholds, LEVELS + 1]: first bin of each group
    mass, spread = np.diff(below[edges]), np.diff(filled[edges])
    mean = mass / np.maximum(spread, 1)
    total, kept, last = below[-1], below[bins], p[bins - 1]
    clipped = total - kept
    own = log_p[bins - 1] + _times_log(last + clipped, last + clipped)
    cross = _times_log(mass, mean).sum(axis=1) + _times_log(clipped, mean[:, -1])
    impossible = (last == 0) & (clipped > 0)  # q gives no chance to what p clips there
    divergence = np.full(len(bins), np.inf)
    fine = ~impossible & (kept > 0)
    divergence[fine] = (own[fine] - cross[fine]) / total + np.log(kept[fine] / total)
    best = len(bins) - 1 - int(np.argmin(divergence[::-1]))
    return float(bins[best]) * width * (BINS // COARSE)


def mse(counts: Counts, width: float, absmax: float) -> float:
    """The threshold, of some in geometric steps, at which clipping and rounding to STEPS make the least error."""
    filled = np.flatnonzero(counts)
    weights, centres = counts[filled], (filled + 0.5) * width
    thresholds = absmax * 2.0 ** (-np.arange(OCTAVES * PER_OCTAVE) / PER_OCTAVE)
    errors = []
    for threshold in thresholds:
        step = threshold / STEPS
        rounded = np.minimum(np.rint(centres / step), STEPS) * step
        errors.append(np.dot(weights, (centres - rounded) ** 2))
    return float(thresholds[int(np.argmin(errors))])


def _times_log(factor: npt.NDArray[np.float64], value: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """factor * log(value), 0 where either is 0."""
    return factor * np.log(np.where(value > 0, value, 1.0))
