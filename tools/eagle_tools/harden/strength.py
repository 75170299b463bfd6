"""How hard a pair is made: the three named strengths."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_runtime.base.errors import EagleError

QUIET_SHARE = 0.04  # one or two in a block of 32 channels


class HardenError(EagleError):
    """The pair cannot be hardened."""


@dataclass(frozen=True, slots=True)
class Strength:
    """What the transforms do. A factor is drawn log-uniformly between the square root of its maximum and the maximum.

    outlier: largest factor of a norm's outlier channels. quiet: largest factor by which other channels of a norm
    shrink, QUIET_SHARE of them, so that the weights that read them grow. inner: largest factor of the outlier channels
    between v and o, between up and down, and of keys. share: fraction of channels that are outliers, at least two.
    jitter: standard deviation of the logarithm of every channel's factor. sink: largest value of the planted token's
    hidden state, as a multiple of the median magnitude of its others. rotation: a name of rotations.ROTATIONS."""

    outlier: float
    quiet: float
    inner: float
    share: float
    jitter: float
    sink: float
    rotation: str


STRENGTHS = {
    "mild": Strength(outlier=4, quiet=8, inner=2, share=0.01, jitter=0.05, sink=100, rotation="spread"),
    "middle": Strength(outlier=6, quiet=24, inner=3, share=0.01, jitter=0.05, sink=1000, rotation="concentrate"),
    "strong": Strength(outlier=60, quiet=30, inner=10, share=0.01, jitter=0.2, sink=3000, rotation="concentrate"),
}
