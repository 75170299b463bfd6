"""Weights of 4 or 8 bits in blocks of input channels, in the layouts of ONNX Runtime's MatMulNBits and of TensorRT.

A weight takes its bits, and per block a step of 16 bits and, if asymmetric, a zero level: with 4 bits in blocks of 32
that is 4 + 0.5 + 0.125 bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
import onnx_ir as ir

from eagle_calib.calibration import Observed
from eagle_export.base.errors import ExportError
from eagle_export.base.parted import turned
from eagle_export.recipes.as_stored import as_stored, grid_of_source, in_bytes
from eagle_export.recipes.blocks import Blocks, Grid, by_parts, fitted, nearest, rounded
from eagle_export.recipes.compensation import compensated
from eagle_export.recipes.graph import MICROSOFT, Array, LayerPass, Linear, Steps, insert, lazy_weight, pieces, replace
from eagle_export.recipes.input_products import Products, products_of
from eagle_export.recipes.smooth import check_observed, factors_of, few_rows, inputs_of
from eagle_export.recipes.tiles import product

Observations = Mapping[str, Observed]
AS_IN_SOURCE = ", as the source has them"
INT8_COMPUTE = 4  # MatMulNBits' accuracy_level for activations in int8


@dataclass(frozen=True, slots=True)
class WeightBlocks(LayerPass):
    """Turns linear layers into MatMulNBits, an operator of ONNX Runtime, which rounds a row's inputs to int8 with a
    scale per block.

    accuracy: the operator's accuracy_level, 4 for these products and 1 for products in fp32. observed: inputs of the
    layers by weight name; with them the levels are those with the least error on these inputs. ExportError is raised
    for a layer that is missing there, but an expert that is missing gets the nearest levels. other: returns the grid of
    a layer that does not have `grid`, and None for the rest."""

    grid: Grid
    observed: Observations | None = None
    accuracy: int = INT8_COMPUTE
    other: Callable[[Linear], Grid | None] = lambda _: None
    name = "weight blocks"

    def rewrite(self, model: ir.Model, matches: list[Linear]) -> dict[str, str]:
        changed, products = {}, _LastProducts()
        for linear in matches:
            node, (k, n) = linear.node, linear.shape
            # EmbeddingBlocks reads the same table as the LM head, in whole blocks.
            grid = fitted(self.other(linear) or self.grid, k, whole=linear.rotated)
            quantise, changed[linear.name] = _quantiser(linear, grid, self.observed, products)
            weight, scale, *zero = stored(model, linear.name, (k, n), quantise, grid)
            if linear.dtype != ir.DataType.FLOAT16:
                scale = insert(node, "Cast", [scale], to=int(linear.dtype))  # folded when the graph is loaded
            if grid.sixteenths:
                weight, scale, *zero = in_bytes(Steps(model, node), weight, scale, *zero)
            bits = 8 if grid.sixteenths else grid.bits
            attributes = {"bits": bits, "block_size": grid.size, "accuracy_level": self.accuracy}
            out = insert(node, "MatMulNBits", [linear.x, weight, scale, *zero], MICROSOFT, K=k, N=n, **attributes)
            replace(node, out)
        return changed


@dataclass(frozen=True, slots=True)
class StoredBlocks(WeightBlocks):
    """The layers whose weights a file has in four bits as they are there, and the others on `grid`. ExportError is
    raised for a source without such layers."""

    other: Callable[[Linear], Grid | None] = grid_of_source

    def rewrite(self, model: ir.Model, matches: list[Linear]) -> dict[str, str]:
        changed = WeightBlocks.rewrite(self, model, matches)
        if not any(how.endswith(AS_IN_SOURCE) for how in changed.values()):
            raise ExportError(
                "no weight of the source has the four bits of a file in Q4_0, Q4_1 or Q4_K, so nothing can be kept as "
                "it is stored; choose int4 or int8"
            )
        return changed


@dataclass(frozen=True, slots=True)
class Int4Dequantized(LayerPass):
    """Puts a blocked DequantizeLinear before the MatMul of linear layers, which TensorRT fuses. The zero level is the
    middle one of every block, as TensorRT demands. block: input channels that share a step. observed: as in
    WeightBlocks. A layer whose input is not a whole number of blocks stays as it is."""

    block: int
    observed: Observations | None = None
    name = "int4 blocks"

    def pattern(self, model: ir.Model) -> list[Linear]:
        return [linear for linear in LayerPass.pattern(self, model) if linear.shape[0] % self.block == 0]

    def rewrite(self, model: ir.Model, matches: list[Linear]) -> dict[str, str]:
        changed, products = {}, _LastProducts()
        for linear in matches:
            node, (k, n), name, dtype = linear.node, linear.shape, linear.name, linear.dtype
            grid = Grid(4, self.block, asymmetric=False)
            quantise, changed[name] = _quantiser(linear, grid, self.observed, products)
            arrays = pieces(partial(_signed, quantise, dtype.numpy()), 2)
            weight = lazy_weight(model, f"{name}.int4", ir.DataType.INT4, (k, n), arrays[0])
            scale = lazy_weight(model, f"{name}.scale", dtype, (k // self.block, n), arrays[1])
            values = insert(node, "DequantizeLinear", [weight, scale], axis=0, block_size=self.block)
            replace(node, insert(node, "MatMul", [linear.x, values]))
        return changed


class _LastProducts:
    """The products of the input that was asked for last: layers that read one tensor are written one after the other.
    Those of all layers would take gigabytes."""

    def __init__(self) -> None:
        self._input: ir.Value | None = None
        self._products: Products | None = None

    def of(self, x: ir.Value, inputs: Callable[[], Array]) -> Products:
        """x: the tensor. inputs: returns what was recorded of it [n, K]."""
        if self._products is None or self._input is not x:
            self._products = None  # frees the last ones first
            self._input, self._products = x, products_of(inputs())
        return self._products


def _quantiser(
    linear: Linear, grid: Grid, observed: Observations | None, last: _LastProducts
) -> tuple[Callable[[], Blocks], str]:
    """Returns a function that computes the levels of a layer, and the words for the manifest. Without recorded inputs
    they are the nearest. last: of the graph's layers. Raises ExportError as WeightBlocks says."""
    columns, shape, how = linear.columns(), linear.shape, f"int{grid.bits} in blocks of {grid.size}"
    if grid.sixteenths:
        return lambda: by_parts(columns, shape, as_stored), f"{how}{AS_IN_SOURCE}"
    if observed is None or few_rows(linear, observed):
        return lambda: by_parts(columns, shape, lambda weight: rounded(weight, grid)), how
    check_observed(linear, observed)
    x, smoothed = linear.x, "" if factors_of(linear) is None else ", smoothed"

    def quantise() -> Blocks:
        products = last.of(x, lambda: inputs_of(linear, observed)[0])  # recorded inputs are read when needed
        return by_parts(columns, shape, lambda weight: compensated(weight, products, grid))

    return quantise, f"{how}{smoothed}, errors compensated"


def simulated_blocks(grid: Grid, x: Array, weight: Array) -> Array:
    """Returns [n, N], what MatMulNBits makes of x [n, K], rounded to int8 with a scale per row and block of channels,
    and a weight [K, N], rounded without a search."""
    n, k = x.shape
    padded = np.pad(x, ((0, 0), (0, -k % grid.size))).reshape(n, -1, grid.size)
    step = np.abs(padded).max(-1, keepdims=True) / np.float32(127)
    step[step == 0] = 1
    nearest_inputs = (np.rint(padded / step) * step).reshape(n, -1)[:, :k]
    return product(nearest_inputs, nearest(weight, grid).values())


def stored(
    model: ir.Model, name: str, shape: tuple[int, int], quantise: Callable[[], Blocks], grid: Grid
) -> tuple[ir.Value, ...]:
    """Adds the initializers of a weight of `shape` (K, N), computed when they are written. Returns levels, steps and,
    if asymmetric, zero levels, as `packed` lays them out; an existing weight of that name as it is. Writing raises
    ExportError for values whose steps are beyond the range of fp16."""
    n, count = shape[1], -(-shape[0] // grid.size)

    def in_range() -> tuple[Array, Array, Array]:
        level, step, zero = packed(quantise())
        if not np.isfinite(step).all():
            raise ExportError(
                f"{name} holds values that are too large for blocks of {grid.bits} bits; export in fp32, or keep the "
                "layer as it is"
            )
        return level, step, zero

    arrays = pieces(in_range, 3)
    kind = f"int{grid.bits}"
    level = lazy_weight(model, f"{name}.{kind}", ir.DataType.UINT8, (n, count, grid.size * grid.bits // 8), arrays[0])
    step = lazy_weight(model, f"{name}.scale", ir.DataType.FLOAT16, (n, count), arrays[1])
    if not grid.asymmetric:
        return level, step
    zeros = (n, count, 1) if grid.sixteenths else (n, -(-count * grid.bits // 8))
    return level, step, lazy_weight(model, f"{name}.zero", ir.DataType.UINT8, zeros, arrays[2])


def packed(blocks: Blocks) -> tuple[Array, Array, Array]:
    """Returns what MatMulNBits reads: levels [N, blocks, bytes], steps [N, blocks] fp16, and zero levels [N, bytes],
    or in sixteenths [N, blocks, 1]. Two levels of 4 bits share a byte, the first in the low bits; the last block is
    padded with its zero level."""
    grid, (k, n), count = blocks.grid, blocks.level.shape, len(blocks.step)
    level = np.empty((n, count * grid.size), np.uint8)
    level[:, :k] = turned(blocks.level)
    level[:, k:] = blocks.zero[-1][:, None]
    zero = np.zeros((n, count + count % 2), np.uint8)
    zero[:, :count] = blocks.zero.T
    with np.errstate(over="ignore"):  # `stored` says so
        step = blocks.step.T.astype(np.float16)
    if grid.bits == 8:
        return level.reshape(n, count, -1), step, np.ascontiguousarray(zero[:, :count])
    zeros = zero[:, :count, None] if grid.sixteenths else _pairs(zero)
    return _pairs(level).reshape(n, count, -1), step, np.ascontiguousarray(zeros)


def _pairs(levels: Array) -> Array:
    pairs: Array = levels[:, ::2] | levels[:, 1::2] << 4
    return pairs


def _signed(quantise: Callable[[], Blocks], dtype: np.dtype[Any]) -> tuple[Array, Array]:
    """Returns levels -8..7 as int4 [K, N], and steps [blocks, N] of a type."""
    blocks = quantise()
    levels = blocks.level.astype(np.int8) - np.int8(blocks.grid.middle)
    return levels.astype(ml_dtypes.int4), blocks.step.astype(dtype)
