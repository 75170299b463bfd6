"""W8A8 for ONNX Runtime's CPU kernels: one scale per row of the activations, one per column of the weight.

    scale   = largest absolute value of the row
    q       = round(x / scale * 127) + 128            QuantizeLinear, unsigned: what the processors' dot products take
    y       = (q - 128) @ w8 * column scale / 127     MatMulIntegerToFloat: sums of whole numbers, exact in any order
    out     = y * scale

A row's result depends on that row alone. DynamicQuantizeMatMul is as fast but takes one scale for the whole tensor:
a token's logits would depend on which other tokens share its tree.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.graph import MICROSOFT, Array, Linear, constant, insert, lazy_weight, linears, part, replace

LEVELS = 127
TINY = np.float32(1e-30)  # a row of zeros divides by this


def int8_per_token(model: ir.Model, wanted: Callable[[Linear], bool] = lambda _: True) -> dict[str, str]:
    """Quantise every wanted linear layer. Returns weight name -> what was done."""
    changed = {}
    rows: dict[ir.Value, tuple[ir.Value, ir.Value]] = {}  # layers of one input share its quantised form
    for linear in filter(wanted, linears(model)):
        node, x, (k, n), read = linear.node, linear.x, linear.shape, linear.reader()
        if x not in rows:
            rows[x] = _quantised_rows(model, node, x)
        q, scale = rows[x]
        name = linear.name
        weight = lazy_weight(model, f"{name}.int8", ir.DataType.INT8, (k, n), part(per_column, read, 0))
        columns = lazy_weight(model, f"{name}.scale", ir.DataType.FLOAT, (n,), part(per_column, read, 1))
        step, middle = _step(model), _middle(model)
        y = insert(node, "MatMulIntegerToFloat", [q, weight, step, columns, middle], MICROSOFT)
        changed[name] = "int8 per column, activations int8 per token"
        replace(node, insert(node, "Mul", [y, scale]))
    if changed:
        model.opset_imports[MICROSOFT] = 1
    return changed


def per_column(weight: Array) -> tuple[Array, Array]:
    """[K, N] -> int8 [K, N] and scales [N], symmetric, with weight ~ int8 * scale."""
    scale = np.abs(weight).max(axis=0) / np.float32(LEVELS)
    scale[scale == 0] = 1
    return np.clip(np.rint(weight / scale), -LEVELS, LEVELS).astype(np.int8), scale.astype(np.float32)


def _quantised_rows(model: ir.Model, before: ir.Node, x: ir.Value) -> tuple[ir.Value, ir.Value]:
    """uint8 rows and the scale [..., 1] of each."""
    last = constant(model, "axis_last", np.array([-1], np.int64))
    largest = insert(before, "ReduceMax", [insert(before, "Abs", [x]), last], keepdims=1)
    scale = insert(before, "Max", [largest, constant(model, "int8_tiny", np.array(TINY))])
    unit = insert(before, "Div", [x, scale])
    return insert(before, "QuantizeLinear", [unit, _step(model), _middle(model)]), scale


def _step(model: ir.Model) -> ir.Value:
    return constant(model, "int8_step", np.array(1 / LEVELS, np.float32))


def _middle(model: ir.Model) -> ir.Value:
    return constant(model, "int8_middle", np.array(128, np.uint8))
