"""W8A8 for ONNX Runtime's CPU kernels: one scale per row of the activations, one per column of the weight.

    scale   = largest absolute value of the row
    q       = round(x / scale * 127) + 128            QuantizeLinear, unsigned: what the processors' dot products take
    y       = (q - 128) @ w8 * column scale / 127     MatMulIntegerToFloat: sums of whole numbers, exact in any order
    out     = y * scale

A row's result depends on that row alone. DynamicQuantizeMatMul is as fast but takes one scale for the whole tensor: a
token's logits would depend on the other tokens of its tree.

Where one scale per row is too coarse, the input is cut into parts, each with its own scales and its own product. The
results are added in a fixed order, as the product of a row's few scales with its few sums. Each part makes the products
smaller and reads and writes the output once more: cheap for a layer with a narrow output, expensive for a large
vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

from eagle_export.base import parted
from eagle_export.recipes.graph import (
    MICROSOFT,
    Array,
    LayerPass,
    Linear,
    constant,
    fed_by_product,
    insert,
    insert_split,
    is_lm_head,
    lazy_weight,
    pieces,
    replace,
)
from eagle_export.recipes.tiles import product

LEVELS = 127
PRODUCT_PARTS, LM_HEAD_PARTS = 8, 2


Rows = tuple[tuple[ir.Value, ...], ir.Value]  # of _quantised_rows


@dataclass(frozen=True, slots=True)
class Int8PerToken(LayerPass):
    """Quantises weights per column and inputs per row, of the linear layers that are `wanted`."""

    name = "int8 per token"

    def rewrite(self, model: ir.Model, matches: list[Linear]) -> dict[str, str]:
        changed = {}
        rows: dict[tuple[ir.Value, int], Rows] = {}  # layers of one input share its quantised form
        # Parts are counted before any layer is replaced: they depend on the operator that computes a layer's input.
        for linear, parts in [(linear, parts_of(linear)) for linear in matches]:
            node, x, (k, n), name, read = linear.node, linear.x, linear.shape, linear.name, linear.columns()
            if (x, parts) not in rows:
                rows[x, parts] = _quantised_rows(model, node, x, parts, k // parts)
            arrays = pieces(partial(per_column_by_parts, read, (k, n), parts), 2 * parts)
            sums, (quantised, scales) = [], rows[x, parts]
            for index, q in enumerate(quantised):
                end = f".{index}" if parts > 1 else ""
                weight = lazy_weight(model, f"{name}.int8{end}", ir.DataType.INT8, (k // parts, n), arrays[2 * index])
                columns = lazy_weight(model, f"{name}.scale{end}", ir.DataType.FLOAT, (n,), arrays[2 * index + 1])
                inputs = [q, weight, _step(model), columns, _middle(model)]
                sums.append(insert(node, "MatMulIntegerToFloat", inputs, MICROSOFT))
            out = _scaled(model, node, sums, scales, n)
            changed[name] = "int8 per column, activations int8 per token"
            if parts > 1:
                changed[name] += f", each in {parts} parts"
            replace(node, out)
        return changed


def parts_of(linear: Linear) -> int:
    """The number of parts into which the input of a layer is cut."""
    parts = PRODUCT_PARTS if fed_by_product(linear) else LM_HEAD_PARTS if is_lm_head(linear) else 1
    return parts if linear.shape[0] % parts == 0 else 1


def per_column(weight: Array) -> tuple[Array, Array]:
    """Returns int8 [K, N] and scales [N] of a weight [K, N], symmetric, with weight ~ int8 * scale."""
    scale = np.abs(weight).max(axis=0) / np.float32(LEVELS)
    scale[scale == 0] = 1
    return np.clip(np.rint(weight / scale), -LEVELS, LEVELS).astype(np.int8), scale.astype(np.float32)


def simulated_tokens(x: Array, weight: Array) -> Array:
    """Returns [n, N], what a layer of one part makes of x [n, K] and its weight [K, N]."""
    values, scale = per_column(weight)
    step = np.abs(x).max(-1, keepdims=True) / np.float32(LEVELS)
    step[step == 0] = 1
    return product(np.rint(x / step) * step, values * scale)


def per_column_by_parts(
    columns: Callable[[slice], Array],
    shape: tuple[int, int],
    parts: int = 1,
    quantise: Callable[[Array], tuple[Array, Array]] = per_column,
    dtype: npt.DTypeLike = np.int8,
) -> tuple[Array, ...]:
    """As `quantise`, of each part of the input channels of a weight of `shape` (K, N), read by some of its columns.
    dtype: of the values."""
    k, n = shape
    values, scales = np.empty((parts, k // parts, n), dtype), np.empty((parts, n), np.float32)
    for piece in parted.parts(shape, 1):
        for index, part in enumerate(np.split(columns(piece), parts)):
            values[index, :, piece], scales[index, piece] = quantise(part)
    return tuple(array for index in range(parts) for array in (values[index], scales[index]))


def _quantised_rows(model: ir.Model, before: ir.Node, x: ir.Value, parts: int, width: int) -> Rows:
    """Quantises x by row. A row of zeros has scale 0: its values are arbitrary, times 0. width: channels of a part.
    Returns one part [1, T, K], or several [1, T, 1, K / parts], and scales [1, T, 1], or [1, T, 1, parts]."""
    if parts > 1:  # all widths are given, because an expert may have no rows
        shape = constant(model, f"shape_parts_{parts}_{width}", np.array([0, 0, parts, width]))
        x = insert(before, "Reshape", [x, shape])
    last = constant(model, "axis_last", np.array([-1], np.int64))
    scale = insert(before, "ReduceMax", [insert(before, "Abs", [x]), last], keepdims=1)
    unit = insert(before, "Div", [x, scale])
    q = insert(before, "QuantizeLinear", [unit, _step(model), _middle(model)])
    if parts == 1:
        return (q,), scale
    scale_shape = constant(model, f"shape_scales_{parts}", np.array([0, 0, 1, parts]))
    return insert_split(before, q, parts, axis=2), insert(before, "Reshape", [scale, scale_shape])


def _scaled(model: ir.Model, before: ir.Node, sums: list[ir.Value], scales: ir.Value, width: int) -> ir.Value:
    """Adds the products of the parts, each times its scale. Returns [1, T, width]."""
    if len(sums) == 1:
        return insert(before, "Mul", [sums[0], scales])
    total = insert(before, "MatMul", [scales, insert(before, "Concat", sums, axis=2)])
    return insert(before, "Reshape", [total, constant(model, f"shape_rows_{width}", np.array([0, 0, width]))])


def _step(model: ir.Model) -> ir.Value:
    return constant(model, "int8_step", np.array(1 / LEVELS, np.float32))


def _middle(model: ir.Model) -> ir.Value:
    return constant(model, "int8_middle", np.array(128, np.uint8))
