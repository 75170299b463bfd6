"""Weights of four bits as their source has them.

A file of llama.cpp in Q4_0, Q4_1 or Q4_K gives each block of 32 weights sixteen values at equal distances, such as
-0.031, -0.027, ... 0.029. The exporter reads the file's values as fp32. Where a block has such values, `as_stored`
finds them again, and nothing is rounded but where they begin: to a sixteenth of their distance.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.blocks import Blocks, Grid
from eagle_export.recipes.graph import Array, Linear, Steps, constant, is_lm_head, made_of
from eagle_export.recipes.tiles import tiled

FOUR_BITS = ("Q4_0", "Q4_1", "Q4_K")  # types of tensors whose values are such
STORED = Grid(4, 32, asymmetric=True, sixteenths=True)
OFF = 0.1  # of a step that a value may be off: a checkpoint may have rounded the file's values to bf16
LOOKED_AT = 64  # columns of a weight
ENOUGH = 0.9  # of the blocks looked at: some with few values have them at unequal distances
HIGHEST_ZERO = np.float32(255 / 16)


def grid_of_source(linear: Linear) -> Grid | None:
    """Returns STORED for a layer whose weight has such values, else None. LM heads, which are the embedding in many
    models, are left to eight bits, as llama.cpp's recipes leave them to six and more."""
    if linear.shape[0] % STORED.size or is_lm_head(linear):
        return None
    found = _found(_blocks(linear.columns()(slice(0, LOOKED_AT))))[0]
    return STORED if found.mean() >= ENOUGH else None


def as_stored(weight: Array) -> Blocks:
    """Returns levels, steps and zero levels of a weight [K, N], K a multiple of STORED.size. A block without such
    values gets the nearest ones."""
    k, n = weight.shape
    level = np.empty((k, n), np.uint8)
    step, zero = np.empty((k // STORED.size, n), np.float32), np.empty((k // STORED.size, n), np.uint8)

    def quantise(piece: slice) -> None:
        values = _blocks(weight[:, piece])
        found, steps, zeros = _found(values)
        covering, begins = _covering(values)
        steps, zeros = np.where(found, steps, covering), np.rint(np.where(found, zeros, begins) * 16)
        levels = np.clip(np.rint(values / steps[:, None] + zeros[:, None] / 16), 0, STORED.highest)
        level[:, piece] = levels.reshape(k, -1)
        step[:, piece], zero[:, piece] = steps, zeros

    tiled(quantise, n)
    return Blocks(level, step, zero, STORED)


def _blocks(weight: Array) -> Array:
    """weight [K, N] -> [blocks, STORED.size, N]"""
    return weight.reshape(-1, STORED.size, weight.shape[1])


def _found(values: Array) -> tuple[Array, Array, Array]:
    """values [blocks, size, N] -> whether a block has values at equal distances, their distance, and the zero level;
    each [blocks, N]. Of several distances that fit it takes the largest."""
    low, span = values.min(1), np.ptp(values, 1)
    found = np.zeros(low.shape, bool)
    steps, zeros = np.ones_like(low), np.zeros_like(low)
    for count in range(1, STORED.highest + 1):
        step = span / np.float32(count)
        step[step == 0] = 1
        at = (values - low[:, None]) / step[:, None]
        off = np.abs(at - np.rint(at)).max(1)
        first = np.maximum(np.ceil(low / step), 0)  # the lowest value's level
        zero = first - low / step
        fits = ~found & (span > 0) & (off < OFF) & (first <= STORED.highest - count) & (zero <= HIGHEST_ZERO)
        steps[fits], zeros[fits] = step[fits], zero[fits]
        found |= fits
    return found | (span == 0) & (low == 0), steps, zeros


def _covering(values: Array) -> tuple[Array, Array]:
    """The distance and the zero level [blocks, N] that cover each block's range."""
    low, high = np.minimum(values.min(1), 0), np.maximum(values.max(1), 0)
    step = (high - low) / np.float32(STORED.highest)
    step[step == 0] = 1
    return step, -low / step


def in_bytes(steps: Steps, level: ir.Value, step: ir.Value, zero: ir.Value) -> list[ir.Value]:
    """Adds nodes that make levels of eight bits, sixteen times those of four, for MatMulNBits, which has no zero levels
    in sixteenths. Returns these levels, a sixteenth of the steps, and the zero levels. They are computed when the graph
    is loaded."""
    low = steps("BitShift", level, constant(steps.model, "four_bits", np.array(4, np.uint8)), direction="LEFT")
    high = steps("BitwiseAnd", level, constant(steps.model, "upper_bits", np.array(240, np.uint8)))
    pairs = steps("Concat", *(steps("Unsqueeze", half, steps.ints(-1)) for half in (low, high)), axis=-1)
    wide = steps("Reshape", pairs, steps.ints(0, 0, -1))
    return [wide, steps("Mul", step, steps.number(1 / 16)), steps("Squeeze", zero, steps.ints(-1))]


def packed_levels(levels: ir.Value | None) -> ir.Value | None:
    """The levels of four bits of which `in_bytes` made these; None of others."""
    return made_of(made_of(made_of(made_of(levels, "Reshape"), "Concat"), "Unsqueeze"), "BitShift")
