"""Levels of a weight that compensate each other's errors on recorded inputs.

The squared error of x @ W depends on the mean products of x's channels alone (the Gram matrix): the error of one weight
can be compensated by others. GPTQ (arXiv 2210.17323) rounds one channel after the other and moves each error to the
channels that are still to come; here in the form of arXiv 2307.13304, which needs one Cholesky factor and no inverse.
Then each weight in turn moves to the level that is best given all others (coordinate descent, as in arXiv 2309.01885),
and the steps are fitted again.

Shapes: a weight is [K, N]; a tile (tiles.py) has n of its columns, a block k of its channels. `lines` are levels less
their zero level.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_export.recipes.blocks import Blocks, Grid, Scale, best_scale, block_ranges, empty_steps
from eagle_export.recipes.graph import Array
from eagle_export.recipes.input_products import GROUP, Products, products_of
from eagle_export.recipes.tiles import product, tiled

ROWS = 8  # channels of a block that take their levels one by one; those before them have one product for all of these


def compensated(weight: Array, inputs: Array | Products, grid: Grid) -> Blocks:
    """Returns the levels of a weight [K, N] with the least squared error of inputs [n, K] @ weight. For a block's step
    and zero, a channel's error is weighted by the mean square of its inputs."""
    products = inputs if isinstance(inputs, Products) else products_of(inputs)
    step, zero = empty_steps(weight, grid.size)
    level = np.empty(weight.shape, np.uint8)

    def quantise(piece: slice) -> None:
        tile = _Tile(weight[:, piece].copy(), grid, products)
        tile.feed_back()
        tile.descend()
        step[:, piece], zero[:, piece] = tile.step, tile.zero
        for index, block in tile.blocks:
            level[block, piece] = tile.lines[block] + tile.zero[index]

    tiled(quantise, weight.shape[1])
    return Blocks(level, step, zero, grid)


class _Tile:
    """Some columns of a weight [K, n]. lines [K, n]; error [K, n]: of the rounded weight; step, zero [blocks, n]."""

    def __init__(self, weight: Array, grid: Grid, products: Products) -> None:
        self.weight, self.grid, self.products = weight, grid, products
        self.lines, self.error = np.zeros_like(weight), np.zeros_like(weight)
        shape = (-(-len(weight) // grid.size), weight.shape[1])
        self.step, self.zero = np.empty(shape, np.float32), np.empty(shape, np.float32)
        self.blocks = block_ranges(len(weight), grid.size)
        self.spread = products.on(self.error)

    def feed_back(self) -> None:
        """GPTQ. With gram = L @ L.T, an error E [K, n] of the weight gives a squared output error of |E.T @ L|². Column
        k of E.T @ L is E[k] plus feedback from the channels after k. So from the last channel to the first, each takes
        the level nearest to its weight minus that feedback."""
        for group in reversed(self._groups()):
            rows = _span(group)
            feedback = self.spread.feedback(rows)
            for index, block in reversed(group):
                own = _within(block, rows)
                self._round(index, block, self.weight[block] - feedback[own])
                before = slice(rows.start, block.start)
                feedback[: own.start] += product(self.products.lower_of(block, before).T, self.error[block])
            self.spread.changed(rows, self.error[rows])

    def _round(self, index: int, block: slice, aim: Array) -> None:
        """Sets the scale of a block, and the levels that are nearest to what its rows aim at [k, n]."""
        scale = best_scale(aim, self.products.squares[block], self.grid)
        self.step[index], self.zero[index] = scale.step, scale.zero
        # In units of the columns' steps. A row of `state` is what the row aims at, and then its error.
        state, weight, lines = aim * scale.inverse, self.weight[block] * scale.inverse, self.lines[block]
        within = np.ascontiguousarray(self.products.lower_of(block, block).T)
        factors, fed = _own_and_others(within), np.empty_like(scale.step)
        for first in reversed(range(0, len(state), ROWS)):
            last = min(first + ROWS, len(state))
            state[first:last] -= product(within[first:last, last:], state[last:])
            for row in reversed(range(first, last)):
                np.dot(factors[row, row:last], state[row:last], out=fed)
                scale.level_of(fed, lines[row])
                np.subtract(lines[row], weight[row], out=state[row])
        np.multiply(state, scale.step, out=self.error[block])

    def descend(self) -> None:
        """Moves each level and step to its best value given all others, from the first block to the last and back.
        More ways change little."""
        groups = self._groups()
        for group in groups:
            self._move_group(group)
        for group in reversed(groups):
            self._move_group(group[::-1])

    def _groups(self) -> list[list[tuple[int, slice]]]:
        """The blocks of each group of channels."""
        count = max(1, GROUP // self.grid.size)
        return [self.blocks[first : first + count] for first in range(0, len(self.blocks), count)]

    def _move_group(self, group: list[tuple[int, slice]]) -> None:
        """Moves the blocks of a group in turn."""
        rows = _span(group)
        slope = self.spread.slope(rows)
        change = np.empty_like(slope)
        for place, (index, block) in enumerate(group, 1):
            moved = self._move(index, block, self.products.within(block, block), slope[_within(block, rows)])
            change[_within(block, rows)] = moved
            if place < len(group):
                left = _span(group[place:])
                slope[_within(left, rows)] += product(self.products.within(left, block), moved)
        self.spread.changed(rows, change)

    def _move(self, index: int, block: slice, within: Array, slope: Array) -> Array:
        """Moves the levels and the step of a block of products `within` [k, k]. Returns its values' change [k, n]."""
        step, zero, lines, error = self.step[index], self.zero[index], self.lines[block], self.error[block]
        scale, diagonal = Scale.of(step, zero, self.grid), within.diagonal()[:, None]
        # In steps. A row of `moved` is the best change of its level, and then the change to the nearest level.
        share, before, fed = within / diagonal, lines.copy(), np.empty_like(step)
        factors, moved = _own_and_others(share), slope * scale.inverse
        moved /= diagonal
        np.subtract(before, moved, out=moved)
        for first in range(0, len(moved), ROWS):
            last = min(first + ROWS, len(moved))
            moved[first:last] -= product(share[first:last, :first], moved[:first])
            for row in range(first, last):
                np.dot(factors[row, first : row + 1], moved[first : row + 1], out=fed)
                scale.level_of(fed, lines[row])
                np.subtract(lines[row], before[row], out=moved[row])
        moved *= step
        # The step's change minimises the output's error: its derivative is `rise` now, and changes by `bend` per unit.
        # As `within` is symmetric, one product gives both.
        bend = product(within, lines)
        rise = (slope * lines + bend * moved).sum(0)
        bend *= lines
        bend = bend.sum(0)
        change = np.divide(-rise, bend, out=np.zeros_like(rise), where=bend > 0)
        step += change
        moved += np.multiply(lines, change, out=before)
        error += moved
        return moved


def _span(blocks: Sequence[tuple[int, slice]]) -> slice:
    """Returns the channels of blocks that follow each other, in either order."""
    return slice(min(block.start for _, block in blocks), max(block.stop for _, block in blocks))


def _within(part: slice, whole: slice) -> slice:
    """Returns where the rows of a part are among those of the whole."""
    return slice(part.start - whole.start, part.stop - whole.start)


def _own_and_others(shares: Array) -> Array:
    """Returns [k, k], the factors of a row's aim (its own, 1) and of the errors of others, which are taken off."""
    factors: Array = -shares
    np.fill_diagonal(factors, 1)
    return factors
