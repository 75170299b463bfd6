"""4-bit weights in blocks of input channels, in the layouts of ONNX Runtime's MatMulNBits and of TensorRT."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from eagle_calib.calibration import Observed
from eagle_export.recipes.blocks import MIDDLE, Blocks, compensated, rounded
from eagle_export.recipes.graph import (
    MICROSOFT,
    Array,
    Linear,
    insert,
    lazy_weight,
    pieces,
    replace,
)
from eagle_export.recipes.graph_pass import LayerPass
from eagle_export.recipes.smooth import inputs_of

Observations = Mapping[str, Observed]


@dataclass(frozen=True, slots=True)
class Int4Blocks(LayerPass):
    """Turns linear layers into MatMulNBits, an operator of ONNX Runtime.

    block: input channels that share a step. accuracy: the operator's accuracy_level, what it computes in: 1 for fp32, 4
    for int8 activations with a scale per row and block. observed: inputs of the layers by
    weight name; with them the levels are those with the least error on these inputs, and ExportError is raised for a
    layer that is missing there."""

    block: int
    accuracy: int
    observed: Observations | None = None
    name = "int4 blocks"

    def rewrite(self, model: ir.Model, matches: list[Linear]) -> dict[str, str]:
        changed = {}
        for linear in matches:
            node, (k, n), name = linear.node, linear.shape, linear.name
            count = -(-k // self.block)
            dtype = linear.x.dtype
            assert dtype is not None
            quantise, changed[name] = _quantiser(linear, self.block, True, self.observed)
            arrays = pieces(partial(_packed, quantise, dtype.numpy()), 3)
            weight = lazy_weight(model, f"{name}.int4", ir.DataType.UINT8, (n, count, self.block // 2), arrays[0])
            scale = lazy_weight(model, f"{name}.scale", dtype, (n * count,), arrays[1])
            zero = lazy_weight(model, f"{name}.zero", ir.DataType.UINT8, (n * -(-count // 2),), arrays[2])
            attributes = {"K": k, "N": n, "bits": 4, "block_size": self.block, "accuracy_level": self.accuracy}
            replace(node, insert(node, "MatMulNBits", [linear.x, weight, scale, zero], MICROSOFT, **attributes))
        model.opset_imports[MICROSOFT] = 1
        return changed


@dataclass(frozen=True, slots=True)
class Int4Dequantized(LayerPass):
    """Puts a blocked DequantizeLinear before the MatMul of linear layers, which TensorRT fuses. The zero point is the
    middle level of every block, as TensorRT demands. Fields: as in Int4Blocks. A layer whose input is no whole number
    of blocks stays as it is."""

    block: int
    observed: Observations | None = None
    name = "int4 blocks"

    def pattern(self, model: ir.Model) -> list[Linear]:
        return [linear for linear in LayerPass.pattern(self, model) if linear.shape[0] % self.block == 0]

    def rewrite(self, model: ir.Model, matches: list[Linear]) -> dict[str, str]:
        changed = {}
        for linear in matches:
            node, (k, n), name = linear.node, linear.shape, linear.name
            dtype = linear.x.dtype
            assert dtype is not None
            quantise, changed[name] = _quantiser(linear, self.block, False, self.observed)
            arrays = pieces(partial(_signed, quantise, dtype.numpy()), 2)
            weight = lazy_weight(model, f"{name}.int4", ir.DataType.INT4, (k, n), arrays[0])
            scale = lazy_weight(model, f"{name}.scale", dtype, (k // self.block, n), arrays[1])
            values = insert(node, "DequantizeLinear", [weight, scale], axis=0, block_size=self.block)
            replace(node, insert(node, "MatMul", [linear.x, values]))
        return changed


def _quantiser(
    linear: Linear, block: int, asymmetric: bool, observed: Observations | None
) -> tuple[Callable[[], Blocks], str]:
    """Returns a function that computes the levels of a layer, and the words for the manifest."""
    read, how = linear.reader(), f"int4 in blocks of {block}"
    if observed is None:
        return lambda: rounded(read(), block, asymmetric), how
    inputs, _ = inputs_of(linear, observed, {})
    return lambda: compensated(read(), inputs, block, asymmetric), f"{how}, errors compensated"


def _packed(quantise: Callable[[], Blocks], dtype: npt.DTypeLike) -> tuple[Array, Array, Array]:
    return packed(quantise(), dtype)


def packed(blocks: Blocks, dtype: npt.DTypeLike = np.float32) -> tuple[Array, Array, Array]:
    """Returns what MatMulNBits reads: levels [N, blocks, size / 2], steps [N * blocks] of a type, and zero levels
    [N * ceil(blocks / 2)]. Two levels share a byte, the first in the low bits; the last block is padded with its zero
    level."""
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
    """Returns levels -8..7 as int4 [K, N], and steps [blocks, N] of a type."""
    blocks = quantise()
    return (blocks.level.astype(np.int8) - MIDDLE).astype(ml_dtypes.int4), blocks.step.astype(dtype)
