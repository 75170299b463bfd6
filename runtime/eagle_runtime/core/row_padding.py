"""Padding rows: added to a forward pass so that its number of rows is one for which the engine's kernels compute every
row alike.

A padding row repeats the last row. It sees the past and itself, no other row sees it, and its results are dropped.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle_runtime.base.tree import additive_mask


@dataclass(frozen=True, slots=True)
class RowPadding:
    """least: the smallest number of rows in a forward pass; multiple: the number is a multiple of it."""

    least: int = 1
    multiple: int = 1

    def rows(self, count: int) -> int:
        """Returns the number of rows in a forward pass over `count` rows, padding included."""
        return max(self.least, -(-count // self.multiple) * self.multiple)


def pad_rows(feeds: Mapping[str, Any], padding: int) -> dict[str, Any]:
    """Returns the feeds with `padding` more rows at the end. Each gets its own column in tree_mask [T, L]."""
    if not padding:
        return dict(feeds)
    mask = feeds["tree_mask"]
    rows, columns = mask.shape
    padded_mask = additive_mask(np.zeros((rows + padding, columns + padding), np.bool_), mask.dtype)
    padded_mask[:rows, :columns] = mask
    padded_mask[rows + np.arange(padding), columns + np.arange(padding)] = 0
    padded = {**feeds, "tree_mask": padded_mask}
    for name in {"input_ids", "position_ids", "features"} & feeds.keys():
        value = feeds[name]
        if isinstance(value, np.ndarray):
            padded[name] = np.concatenate([value, np.repeat(value[-1:], padding, axis=0)])
        else:  # Rows in device memory
            padded[name] = value.with_spare(padding)
    return padded
