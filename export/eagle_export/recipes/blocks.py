"""Weights of 4 or 8 bits: 2^bits levels, with a step and a zero level for each block of input channels and each output
column.

    weight ~ (level - zero) * step        weight, level [K, N]; step, zero [blocks, N]; level 0..2^bits - 1

`rounded` takes the nearest levels. With recorded inputs x, `compensated` minimises the error of x @ W instead, which
depends on the mean products of x's channels (the Gram matrix): the error of one weight can be compensated by others.
GPTQ (arXiv 2210.17323) rounds one channel after the other and moves each error to the channels that are still to come;
here in the form of arXiv 2307.13304, which needs one Cholesky factor and no inverse. Then each weight in turn moves to
the level that is best given all others (coordinate descent, as in arXiv 2309.01885), and the steps are fitted again.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

import numpy as np

from eagle_export.parted import parts
from eagle_export.recipes.graph import Array

SHARES = {  # bits -> shares of the full range that are tried
    4: np.linspace(0.7, 1.0, 13, dtype=np.float32),
    8: np.linspace(0.94, 1.0, 4, dtype=np.float32),
}
SMALLEST = 16  # channels per block: ONNX Runtime's operators take no fewer
SWEEPS = 2  # sweeps of the coordinate descent; more change little
GROUP = 512  # channels whose slopes are computed at once: one product is faster than many small ones
LEAST_DAMPING = 1e-4  # share of the channels' mean square that is added to each: a channel may always have been zero


@dataclass(frozen=True, slots=True)
class Grid:
    """How a weight is quantised. bits: 4 or 8. size: input channels per block; the last block may have fewer.
    asymmetric: each block has its own zero level, else it is the middle one."""

    bits: int
    size: int
    asymmetric: bool

    @property
    def highest(self) -> int:
        """The highest level."""
        return (1 << self.bits) - 1

    @property
    def middle(self) -> int:
        """The zero level of a symmetric block."""
        return 1 << (self.bits - 1)


def stored_bits(grid: Grid, channels: int) -> int:
    """Bits of one column of a weight: levels, and per block a step of 16 bits and, if asymmetric, a zero level. The
    last block is filled up."""
    step = 16 + (grid.bits if grid.asymmetric else 0)
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
    """level [K, N] uint8, step [blocks, N] fp32, zero [blocks, N] uint8."""

    level: Array
    step: Array
    zero: Array
    grid: Grid

    def values(self) -> Array:
        """The weight [K, N] that the levels stand for."""
        block = np.arange(len(self.level)) // self.grid.size
        values: Array = (self.level.astype(np.float32) - self.zero[block]) * self.step[block]
        return values


def rounded(weight: Array, grid: Grid) -> Blocks:
    """Returns the nearest levels of a weight [K, N]."""
    level = np.empty(weight.shape, np.uint8)
    step, zero = _empty(weight, grid.size)
    for index, block in _blocks(len(weight), grid.size):
        step[index], zero[index] = best_steps(weight[block], None, grid)
        level[block] = _levels(weight[block], step[index], zero[index], grid)
    return Blocks(level, step, zero, grid)


def nearest(weight: Array, grid: Grid) -> Blocks:
    """As `rounded`, with steps that cover each block's whole range: faster, and a little less exact."""
    level = np.empty(weight.shape, np.uint8)
    step, zero = _empty(weight, grid.size)
    for index, block in _blocks(len(weight), grid.size):
        step[index], zero[index] = _steps(weight[block], np.float32(1), grid)
        level[block] = _levels(weight[block], step[index], zero[index], grid)
    return Blocks(level, step, zero, grid)


@dataclass(frozen=True, slots=True)
class Products:
    """What rounding needs to know of recorded inputs: their damped mean products [K, K], the Cholesky factor of these
    with columns divided by its diagonal, and each channel's mean square [K]."""

    gram: Array
    lower: Array
    squares: Array

    @classmethod
    def of(cls, inputs: Array) -> Products:
        """inputs: [n, K]"""
        import torch  # here alone, so that sizes are computed without it

        gram = damped_gram(inputs)
        lower = torch.linalg.cholesky(torch.from_numpy(gram)).numpy()  # 4 times as fast as NumPy's at K = 8192
        lower /= lower.diagonal().copy()
        return cls(gram, lower, np.square(inputs).mean(0))


def compensated(weight: Array, inputs: Array | Products, grid: Grid) -> Blocks:
    """Returns the levels of a weight [K, N] with the least squared error of inputs [n, K] @ weight. For a block's step
    and zero, a channel's error is weighted by the mean square of its inputs."""
    products = inputs if isinstance(inputs, Products) else Products.of(inputs)
    blocks = _fed_back(weight, products, grid)
    _descend(weight, products.gram, blocks)
    return blocks


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


def damped_gram(inputs: Array) -> Array:
    """Returns [K, K], the mean products of the inputs' channels over n rows. Few rows estimate the squares better than
    the products, so the squares are raised by a share of K / n."""
    n, k = inputs.shape
    gram: Array = inputs.T @ inputs
    gram /= np.float32(n)
    squares = gram.diagonal()
    gram[np.diag_indices(k)] += squares * np.float32(k / n) + max(float(squares.mean()), 1e-20) * LEAST_DAMPING
    return gram


def best_steps(weight: Array, importance: Array | None, grid: Grid) -> tuple[Array, Array]:
    """Returns step and zero level [N] of one block [k, N], those of a few candidates with the smallest squared error:
    clipping the largest value a little often costs less than a coarser step. importance [k]: weights of the errors."""
    counts = np.ones(len(weight), np.float32) if importance is None else importance
    best = np.full(weight.shape[1], np.inf, np.float32)
    step, zero = np.ones_like(best), np.full_like(best, grid.middle)
    for share in SHARES[grid.bits]:
        tried, middle = _steps(weight, share, grid)
        error = counts @ np.square((_levels(weight, tried, middle, grid) - middle) * tried - weight)
        better = error < best
        best[better], step[better], zero[better] = error[better], tried[better], middle[better]
    return step, zero


def _steps(weight: Array, share: np.float32, grid: Grid) -> tuple[Array, Array]:
    """Returns the step and zero level [N] of a block [k, N] that cover this share of its range."""
    if grid.asymmetric:
        low, high = np.minimum(weight.min(0), 0) * share, np.maximum(weight.max(0), 0) * share
        step = (high - low) / np.float32(grid.highest)
        step[step == 0] = 1
        return step, np.rint(-low / step)
    # The value furthest from zero gets level 0, which reaches one step further than the highest level, so the step has
    # the opposite sign of that value.
    furthest = np.take_along_axis(weight, np.abs(weight).argmax(0)[None], 0)[0]
    step = -furthest * share / np.float32(grid.middle)
    step[step == 0] = 1
    return step, np.full_like(step, grid.middle)


def _fed_back(weight: Array, products: Products, grid: Grid) -> Blocks:
    """GPTQ. With gram = L @ L.T, an error E [K, N] of the weight gives a squared output error of |E.T @ L|². Column k
    of E.T @ L is E[k] plus feedback from the channels after k. So from the last channel to the first, each takes the
    level nearest to its weight minus that feedback."""
    lower, importance = products.lower, products.squares
    level, error = np.empty(weight.shape, np.uint8), np.zeros_like(weight)
    step, zero = _empty(weight, grid.size)
    for index, block in reversed(_blocks(len(weight), grid.size)):
        aim = weight[block] - lower[block.stop :, block].T @ error[block.stop :]
        step[index], zero[index] = best_steps(aim, importance[block], grid)
        within = lower[block, block].T.copy()
        block_error = error[block]  # a view
        for row in reversed(range(len(aim))):
            wanted = aim[row] - within[row, row + 1 :] @ block_error[row + 1 :]
            nearest = _levels(wanted, step[index], zero[index], grid)
            level[block.start + row] = nearest
            block_error[row] = (nearest - zero[index]) * step[index] - weight[block.start + row]
    return Blocks(level, step, zero, grid)


def _descend(weight: Array, gram: Array, blocks: Blocks) -> None:
    """Moves each level and step, in place, to its best value given all others."""
    error, grid = blocks.values() - weight, blocks.grid
    for _ in range(SWEEPS):
        for group in _groups(len(weight), grid.size):
            start = group[0][1].start
            slope = gram[start : group[-1][1].stop] @ error  # half the derivative of the output's error
            for index, block in group:
                step, zero, within = blocks.step[index], blocks.zero[index].astype(np.float32), gram[block, block]
                own, moved = slope[block.start - start : block.stop - start], np.zeros_like(error[block])
                for row, channel in enumerate(range(block.start, block.stop)):
                    steepness = own[row] + within[row, :row] @ moved[:row]
                    wanted = weight[channel] + error[channel] - steepness / within[row, row]
                    nearest = _levels(wanted, step, zero, grid)
                    blocks.level[channel] = nearest
                    moved[row] = (nearest - zero) * step - weight[channel] - error[channel]
                lines = blocks.level[block] - zero
                rise, bend = (lines * (own + within @ moved)).sum(0), (lines * (within @ lines)).sum(0)
                change = np.divide(-rise, bend, out=np.zeros_like(rise), where=bend > 0)
                step += change
                moved += lines * change
                error[block] += moved
                slope[block.stop - start :] += gram[block.stop : start + len(slope), block] @ moved


def _levels(weight: Array, step: Array, zero: Array, grid: Grid) -> Array:
    """Returns the nearest levels [..., N] as floats."""
    levels: Array = np.clip(np.rint(weight / step) + zero, 0, grid.highest)
    return levels


def _blocks(channels: int, size: int) -> list[tuple[int, slice]]:
    starts = range(0, channels, size)
    return [(index, slice(start, min(start + size, channels))) for index, start in enumerate(starts)]


def _groups(channels: int, size: int) -> list[list[tuple[int, slice]]]:
    """Returns the blocks in groups of GROUP channels or fewer."""
    blocks, count = _blocks(channels, size), max(1, GROUP // size)
    return [blocks[first : first + count] for first in range(0, len(blocks), count)]


def _empty(weight: Array, size: int) -> tuple[Array, Array]:
    shape = (-(-len(weight) // size), weight.shape[1])
    return np.empty(shape, np.float32), np.empty(shape, np.uint8)
