"""int8 as QuantizeLinear and DequantizeLinear nodes, which TensorRT and ONNX Runtime fuse into int8 products.

Int8Static (W8A8): one scale for the whole input of a layer, from the calibration, and one per column of its weight;
symmetric, as TensorRT demands. Each MatMul gets its own DequantizeLinear, else ONNX Runtime does not fuse it. down and
the LM head are left to another pass: a few values of down's input are large, in different channels in each row, so that
one scale for all rows would be too coarse for most values.

Int8Weights: weights only; products stay in floats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir

from eagle_calib.calibration import Observed, is_expert
from eagle_export.recipes.graph import (
    Array,
    Linear,
    constant,
    fed_by_product,
    insert,
    is_lm_head,
    lazy_weight,
    linears,
    pieces,
    replace,
)
from eagle_export.recipes.graph_pass import LayerPass, Pass
from eagle_export.recipes.int8 import LEVELS, per_column, per_column_by_parts
from eagle_export.recipes.smooth import factors_of, few_rows, inputs_of

CLIPS = np.linspace(0.3, 1.0, 15, dtype=np.float32)  # shares of the largest input that are tried as range


@dataclass(frozen=True, slots=True)
class Int8Static(Pass[Linear]):
    """Quantises weights per column and inputs per tensor, of all linear layers but down, the LM head and experts that
    saw few rows. Raises ExportError for any other layer that the calibration lacks.

    observed: inputs of the layers by weight name. zero: the zero point of the inputs. TensorRT takes int8 0 alone; ONNX
    Runtime's CPU provider fuses products of uint8 inputs around 128, but none of an int8 input that several layers
    read."""

    observed: Mapping[str, Observed] | None
    zero: np.int8 | np.uint8
    name = "int8 static"

    def pattern(self, model: ir.Model) -> list[Linear]:
        layers = [linear for linear in linears(model) if not (fed_by_product(linear) or is_lm_head(linear))]
        return [linear for linear in layers if self.observed is None or not few_rows(linear, self.observed)]

    def rewrite(self, model: ir.Model, matches: list[Linear]) -> dict[str, str]:
        assert self.observed is not None, "planned with a calibration"
        changed = {}
        inputs: dict[tuple[ir.Value, str], tuple[ir.Value, ir.Value, float]] = {}  # of x, and of an expert's rows of it
        for linear in matches:
            node, x, name = linear.node, linear.x, linear.name
            middle = constant(model, f"{self.zero.dtype}_zero", np.array(self.zero))
            key = x, name.rpartition(".experts.")[2].partition(".")[0] if is_expert(name) else ""
            if key not in inputs:
                limit = best_range(*inputs_of(linear, self.observed))
                scale = constant(model, f"{name}.input_scale", np.array(limit / LEVELS, np.float32))
                inputs[key] = insert(node, "QuantizeLinear", [_in_fp32(node, x), scale, middle]), scale, limit
            quantised, scale, limit = inputs[key]
            values = insert(node, "DequantizeLinear", [quantised, scale, middle])
            smoothed = ", smoothed" if factors_of(linear) is not None else ""
            changed[name] = f"int8 per column, activations int8 within {limit:.4g}{smoothed}"
            product = insert(node, "MatMul", [values, _weight(model, linear, ir.DataType.FLOAT)])
            replace(
                node, product if _type(x) == ir.DataType.FLOAT else insert(node, "Cast", [product], to=int(_type(x)))
            )
        return changed


@dataclass(frozen=True, slots=True)
class Int8Weights(LayerPass):
    """Quantises the weights of the linear layers that are `wanted`, per column; products stay in floats."""

    name = "int8 weights"

    def rewrite(self, model: ir.Model, matches: list[Linear]) -> dict[str, str]:
        for linear in matches:
            weight = _weight(model, linear, _type(linear.x))
            replace(linear.node, insert(linear.node, "MatMul", [linear.x, weight]))
        return {linear.name: "int8 per column" for linear in matches}


def best_range(x: Array, absmax: Array) -> float:
    """Returns the range with the smallest squared error for x [n, K], in 127 levels on both sides of 0. absmax [K]:
    largest magnitudes of all inputs seen, of which x is a sample."""
    largest = max(float(absmax.max()), 1e-20)
    errors = [float(np.square(_rounded(x, largest * clip) - x).sum()) for clip in CLIPS]
    return largest * float(CLIPS[int(np.argmin(errors))])


def _weight(model: ir.Model, linear: Linear, dtype: ir.DataType) -> ir.Value:
    """Returns the weight, dequantised to a type. Its zero points are given though they are all 0: where one is left out
    and byte products saturate, ONNX Runtime (1.32, QDQ::ConvertS8WeightToU8) puts in a single 128 for all columns,
    which its DequantizeLinear then refuses."""
    name, (k, n) = linear.name, linear.shape
    values, columns = pieces(partial(_columns, linear.columns(), (k, n), dtype), 2)
    weight = lazy_weight(model, f"{name}.int8", ir.DataType.INT8, (k, n), values)
    scale = lazy_weight(model, f"{name}.scale", dtype, (n,), columns)
    zeros = lazy_weight(model, f"{name}.zero", ir.DataType.INT8, (n,), lambda: np.zeros(n, np.int8))
    return insert(linear.node, "DequantizeLinear", [weight, scale, zeros], axis=1)


def _columns(columns: Callable[[slice], Array], shape: tuple[int, int], dtype: ir.DataType) -> tuple[Array, Array]:
    values, scale = per_column_by_parts(columns, shape)
    return values, scale.astype(dtype.numpy())


def _in_fp32(before: ir.Node, x: ir.Value) -> ir.Value:
    return x if _type(x) == ir.DataType.FLOAT else insert(before, "Cast", [x], to=int(ir.DataType.FLOAT))


def _type(value: ir.Value) -> ir.DataType:
    assert value.dtype is not None
    return value.dtype


def simulated_static(x: Array, weight: Array) -> Array:
    """Returns [n, N], what a quantised layer makes of x [n, K] and its weight [K, N]."""
    values, scale = per_column(weight)
    out: Array = _rounded(x, best_range(x, np.abs(x).max(0))) @ (values * scale)
    return out


def _rounded(x: Array, limit: float) -> Array:
    step = np.float32(limit / LEVELS)
    rounded: Array = np.clip(np.rint(x / step), -LEVELS, LEVELS) * step
    return rounded
