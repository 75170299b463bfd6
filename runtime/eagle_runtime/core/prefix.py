"""Comparing token sequences from their beginning on."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np


def common_prefix(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns how many tokens two texts have in common from their beginning on; fast where one text goes on from the
    other."""
    length = min(len(first), len(second))
    one, other = list(first[:length]), list(second[:length])
    if one == other:
        return length
    return int(np.flatnonzero(np.asarray(one, np.int64) != np.asarray(other, np.int64))[0])
