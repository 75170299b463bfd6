"""4-bit weights: 16 levels, each block of weights along the input with a step and a level of zero of its own.

    weight ~ (level - zero) * step        weight, level [K, N]; step, zero [blocks, N]; level 0..15

Rounded to nearest, every weight errs alone. Where recorded inputs x are at hand it is the output that should be right:
the error of x @ W is told by x's products among channels, and what one weight is rounded off by, others can make up
for. GPTQ (arXiv 2210.17323) rounds one channel after the other and moves each error on to the channels still to come;
here in the form of arXiv 2307.13304, which needs one Cholesky factor and no inverse. Then every weight in turn goes to
the level that is best given all others (coordinate descent, as in arXiv 2309.01885), and every step follows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from eagle_export.recipes.graph import Array

HIGHEST, MIDDLE = 15, 8  # level; the level of zero of a block whose levels lie as far up as down
SHARES = np.linspace(0.7, 1.0, 13, dtype=np.float32)  # of the range that takes in the largest value
PASSES = 2  # of the descent; more change little
LEAST_DAMPING = 1e-4  # of the mean square of all channels: one that was always zero has none of its own


@dataclass(frozen=True, slots=True)
class Blocks:
    """level [K, N] uint8, step [blocks, N] fp32, zero [blocks, N] uint8. size: channels of a block; the last block may
    have fewer."""

    level: Array
    step: Array
    zero: Array
    size: int

    def values(self) -> Array:
        """The weight [K, N] that is stored."""
        block = np.arange(len(self.level)) // self.size
        values: Array = (self.level.astype(np.float32) - self.zero[block]) * self.step[block]
        return values


def rounded(weight: Array, size: int, asymmetric: bool) -> Blocks:
    """[K, N] to the nearest levels. asymmetric: blocks may lie anywhere around zero, else with zero in the middle."""
    level = np.empty(weight.shape, np.uint8)
    step, zero = _empty(weight, size)
    for index, block in _blocks(len(weight), size):
        step[index], zero[index] = best_grid(weight[block], None, asymmetric)
        level[block] = _levels(weight[block], step[index], zero[index])
    return Blocks(level, step, zero, size)


def compensated(weight: Array, inputs: Array, size: int, asymmetric: bool) -> Blocks:
    """[K, N] to the levels that make the least squared error of inputs [n, K] times it. In a block's grid an error
    counts by the mean square of what it is multiplied with."""
    importance = np.square(inputs).mean(0)
    gram = damped_gram(inputs)
    blocks = _fed_back(weight, gram, importance, size, asymmetric)
    _descend(weight, gram, blocks)
    return blocks


def damped_gram(inputs: Array) -> Array:
    """inputs' mean products of channels [K, K], from n rows. A sample of few rows tells more of the channels' own
    squares than of their products, so that the squares are raised by K / n."""
    n, k = inputs.shape
    gram: Array = (inputs.T @ inputs) / np.float32(n)
    squares = gram.diagonal()
    gram[np.diag_indices(k)] += squares * np.float32(k / n) + max(float(squares.mean()), 1e-20) * LEAST_DAMPING
    return gram


def best_grid(weight: Array, importance: Array | None, asymmetric: bool) -> tuple[Array, Array]:
    """One block [k, N] -> step and level of zero [N] with the smallest squared error, out of a few: cutting off the
    largest value a little often costs less than the coarser steps it asks for. importance [k]: what an error counts."""
    counts = np.ones(len(weight), np.float32) if importance is None else importance
    best = np.full(weight.shape[1], np.inf, np.float32)
    step, zero = np.ones_like(best), np.full_like(best, MIDDLE)
    for share in SHARES:
        tried, middle = _grid(weight, share, asymmetric)
        error = counts @ np.square((_levels(weight, tried, middle) - middle) * tried - weight)
        better = error < best
        best[better], step[better], zero[better] = error[better], tried[better], middle[better]
    return step, zero


def _grid(weight: Array, share: np.float32, asymmetric: bool) -> tuple[Array, Array]:
    """A block's [k, N] step and level of zero [N] that take in this share of its range."""
    if asymmetric:
        low, high = np.minimum(weight.min(0), 0) * share, np.maximum(weight.max(0), 0) * share
        step = (high - low) / np.float32(HIGHEST)
        step[step == 0] = 1
        return step, np.rint(-low / step)
    # The value furthest from zero takes level 0, which reaches one step further than the highest: the step has the
    # opposite sign of that value.
    furthest = np.take_along_axis(weight, np.abs(weight).argmax(0)[None], 0)[0]
    step = -furthest * share / np.float32(MIDDLE)
    step[step == 0] = 1
    return step, np.full_like(step, MIDDLE)


def _fed_back(weight: Array, gram: Array, importance: Array, size: int, asymmetric: bool) -> Blocks:
    """gram = L @ L.T, so an error E of the weight makes the output err by the squares of E.T @ L. Column k of that is
    E[k] and what is fed back of the channels behind k: from the last channel to the first, each goes to the level
    nearest to its weight less that."""
    lower = np.linalg.cholesky(gram)
    lower /= lower.diagonal().copy()
    level, error = np.empty(weight.shape, np.uint8), np.zeros_like(weight)
    step, zero = _empty(weight, size)
    for index, block in reversed(_blocks(len(weight), size)):
        aim = weight[block] - lower[block.stop :, block].T @ error[block.stop :]
        step[index], zero[index] = best_grid(aim, importance[block], asymmetric)
        within = lower[block, block]
        wrong = error[block]  # a view
        for row in reversed(range(len(aim))):
            wanted = aim[row] - within[row + 1 :, row] @ wrong[row + 1 :]
            found = _levels(wanted, step[index], zero[index])
            level[block.start + row] = found
            wrong[row] = (found - zero[index]) * step[index] - weight[block.start + row]
    return Blocks(level, step, zero, size)


def _descend(weight: Array, gram: Array, blocks: Blocks) -> None:
    """Move levels and steps, in place, to where each is best given all others."""
    error = blocks.values() - weight
    slope = gram @ error  # [K, N] half the derivative of the output's error by each weight
    for _ in range(PASSES):
        for index, block in _blocks(len(weight), blocks.size):
            step, zero, within = blocks.step[index], blocks.zero[index].astype(np.float32), gram[block, block]
            moved = np.zeros_like(error[block])
            for row, channel in enumerate(range(block.start, block.stop)):
                steepness = slope[channel] + within[row, :row] @ moved[:row]
                wanted = weight[channel] + error[channel] - steepness / within[row, row]
                found = _levels(wanted, step, zero)
                blocks.level[channel] = found
                moved[row] = (found - zero) * step - weight[channel] - error[channel]
            lines = blocks.level[block] - zero
            rise, bend = (lines * (slope[block] + within @ moved)).sum(0), (lines * (within @ lines)).sum(0)
            change = np.divide(-rise, bend, out=np.zeros_like(rise), where=bend > 0)
            step += change
            moved += lines * change
            error[block] += moved
            slope += gram[:, block] @ moved


def _levels(weight: Array, step: Array, zero: Array) -> Array:
    """[..., N] -> nearest levels, as floats."""
    levels: Array = np.clip(np.rint(weight / step) + zero, 0, HIGHEST)
    return levels


def _blocks(channels: int, size: int) -> list[tuple[int, slice]]:
    starts = range(0, channels, size)
    return [(index, slice(start, min(start + size, channels))) for index, start in enumerate(starts)]


def _empty(weight: Array, size: int) -> tuple[Array, Array]:
    shape = (-(-len(weight) // size), weight.shape[1])
    return np.empty(shape, np.float32), np.empty(shape, np.uint8)
