"""4-bit weights in blocks along the input, as ONNX Runtime's MatMulNBits takes them and as TensorRT does."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from eagle_calib.calibration import Observed
from eagle_export.recipes.blocks import MIDDLE, Blocks, compensated, rounded
from eagle_export.recipes.graph import MICROSOFT, Array, Linear, insert, lazy_weight, linears, pieces, replace
from eagle_export.recipes.smooth import inputs_of

Observations = Mapping[str, Observed]


def int4_blocks(
    model: ir.Model,
    block: int,
    accuracy: int,
    wanted: Callable[[Linear], bool] = lambda _: True,
    observed: Observations | None = None,
) -> dict[str, str]:
    """Turn every wanted linear layer into MatMulNBits. Returns weight name -> what was done.

    block: weights that share a step. accuracy: the operator's accuracy_level, what it computes in: 1 for fp32, 4 for
    int8 activations with a scale per row and block. observed: inputs of the layers by weight name; with them the levels
    are those that err least on these inputs. Raises ExportError for a layer that is missing there."""
    changed = {}
    for linear in filter(wanted, linears(model)):
        node, (k, n), name = linear.node, linear.shape, linear.name
        count = -(-k // block)
        dtype = linear.x.dtype
        assert dtype is not None
        quantise, changed[name] = _quantiser(linear, block, True, observed)
        arrays = pieces(partial(_packed, quantise, dtype.numpy()), 3)
        weight = lazy_weight(model, f"{name}.int4", ir.DataType.UINT8, (n, count, block // 2), arrays[0])
        scale = lazy_weight(model, f"{name}.scale", dtype, (n * count,), arrays[1])
        zero = lazy_weight(model, f"{name}.zero", ir.DataType.UINT8, (n * -(-count // 2),), arrays[2])
        attributes = {"K": k, "N": n, "bits": 4, "block_size": block, "accuracy_level": accuracy}
        replace(node, insert(node, "MatMulNBits", [linear.x, weight, scale, zero], MICROSOFT, **attributes))
    if changed:
        model.opset_imports[MICROSOFT] = 1
    return changed


def int4_dequantized(
    model: ir.Model,
    block: int,
    wanted: Callable[[Linear], bool] = lambda _: True,
    observed: Observations | None = None,
) -> dict[str, str]:
    """The same as a blocked DequantizeLinear before every wanted MatMul, which TensorRT fuses; zero is in the middle of
    every block, as TensorRT demands. A layer whose input is no whole number of blocks stays as it is."""
    changed = {}
    for linear in filter(wanted, linears(model)):
        node, (k, n), name = linear.node, linear.shape, linear.name
        if k % block:
            continue
        dtype = linear.x.dtype
        assert dtype is not None
        quantise, changed[name] = _quantiser(linear, block, False, observed)
        arrays = pieces(partial(_signed, quantise, dtype.numpy()), 2)
        weight = lazy_weight(model, f"{name}.int4", ir.DataType.INT4, (k, n), arrays[0])
        scale = lazy_weight(model, f"{name}.scale", dtype, (k // block, n), arrays[1])
        values = insert(node, "DequantizeLinear", [weight, scale], axis=0, block_size=block)
        replace(node, insert(node, "MatMul", [linear.x, values]))
    return changed


def _quantiser(
    linear: Linear, block: int, asymmetric: bool, observed: Observations | None
) -> tuple[Callable[[], Blocks], str]:
    """What computes the levels of a layer, and the words for it."""
    read, how = linear.reader(), f"int4 in blocks of {block}"
    if observed is None:
        return lambda: rounded(read(), block, asymmetric), how
    inputs, _ = inputs_of(linear, observed, {})
    return lambda: compensated(read(), inputs, block, asymmetric), f"{how}, errors compensated"


def _packed(quantise: Callable[[], Blocks], dtype: npt.DTypeLike) -> tuple[Array, Array, Array]:
    return packed(quantise(), dtype)


def packed(blocks: Blocks, dtype: npt.DTypeLike = np.float32) -> tuple[Array, Array, Array]:
    """As MatMulNBits reads them: levels [N, blocks, size / 2], steps [N * blocks] of a type, and levels of zero
    [N * ceil(blocks / 2)]. Two levels share a byte, the earlier one low; the last block is filled up with zeros."""
    (k, n), count = blocks.level.shape, len(blocks.step)
    level = np.empty((n, count * blocks.size), np.uint8)
    level[:, :k] = blocks.level.T
    level[:, k:] = blocks.zero[-1][:, None]
    zero = np.zeros((n, count + count % 2), np.uint8)
    zero[:, :count] = blocks.zero.T
    return _pairs(level).reshape(n, count, -1), blocks.step.T.ravel().astype(dtype), _pairs(zero).ravel()


def _pairs(levels: Array) -> Array:
    pairs: Array = levels[:, ::2] | levels[:, 1::2] << 4
    return pairs


def _signed(quantise: Callable[[], Blocks], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Levels -8..7 as int4 [K, N] and steps [blocks, N] of a type."""
    blocks = quantise()
    return (blocks.level.astype(np.int8) - MIDDLE).astype(ml_dtypes.int4), blocks.step.astype(dtype)
