"""Pads forward passes to few shapes, which are all known in advance: TensorRT for RTX compiles kernels for every one of
them, and graphs are captured for it, before the first token is generated.

Dimensions: T rows fed, P past rows, R rows with logits. Padding rows of T come last and see themselves. Padding rows of
P lie between the past and the new rows, and no row sees them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Int, hiding

Mask = npt.NDArray[np.floating]

# Chosen, never measured: more sizes pad less, and take longer to specialise.
PAST_STEP = 256  # rows: the shortest padded past, and the step of the longest
TREE_ROWS = 64  # T up to which every row has logits; beyond are chunks of a prompt, whose last row alone has them
TARGET_ROWS = (1, 16, 32, TREE_ROWS, 512)  # T of the target: one token, trees, chunks of a prompt
HEAD_ROWS = (16, 64)  # T of a head: an accepted path, what it reads of a prompt
KEPT_ROWS = 32  # rows of an accepted path that one call gathers; longer ones are copied row by row


@dataclass(frozen=True, slots=True)
class PassShape:
    """The padded sizes of one forward pass: (name of a dimension of the graph, size), by name."""

    pairs: tuple[tuple[str, int], ...]

    @property
    def sizes(self) -> dict[str, int]:
        """The sizes by the names of the graph's dimensions."""
        return dict(self.pairs)


@dataclass(frozen=True, slots=True)
class Steps:
    """The sizes that the forward passes of one engine are padded to. rows: T, ascending, none for a graph without T;
    past: P, ascending; logit_rows: R of a pass of more than TREE_ROWS rows, if it wants more than one; 0 for a graph
    without R."""

    rows: tuple[int, ...]
    past: tuple[int, ...]
    logit_rows: int = 0


def round_up(count: int, step: int) -> int:
    """Returns the smallest multiple of `step` that is at least `count`."""
    return -(-count // step) * step


def next_step(steps: Sequence[int], count: int) -> int:
    """Returns the first of these ascending sizes that is at least `count`; `count` itself if none is."""
    return next((step for step in steps if step >= count), count)


def past_steps(capacity: int) -> tuple[int, ...]:
    """Returns the padded lengths of a past of up to `capacity` rows: PAST_STEP, doubled again and again, and last the
    capacity, rounded up to PAST_STEP."""
    last, steps = round_up(max(1, capacity), PAST_STEP), [PAST_STEP]
    while steps[-1] < last:
        steps.append(min(2 * steps[-1], last))
    return tuple(steps)


def rows_up_to(rows: Sequence[int], most: int) -> tuple[int, ...]:
    """Returns the steps of `rows` that passes of up to `most` rows are padded to."""
    return tuple(step for step in rows if step <= next_step(rows, most))


def pass_shape(steps: Steps, rows: int, past: int, logit_rows: int = 0) -> PassShape:
    """Returns the shape of a forward pass over `rows` rows after `past` rows, with logits of `logit_rows` rows; of
    the past alone for a graph without T. An empty past is padded too: TensorRT's kernels for attention get at least one
    row of it."""
    sizes = {"P": next_step(steps.past, past)}
    if steps.rows:
        sizes["T"] = padded = next_step(steps.rows, rows)
        if steps.logit_rows:
            wide = next_step((1, min(padded, steps.logit_rows)), logit_rows)
            sizes["R"] = padded if padded <= TREE_ROWS else wide
    return PassShape(tuple(sorted(sizes.items())))


def shapes_of(steps: Steps) -> tuple[PassShape, ...]:
    """Returns every shape but that of trees of more than TREE_ROWS nodes, which are rare: smaller pasts first."""
    return tuple(
        pass_shape(steps, rows, past, rows if rows <= TREE_ROWS else 1)
        for past in steps.past
        for rows in steps.rows or (0,)
    )


def write_masks(visible: Mask | None, past: int, out: Mask, past_out: Mask) -> None:
    """Write the masks of a forward pass after `past` rows. visible [n, n]: additive, of its rows; None for rows of
    which each sees those before it. out [T, T]: of the padded rows; past_out [P]: of the padded past."""
    hidden = hiding(out.dtype)
    past_out[:past] = 0
    past_out[past:] = hidden
    if visible is None:
        out[:] = np.where(np.tri(len(out), dtype=np.bool_), 0, hidden)
        return
    rows = len(visible)
    out[:] = hidden
    out[:rows, :rows] = visible
    padded = np.arange(rows, len(out))
    out[padded, padded] = 0


def write_seen(rows: int, out: Mask) -> None:
    """Write to out [T] which of the padded rows are rows."""
    out[:rows] = 0
    out[rows:] = hiding(out.dtype)


def write_ids(ids: Int, out: Int) -> None:
    """Write ids [n] to out [m], followed by zeros."""
    out[: len(ids)] = ids
    out[len(ids) :] = 0
