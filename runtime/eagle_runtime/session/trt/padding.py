"""Pads forward passes to few shapes, so that the kernels compiled and the graphs captured for one serve the next ones.

Shapes: T rows fed, P past rows, L columns of the mask, R rows with logits, each padded. Padding rows of T come last and
see themselves. Padding rows of P lie between the past and the new rows, and no row sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle_runtime.tree import Int

PAST_STEP = 256  # rows; a generation's padded P grows only every so many tokens


@dataclass(frozen=True, slots=True)
class PassShape:
    """The padded sizes of one forward pass. Captured graphs are kept by it."""

    rows: int
    past: int
    columns: int
    logit_rows: int

    @property
    def sizes(self) -> Mapping[str, int]:
        """The sizes by the names of the graphs' dimensions."""
        return {"T": self.rows, "P": self.past, "L": self.columns, "R": self.logit_rows}


def round_up(count: int, step: int) -> int:
    """Returns the smallest multiple of `step` that is at least `count`."""
    return -(-count // step) * step


def bucket(rows: int) -> int:
    """Returns the padded number of rows for `rows` >= 1: one of 1, 2, 4, 8, 16, 32, 48, 64, 128, 192, ..."""
    if rows <= 16:
        return 1 << (rows - 1).bit_length()
    return round_up(rows, 16 if rows <= 64 else 64)


def pass_shape(rows: int, past: int, columns: int, logit_rows: int, past_step: int) -> PassShape:
    """Returns the shape of a forward pass over `rows` rows after `past` rows, whose mask has `columns` columns (rows <=
    columns <= past + rows). past_step: P is padded to a multiple of it; 1 leaves P as it is."""
    padded, padded_past = bucket(rows), round_up(past, past_step)
    free = past - (columns - rows)  # past rows before the mask's first column, which every row sees
    covered = round_up(padded_past - free, past_step)
    if past_step > 1:  # also where no row is padded, so that the shape is the usual one
        covered = min(padded_past, max(covered, past_step))
    return PassShape(padded, padded_past, covered + padded, bucket(logit_rows))


def write_mask(mask: npt.NDArray[np.floating], past: int, shape: PassShape, out: npt.NDArray[np.floating]) -> None:
    """Write the padded mask to out [shape.rows, shape.columns]. mask [T, L]: additive, of a forward pass after `past`
    rows."""
    rows, columns = mask.shape
    covered = shape.columns - shape.rows  # past rows with a column in `out`, padding included
    seen = columns - rows  # past rows with a column in `mask`
    first = covered - (shape.past - past) - seen
    out[:] = np.finfo(mask.dtype).min
    out[:, :first] = 0
    out[:rows, first : first + seen] = mask[:, :seen]
    out[:rows, covered : covered + rows] = mask[:, seen:]
    padded = np.arange(rows, shape.rows)
    out[padded, covered + padded] = 0


def write_ids(ids: Int, out: Int) -> None:
    """Write ids [n] to out [m], followed by zeros."""
    out[: len(ids)] = ids
    out[len(ids) :] = 0
