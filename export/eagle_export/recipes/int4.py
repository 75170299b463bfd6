"""4-bit weights in blocks along the input, for ONNX Runtime's MatMulNBits: 16 levels and one scale per block.

The scale of a block is the one, out of a few, that leaves the smallest squared error: cutting off the largest value
a little often costs less than the coarser steps it asks for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from eagle_calib.calibration import Observed
from eagle_export.recipes.graph import MICROSOFT, Array, Linear, insert, lazy_weight, linears, part, replace
from eagle_export.recipes.smooth import awq_sizes, inputs_of, smooth

MIDDLE = 8  # the stored level of weight 0
SHARES = np.linspace(0.7, 1.0, 13, dtype=np.float32)  # of the range that takes in the largest value


def int4_blocks(
    model: ir.Model,
    block: int,
    accuracy: int,
    wanted: Callable[[Linear], bool] = lambda _: True,
    observed: Mapping[str, Observed] | None = None,
) -> dict[str, str]:
    """Turn every wanted linear layer into MatMulNBits. Returns weight name -> what was done.

    block: weights that share a scale. accuracy: the operator's accuracy_level, what it computes in: 1 for fp32, 4 for
    int8 activations with a scale per row and block. observed: inputs of the layers by weight name; with them channels
    are scaled first (smooth.py), and a weight's error counts by the mean square of what it is multiplied with."""
    changed = {}
    factors = _factors(model, block, observed)
    for linear in filter(wanted, linears(model)):
        node, (k, n), name = linear.node, linear.shape, linear.name
        blocks = -(-k // block)
        importance, changed[name] = _importance(linear, block, factors, observed)
        quantise = partial(packed_blocks, block=block, importance=importance)
        shape, read = (n, blocks, block // 2), linear.reader()
        weight = lazy_weight(model, f"{name}.int4", ir.DataType.UINT8, shape, part(quantise, read, 0))
        scale = lazy_weight(model, f"{name}.scale", ir.DataType.FLOAT, (n * blocks,), part(quantise, read, 1))
        attributes = {"K": k, "N": n, "bits": 4, "block_size": block, "accuracy_level": accuracy}
        replace(node, insert(node, "MatMulNBits", [linear.x, weight, scale], MICROSOFT, **attributes))
    if changed:
        model.opset_imports[MICROSOFT] = 1
    return changed


def int4_dequantized(
    model: ir.Model,
    block: int,
    wanted: Callable[[Linear], bool] = lambda _: True,
    observed: Mapping[str, Observed] | None = None,
) -> dict[str, str]:
    """The same as a blocked DequantizeLinear before every wanted MatMul, which TensorRT fuses. A layer whose input is
    no whole number of blocks stays as it is."""
    changed = {}
    factors = _factors(model, block, observed)
    for linear in filter(wanted, linears(model)):
        node, (k, n), name = linear.node, linear.shape, linear.name
        if k % block:
            continue
        dtype = linear.x.dtype
        assert dtype is not None
        importance, changed[name] = _importance(linear, block, factors, observed)
        quantise = partial(signed_blocks, block=block, importance=importance, dtype=dtype.numpy())
        read = linear.reader()
        weight = lazy_weight(model, f"{name}.int4", ir.DataType.INT4, (k, n), part(quantise, read, 0))
        scale = lazy_weight(model, f"{name}.scale", dtype, (k // block, n), part(quantise, read, 1))
        values = insert(node, "DequantizeLinear", [weight, scale], axis=0, block_size=block)
        replace(node, insert(node, "MatMul", [linear.x, values]))
    return changed


def signed_blocks(weight: Array, block: int, importance: Array | None, dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """[K, N] -> levels -8..7 as int4 [K, N] and scales [K / block, N] of a type."""
    levels, scale = quantised_blocks(weight, block, importance)
    signed = (levels.astype(np.int8) - MIDDLE).reshape(len(levels), -1).T
    return np.ascontiguousarray(signed).astype(ml_dtypes.int4), np.ascontiguousarray(scale.T).astype(dtype)


def _factors(model: ir.Model, block: int, observed: Mapping[str, Observed] | None) -> dict[str, Array]:
    return {} if observed is None else smooth(model, observed, partial(_simulated, block=block), awq_sizes)


def _importance(
    linear: Linear, block: int, factors: Mapping[str, Array], observed: Mapping[str, Observed] | None
) -> tuple[Array | None, str]:
    """Mean square of each input channel, if known, and the words for what is done."""
    how = f"int4 in blocks of {block}"
    if observed is None:
        return None, how
    inputs, _ = inputs_of(linear, observed, factors)
    how += ", inputs scaled" if linear.name in factors else ", errors weighed by inputs"
    return np.square(inputs).mean(0), how


def packed_blocks(weight: Array, block: int, importance: Array | None = None) -> tuple[Array, Array]:
    """[K, N] -> levels, two per byte, the earlier one low [N, blocks, block / 2], and scales [N * blocks].

    K is filled up with zeros to whole blocks."""
    levels, scale = quantised_blocks(weight, block, importance)
    return (levels[..., ::2] | levels[..., 1::2] << 4).astype(np.uint8), scale.ravel()


def quantised_blocks(
    weight: Array, block: int, importance: Array | None = None, shares: Array = SHARES
) -> tuple[Array, Array]:
    """[K, N] -> levels 0..15 [N, blocks, block] and scales [N, blocks]: weight ~ (level - 8) * scale.

    importance [K]: what a squared error of each input channel counts. shares: scales to try, of the largest sensible.

    The value furthest from zero takes level 0, which reaches one step further than level 15: the scale has the
    opposite sign of that value."""
    k, n = weight.shape
    blocks = -(-k // block)
    padded = np.zeros((n, blocks * block), np.float32)
    padded[:, :k] = weight.T
    rows = padded.reshape(n, blocks, block)
    counts = np.ones(blocks * block, np.float32)
    if importance is not None:
        counts[:k] = importance
    counts = counts.reshape(blocks, block)
    furthest = np.take_along_axis(rows, np.abs(rows).argmax(-1)[..., None], -1)[..., 0]
    full = -furthest / MIDDLE
    full[full == 0] = 1
    best = np.full(full.shape, np.inf, np.float32)
    scale = full.copy()
    for share in shares:
        tried = full * share
        error = (np.square(_levels(rows, tried) * tried[..., None] - rows) * counts).sum(-1)
        better = error < best
        best[better], scale[better] = error[better], tried[better]
    return (_levels(rows, scale) + MIDDLE).astype(np.uint8), scale


def _simulated(x: Array, weight: Array, block: int) -> Array:
    """x [n, K] times the quantised weight, with the scale of each block's largest value: quick, for a search."""
    k, n = weight.shape
    levels, scale = quantised_blocks(weight, block, shares=SHARES[-1:])
    rounded = ((levels.astype(np.float32) - MIDDLE) * scale[..., None]).reshape(n, -1)[:, :k]
    out: Array = x @ rounded.T
    return out


def _levels(rows: Array, scale: Array) -> Array:
    return np.clip(np.rint(rows / scale[..., None]), -MIDDLE, MIDDLE - 1)
