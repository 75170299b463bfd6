"""4-bit weights in blocks along the input, for ONNX Runtime's MatMulNBits: 16 levels and one scale per block.

The scale of a block is the one, out of a few, that leaves the smallest squared error: cutting off the largest value
a little often costs less than the coarser steps it asks for.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.graph import MICROSOFT, Array, Linear, insert, lazy_weight, linears, part, replace

MIDDLE = 8  # the stored level of weight 0
SHARES = np.linspace(0.7, 1.0, 13, dtype=np.float32)  # of the range that takes in the largest value


def int4_blocks(
    model: ir.Model, block: int, accuracy: int, wanted: Callable[[Linear], bool] = lambda _: True
) -> dict[str, str]:
    """Quantise the weights of every wanted linear layer. Returns weight name -> what was done.

    block: weights that share a scale. accuracy: MatMulNBits' accuracy_level, what it computes in: 1 for fp32, 4 for
    int8 activations with a scale per row and block."""
    changed = {}
    for linear in filter(wanted, linears(model)):
        node, (k, n), name = linear.node, linear.shape, linear.name
        blocks = -(-k // block)
        quantise = partial(packed_blocks, block=block)
        weight = lazy_weight(
            model,
            f"{name}.int4",
            ir.DataType.UINT8,
            (n, blocks, block // 2),
            part(quantise, linear.reader(), 0),
        )
        scale = lazy_weight(
            model, f"{name}.scale", ir.DataType.FLOAT, (n * blocks,), part(quantise, linear.reader(), 1)
        )
        attributes = {"K": k, "N": n, "bits": 4, "block_size": block, "accuracy_level": accuracy}
        changed[name] = f"int4 in blocks of {block}"
        replace(node, insert(node, "MatMulNBits", [linear.x, weight, scale], MICROSOFT, **attributes))
    if changed:
        model.opset_imports[MICROSOFT] = 1
    return changed


def packed_blocks(weight: Array, block: int) -> tuple[Array, Array]:
    """[K, N] -> levels, two per byte, the earlier one low [N, blocks, block / 2], and scales [N * blocks].

    K is filled up with zeros to whole blocks."""
    levels, scale = quantised_blocks(weight, block)
    return (levels[..., ::2] | levels[..., 1::2] << 4).astype(np.uint8), scale.ravel()


def quantised_blocks(weight: Array, block: int) -> tuple[Array, Array]:
    """[K, N] -> levels 0..15 [N, blocks, block] and scales [N, blocks]: weight ~ (level - 8) * scale.

    The value furthest from zero takes level 0, which reaches one step further than level 15: the scale has the
    opposite sign of that value."""
    k, n = weight.shape
    blocks = -(-k // block)
    padded = np.zeros((n, blocks * block), np.float32)
    padded[:, :k] = weight.T
    rows = padded.reshape(n, blocks, block)
    furthest = np.take_along_axis(rows, np.abs(rows).argmax(-1)[..., None], -1)[..., 0]
    full = -furthest / MIDDLE
    full[full == 0] = 1
    best = np.full(full.shape, np.inf, np.float32)
    scale = full.copy()
    for share in SHARES:
        tried = full * share
        error = np.square(_levels(rows, tried) * tried[..., None] - rows).sum(-1)
        better = error < best
        best[better], scale[better] = error[better], tried[better]
    return (_levels(rows, scale) + MIDDLE).astype(np.uint8), scale


def _levels(rows: Array, scale: Array) -> Array:
    return np.clip(np.rint(rows / scale[..., None]), -MIDDLE, MIDDLE - 1)
