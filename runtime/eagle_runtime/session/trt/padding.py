"""Passes padded to few shapes: what a GPU engine compiles, or captures as a graph, serves the next pass too.

Shapes: T rows fed, P past rows, L masked columns, R rows with logits, as everywhere; a pass has them padded. The
padded rows of T stand last and see themselves; the padded columns of P stand between the past and the new rows, and
no row sees them.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle_runtime.tree import Int

PAST_STEP = 256  # rows; a generation's P grows with every pass, but its padded P only every so many tokens


@dataclass(frozen=True, slots=True)
class PassShape:
    """The padded sizes of one pass, the key of everything that depends on shapes."""

    rows: int
    past: int
    columns: int
    logit_rows: int

    @property
    def sizes(self) -> Mapping[str, int]:
        """By the names that the graphs' dimensions have."""
        return {"T": self.rows, "P": self.past, "L": self.columns, "R": self.logit_rows}


def round_up(count: int, step: int) -> int:
    """The least multiple of step that is not below count."""
    return -(-count // step) * step


def bucket(rows: int) -> int:
    """Rows to compute for `rows` wanted (1 or more): 1, 2, 4, 8, 16, 32, 48, 64, 128, 192, ..."""
    if rows <= 16:
        return 1 << (rows - 1).bit_length()
    return round_up(rows, 16 if rows <= 64 else 64)


def pass_shape(rows: int, past: int, columns: int, logit_rows: int, past_step: int) -> PassShape:
    """The shape of a pass over `rows` rows behind `past`, whose mask has `columns` columns (rows <= columns <= past +
    rows). past_step: what the past is padded to; 1 leaves it as it is."""
    padded, padded_past = bucket(rows), round_up(past, past_step)
    free = past - (columns - rows)  # leading past rows that the mask leaves out, because every row sees them
    covered = round_up(padded_past - free, past_step)
    if past_step > 1:  # also where nothing happens to be padded, for the shape to be the usual one
        covered = min(padded_past, max(covered, past_step))
    return PassShape(padded, padded_past, covered + padded, bucket(logit_rows))


def write_mask(mask: npt.NDArray[np.floating], past: int, shape: PassShape, out: npt.NDArray[np.floating]) -> None:
    """mask [T, L], additive, of a pass behind `past` rows -> out [shape.rows, shape.columns]."""
    rows, columns = mask.shape
    covered = shape.columns - shape.rows  # past rows, padded ones included, that the new mask has columns for
    seen = columns - rows  # past rows that the given mask has columns for
    first = covered - (shape.past - past) - seen
    out[:] = np.finfo(mask.dtype).min
    out[:, :first] = 0
    out[:rows, first : first + seen] = mask[:, :seen]
    out[:rows, covered : covered + rows] = mask[:, seen:]
    padded = np.arange(rows, shape.rows)
    out[padded, covered + padded] = 0


def write_ids(ids: Int, out: Int) -> None:
    """ids [n] -> out [m], zeros behind them."""
    out[: len(ids)] = ids
    out[len(ids) :] = 0
