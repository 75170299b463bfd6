"""int8 and fp8 as QuantizeLinear and DequantizeLinear nodes, which TensorRT and ONNX Runtime fuse into byte products.

Int8Static (W8A8): one scale for the whole input of a layer, from the calibration, and one per column of its weight;
symmetric, as TensorRT demands. Each MatMul gets its own DequantizeLinear, else ONNX Runtime does not fuse it. down and
the LM head are left to another pass: a few values of down's input are large, in different channels in each row, so that
one scale for all rows would be too coarse for most values.

Int8Weights: weights only; products stay in floats.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import ml_dtypes
import numpy as np
import onnx_ir as ir

from eagle_calib.calibration import Observed, is_expert
from eagle_export.recipes.graph import (
    Array,
    LayerPass,
    Linear,
    Pass,
    constant,
    fed_by_product,
    insert,
    is_lm_head,
    lazy_weight,
    linears,
    pieces,
    replace,
)
from eagle_export.recipes.int8 import LEVELS, per_column, per_column_by_parts
from eagle_export.recipes.smooth import factors_of, few_rows, inputs_of
from eagle_export.recipes.tiles import product

FP8, LARGEST_FP8 = ml_dtypes.float8_e4m3fn, 448.0
FP8_HEADROOM = 2.0  # inputs up to so many times the largest recorded one are in range; it costs the smallest a bit
CLIPS = np.linspace(0.3, 1.0, 15, dtype=np.float32)  # shares of the largest input that are tried as range


@dataclass(frozen=True, slots=True)
class StaticProducts(Pass[Linear]):
    """Quantises weights per column and inputs per tensor, of the linear layers that it takes, but of experts that saw
    few rows. Raises ExportError for any other layer that the calibration lacks.

    observed: inputs of the layers by weight name."""

    observed: Mapping[str, Observed] | None
    form: ClassVar[str]  # of the numbers that are multiplied, as the manifest names it
    largest: ClassVar[float]  # of them

    @abstractmethod
    def takes(self, linear: Linear) -> bool:
        """Whether the pass changes a layer."""

    @abstractmethod
    def middle(self, model: ir.Model) -> ir.Value:
        """The zero point of inputs."""

    @abstractmethod
    def range(self, x: Array, absmax: Array) -> float:
        """The magnitude of an input that becomes the largest number. x, absmax: as in best_range."""

    def pattern(self, model: ir.Model) -> list[Linear]:
        layers = [linear for linear in linears(model) if self.takes(linear)]
        return [linear for linear in layers if self.observed is None or not few_rows(linear, self.observed)]

    def rewrite(self, model: ir.Model, matches: list[Linear]) -> dict[str, str]:
        assert self.observed is not None, "planned with a calibration"
        changed = {}
        inputs: dict[tuple[ir.Value, str], tuple[ir.Value, ir.Value, float]] = {}  # of x, and of an expert's rows of it
        for linear in matches:
            node, x, name, middle = linear.node, linear.x, linear.name, self.middle(model)
            narrow = linear.dtype != ir.DataType.FLOAT
            key = x, name.rpartition(".experts.")[2].partition(".")[0] if is_expert(name) else ""
            if key not in inputs:
                limit = self.range(*inputs_of(linear, self.observed))
                scale = constant(model, f"{name}.input_scale", np.array(limit / self.largest, np.float32))
                wide = insert(node, "Cast", [x], to=int(ir.DataType.FLOAT)) if narrow else x
                inputs[key] = insert(node, "QuantizeLinear", [wide, scale, middle]), scale, limit
            quantised, scale, limit = inputs[key]
            values = insert(node, "DequantizeLinear", [quantised, scale, middle])
            smoothed = ", smoothed" if factors_of(linear) is not None else ""
            changed[name] = f"{self.form} per column, activations {self.form} within {limit:.4g}{smoothed}"
            product = insert(node, "MatMul", [values, _weight(model, linear, self.form, ir.DataType.FLOAT)])
            replace(node, insert(node, "Cast", [product], to=int(linear.dtype)) if narrow else product)
        return changed


@dataclass(frozen=True, slots=True)
class Int8Static(StaticProducts):
    """Products of int8, of all layers but down and the LM head.

    zero: the zero point of the inputs. TensorRT takes int8 0 alone; ONNX Runtime's CPU provider fuses products of uint8
    inputs around 128, but none of an int8 input that several layers read."""

    zero: np.int8 | np.uint8
    name = "int8 static"
    form, largest = "int8", LEVELS

    def takes(self, linear: Linear) -> bool:
        return not (fed_by_product(linear) or is_lm_head(linear))

    def middle(self, model: ir.Model) -> ir.Value:
        return constant(model, f"{self.zero.dtype}_zero", np.array(self.zero))

    def range(self, x: Array, absmax: Array) -> float:
        return best_range(x, absmax)


@dataclass(frozen=True, slots=True)
class Fp8Static(StaticProducts):
    """Products of fp8 (E4M3: 4 bits of exponent and 3 of mantissa), of all layers but the LM head: a number's error is
    a share of itself, so that down's few large inputs cost the others nothing."""

    name = "fp8 static"
    form, largest = "fp8", LARGEST_FP8

    def takes(self, linear: Linear) -> bool:
        return not is_lm_head(linear)

    def middle(self, model: ir.Model) -> ir.Value:
        return constant(model, "fp8_zero", np.zeros((), FP8))

    def range(self, x: Array, absmax: Array) -> float:
        return FP8_HEADROOM * max(float(absmax.max()), 1e-20)


@dataclass(frozen=True, slots=True)
class Int8Weights(LayerPass):
    """Quantises the weights of the linear layers that are `wanted`, per column; products stay in floats."""

    name = "int8 weights"

    def rewrite(self, model: ir.Model, matches: list[Linear]) -> dict[str, str]:
        for linear in matches:
            weight = _weight(model, linear, "int8", linear.dtype)
            replace(linear.node, insert(linear.node, "MatMul", [linear.x, weight]))
        return {linear.name: "int8 per column" for linear in matches}


def best_range(x: Array, absmax: Array) -> float:
    """Returns the range with the smallest squared error for x [n, K], in 127 levels on both sides of 0. absmax [K]:
    largest magnitudes of all inputs seen, of which x is a sample."""
    largest = max(float(absmax.max()), 1e-20)
    errors = [float(np.square(_rounded(x, largest * clip) - x).sum()) for clip in CLIPS]
    return largest * float(CLIPS[int(np.argmin(errors))])


def _weight(model: ir.Model, linear: Linear, form: str, dtype: ir.DataType) -> ir.Value:
    """Returns the weight in a form of FORMS, dequantised to a type. Its zero points are given though they are all 0:
    where one is left out and byte products saturate, ONNX Runtime (1.32, QDQ::ConvertS8WeightToU8) puts in a single 128
    for all columns, which its DequantizeLinear then refuses."""
    name, (k, n), columns = linear.name, linear.shape, linear.columns()
    kind, quantise = FORMS[form]

    def compute() -> tuple[Array, Array]:
        values, scales = per_column_by_parts(columns, (k, n), quantise=quantise, dtype=kind.numpy())
        return values, scales.astype(dtype.numpy())

    values, scales = pieces(compute, 2)
    weight = lazy_weight(model, f"{name}.{form}", kind, (k, n), values)
    scale = lazy_weight(model, f"{name}.scale", dtype, (n,), scales)
    zeros = lazy_weight(model, f"{name}.zero", kind, (n,), lambda: np.zeros(n, kind.numpy()))
    return insert(linear.node, "DequantizeLinear", [weight, scale, zeros], axis=1)


def _fp8_per_column(weight: Array) -> tuple[Array, Array]:
    """Returns a weight [K, N] as fp8, and its scales [N]."""
    scale = np.abs(weight).max(0) / np.float32(LARGEST_FP8)
    scale[scale == 0] = 1
    return np.clip(weight / scale, -LARGEST_FP8, LARGEST_FP8).astype(FP8), scale


FORMS = {"int8": (ir.DataType.INT8, per_column), "fp8": (ir.DataType.FLOAT8E4M3FN, _fp8_per_column)}


def simulated_static(x: Array, weight: Array) -> Array:
    """Returns [n, N], what a quantised layer makes of x [n, K] and its weight [K, N]."""
    values, scale = per_column(weight)
    return product(_rounded(x, best_range(x, np.abs(x).max(0))), values * scale)


def _rounded(x: Array, limit: float) -> Array:
    step = np.float32(limit / LEVELS)
    rounded: Array = np.clip(np.rint(x / step), -LEVELS, LEVELS) * step
    return rounded
