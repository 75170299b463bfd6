"""Rows added to a forward pass so that it has a number of rows that the engine's kernels treat alike.

An added row repeats the last one. It sees the past and itself, no other row sees it, and its results are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle_runtime.tree import additive_mask


@dataclass(frozen=True, slots=True)
class RowPadding:
    """least: rows that a forward pass is given at least; multiple: their number is a whole multiple of it."""

    least: int = 1
    multiple: int = 1

    def rows(self, count: int) -> int:
        """Returns how many rows a forward pass over `count` rows is given."""
        return max(self.least, -(-count // self.multiple) * self.multiple)


def fill_up(feeds: Mapping[str, Any], more: int) -> dict[str, Any]:
    """Returns feeds with `more` rows after the last: in tree_mask [T, L] each gets a column of its own, which no other
    row sees, and it sees no other."""
    if not more:
        return dict(feeds)
    mask = feeds["tree_mask"]
    rows, columns = mask.shape
    wider = additive_mask(np.zeros((rows + more, columns + more), np.bool_), mask.dtype)
    wider[:rows, :columns] = mask
    wider[rows + np.arange(more), columns + np.arange(more)] = 0
    filled = {**feeds, "tree_mask": wider}
    for name in {"input_ids", "position_ids", "features"} & feeds.keys():
        value = feeds[name]
        if isinstance(value, np.ndarray):
            filled[name] = np.concatenate([value, np.repeat(value[-1:], more, axis=0)])
        else:  # rows that stay on a device
            filled[name] = value.with_spare(more)
    return filled
