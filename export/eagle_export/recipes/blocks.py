"""Weights of 4 or 8 bits: 2^bits levels, with a step and a zero level for each block of input channels and each output
column.

    weight ~ (level - zero) * step        weight, level [K, N]; step, zero [blocks, N]; level 0..2^bits - 1

`rounded` takes the nearest levels; compensation.py takes those with the least error on recorded inputs. Both
work in place, on tiles of columns: else most of the time is the memory's.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from eagle_export.base.parted import parts
from eagle_export.recipes.graph import Array
from eagle_export.recipes.tiles import product, tiled

SHARES = {  # bits -> shares of the full range that are tried
    4: np.linspace(0.7, 1.0, 13, dtype=np.float32),
    8: np.linspace(0.94, 1.0, 4, dtype=np.float32),
}
SMALLEST = 16  # channels per block: ONNX Runtime's operators take no fewer
NOTHING = np.float32(2.0**-25)  # a step that is no larger is 0 in fp16, and 1 / step may be beyond the range of fp32


@dataclass(frozen=True, slots=True)
class Grid:
    """How a weight is quantised. bits: 4 or 8. size: input channels per block; the last block may have fewer.
    asymmetric: each block has its own zero level, else it is the middle one. sixteenths: zero levels are kept in
    sixteenths of a level."""

    bits: int
    size: int
    asymmetric: bool
    sixteenths: bool = False

    @property
    def highest(self) -> int:
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero level of a symmetric block."""
        return 1 << (self.bits - 1)


def stored_bits(grid: Grid, channels: int) -> int:
    """Bits of one column of a weight: levels, and per block a step of 16 bits and, if asymmetric, a zero level. The
    last block is filled up."""
    step = 16 + (8 if grid.sixteenths else grid.bits if grid.asymmetric else 0)
    return -(-channels // grid.size) * (grid.size * grid.bits + step)


def fitted(grid: Grid, channels: int, whole: bool = False) -> Grid:
    """Returns the grid with blocks of the grid's size, or of a half, a quarter, ... of it where so many channels take
    fewer bits then: 576 channels are nine blocks of 64, or five of 128 of which one is filled up. whole: only sizes
    that divide the channels, if there are any."""
    grids = [grid]
    while grids[-1].size > SMALLEST:
        grids.append(replace(grid, size=grids[-1].size // 2))
    if whole:
        grids = [each for each in grids if channels % each.size == 0] or grids
    return min(grids, key=lambda each: stored_bits(each, channels))


@dataclass(frozen=True, slots=True)
class Blocks:
    """level [K, N] uint8, step [blocks, N] fp32, zero [blocks, N] uint8, of some grids in sixteenths of a level."""

    level: Array
    step: Array
    zero: Array
    grid: Grid

    def values(self) -> Array:
        """The weight [K, N] that the levels stand for."""
        block = np.arange(len(self.level)) // self.grid.size
        zero = self.zero / np.float32(16 if self.grid.sixteenths else 1)
        values: Array = (self.level.astype(np.float32) - zero[block]) * self.step[block]
        return values


def rounded(weight: Array, grid: Grid) -> Blocks:
    """Returns the nearest levels of a weight [K, N]."""
    return _rounded(weight, grid, lambda block: best_scale(block, None, grid))


def nearest(weight: Array, grid: Grid) -> Blocks:
    """As `rounded`, with steps that cover each block's whole range: faster, and a little less exact."""
    return _rounded(weight, grid, lambda block: Scale.of(*_covering(block, grid), grid))


def _rounded(weight: Array, grid: Grid, scale_of: Callable[[Array], Scale]) -> Blocks:
    (k, n), (step, zero) = weight.shape, empty_steps(weight, grid.size)
    level = np.empty((k, n), np.uint8)

    def quantise(piece: slice) -> None:
        for index, block in block_ranges(k, grid.size):
            part = weight[block, piece].copy()
            scale = scale_of(part)
            scale.nearest(part, part)
            part += scale.zero
            level[block, piece], step[index, piece], zero[index, piece] = part, scale.step, scale.zero

    tiled(quantise, n)
    return Blocks(level, step, zero, grid)


def by_parts(columns: Callable[[slice], Array], shape: tuple[int, int], quantise: Callable[[Array], Blocks]) -> Blocks:
    """Returns the levels of a weight of `shape` (K, N), of which a part of the columns is read and quantised at a
    time: levels of one column do not depend on another."""
    ranges = list(parts(shape, 1))
    first = quantise(columns(ranges[0]))
    if len(ranges) == 1:
        return first
    level, step, zero = (np.empty((len(one), shape[1]), one.dtype) for one in (first.level, first.step, first.zero))
    whole = Blocks(level, step, zero, first.grid)
    for piece in ranges:
        blocks = first if piece is ranges[0] else quantise(columns(piece))
        whole.level[:, piece], whole.step[:, piece], whole.zero[:, piece] = blocks.level, blocks.step, blocks.zero
    return whole


@dataclass(frozen=True, slots=True)
class Scale:
    """Steps and zero levels of one block [k, N]. inverse: of the step. lowest, highest: levels less the zero level. All
    are [N], and fp32."""

    step: Array
    zero: Array
    inverse: Array
    lowest: Array
    highest: Array

    @classmethod
    def of(cls, step: Array, zero: Array, grid: Grid) -> Scale:
        """step, zero: [N]"""
        return cls(step, zero, np.float32(1) / step, -zero, np.float32(grid.highest) - zero)

    def nearest(self, weight: Array, out: Array) -> None:
        """Writes the nearest levels, less the zero level, of values [..., N] to `out`."""
        np.multiply(weight, self.inverse, out=out)
        self.level_of(out, out)

    def level_of(self, steps: Array, out: Array) -> None:
        """As `nearest`, of values in steps."""
        np.rint(steps, out=out)
        np.maximum(out, self.lowest, out=out)
        np.minimum(out, self.highest, out=out)


def best_scale(weight: Array, importance: Array | None, grid: Grid) -> Scale:
    """Returns the scale of one block [k, N], that of a few candidates with the smallest squared error: clipping the
    largest value a little often costs less than a coarser step. importance [k]: weights of the errors."""
    counts = np.ones((1, len(weight)), np.float32) if importance is None else importance[None]
    whole, zero = _covering(weight, grid)
    best, step, error = np.full_like(whole, np.inf), np.ones_like(whole), np.empty_like(weight)
    for share in SHARES[grid.bits]:
        tried = Scale.of(whole * share, zero, grid)
        tried.nearest(weight, error)
        error *= tried.step
        error -= weight
        error *= error
        sums = product(counts, error)[0]
        better = sums < best
        best[better], step[better] = sums[better], tried.step[better]
    return Scale.of(step, zero, grid)


def _covering(weight: Array, grid: Grid) -> tuple[Array, Array]:
    """Returns the step and zero level [N], both fp32, of a block [k, N] that cover its whole range. A step that covers
    a share of it has the same zero level. Of a block that fp16 cannot tell from zeros the step is 1."""
    if grid.asymmetric:
        low, high = np.minimum(weight.min(0), 0), np.maximum(weight.max(0), 0)
        step = (high - low) / np.float32(grid.highest)
        step[step <= NOTHING] = 1
        return step, np.rint(-low / step)
    # The value furthest from zero gets level 0, which reaches one step further than the highest level, so the step has
    # the opposite sign of that value.
    low, high = weight.min(0), weight.max(0)
    step = -np.where(-low > high, low, high) / np.float32(grid.middle)
    step[np.abs(step) <= NOTHING] = 1
    return step, np.full_like(step, grid.middle)


def block_ranges(channels: int, size: int) -> list[tuple[int, slice]]:
    """Returns number and channels of each block."""
    starts = range(0, channels, size)
    return [(index, slice(start, min(start + size, channels))) for index, start in enumerate(starts)]


def empty_steps(weight: Array, size: int) -> tuple[Array, Array]:
    """Returns arrays for the steps [blocks, N] fp32 and zero levels [blocks, N] uint8 of a weight [K, N]."""
    shape = (-(-len(weight) // size), weight.shape[1])
    return np.empty(shape, np.float32), np.empty(shape, np.uint8)
