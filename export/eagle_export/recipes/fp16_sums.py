"""Keeps sums of products in range where a kernel may add them up in fp16.

TensorRT's kernels for weights of 4 or 8 bits dequantise them to fp16 and multiply fp16 inputs; nothing says in which
type they add. A sum of many terms may pass 65504 on the way to a result that is small. So the largest possible sum of
each column, partial sums included, is bounded before the weights are quantised:

    after a norm with weight g     sqrt(K) * |g * w|        Cauchy and Schwarz: a normalised row has K as its square
    elsewhere                      HEADROOM * sum(absmax * |w|)       absmax [K]: the largest inputs recorded

Where the bound is beyond LIMIT, the weight is divided by a power of two and the product multiplied by it, which rounds
nothing but numbers near the smallest of fp16. TensorRT fuses the multiplication into the next kernel.

A layer's weight w is [K, N].
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from eagle_calib.calibration import Observed
from eagle_export.base import parted
from eagle_export.recipes.graph import KEPT, Linear, Pass, constant, insert_after, linears, made_by, made_of, rescale
from eagle_export.recipes.smooth import inputs_of

LIMIT = 32752.0  # half of fp16's largest: sums are rounded, and quantised weights differ from their source
HEADROOM = 4.0  # inputs up to so many times the largest recorded one are in range
NOTE = "sums in fp16"  # key in the manifest's recipe


@dataclass(frozen=True, slots=True)
class Fp16Sums(Pass[Linear]):
    """Scales the layers in floats whose sums may pass LIMIT, and says which; it changes no other. observed: inputs of
    the layers by weight name; without them only layers after a norm are bounded."""

    observed: Mapping[str, Observed] | None
    name = "sums in fp16"

    def pattern(self, model: ir.Model) -> list[Linear]:
        return linears(model)

    def rewrite(self, model: ir.Model, matches: list[Linear]) -> dict[str, str]:
        largest, scaled, unbounded = 0.0, [], []
        for linear in matches:
            bound = largest_sum(linear, self.observed)
            if bound is None:
                unbounded.append(linear.name)
                continue
            largest = max(largest, bound)
            if bound > LIMIT and len(linear.weight.uses()) > 1:
                unbounded.append(linear.name)  # an embedding too, which must stay as it is
            elif bound > LIMIT:
                shift = math.ceil(math.log2(bound / LIMIT))
                _scale(model, linear, shift)
                scaled.append(f"{linear.name} by 1/{2**shift}")
        says = f"at most {largest:.4g}; {', '.join(scaled) + ' scaled' if scaled else 'no layer scaled'}"
        return {NOTE: says + (f"; not bounded: {', '.join(unbounded)}" if unbounded else "")}

    def check(self, model: ir.Model) -> None:
        """Layers that need no factor still match."""


def largest_sum(linear: Linear, observed: Mapping[str, Observed] | None) -> float | None:
    """Returns a bound of a layer's sums, partial ones included; None if nothing is known of its inputs."""
    columns, shape = linear.columns(), linear.shape
    norm = _norm_weight(linear)
    if norm is not None:
        squares = np.square(norm)
        parts = (squares @ np.square(columns(piece)) for piece in parted.parts(shape, 1))
        return math.sqrt(shape[0] * max(float(part.max()) for part in parts))
    if observed is None or linear.name.removesuffix(KEPT) not in observed:
        return None
    _, absmax = inputs_of(linear, observed)
    return HEADROOM * max(float((absmax @ np.abs(columns(piece))).max()) for piece in parted.parts(shape, 1))


def _norm_weight(linear: Linear) -> parted.Array | None:
    """The weight [K] of the norm that computes a layer's input; None for another operator."""
    norm = made_by(made_of(linear.x, "Gather") or linear.x, "RMSNormalization")  # a Gather takes some rows
    weight = None if norm is None else norm.inputs[1]
    if weight is None or weight.const_value is None:
        return None
    values: parted.Array = weight.const_value.numpy().astype(np.float32)
    return values if values.shape == (linear.shape[0],) else None


def _scale(model: ir.Model, linear: Linear, shift: int) -> None:
    """Divides a weight by 2^shift when it is written, and multiplies the product by it. The product keeps its name, but
    for one that leaves the graph."""
    (out,) = linear.node.outputs
    rescale(linear.weight, np.full(linear.shape[linear.rotated], 2.0**-shift, np.float32), 0)
    factor = constant(model, f"sums_{2**shift}", np.array(2.0**shift, linear.dtype.numpy()))
    name, leaves = out.name, out.is_graph_output()
    value = insert_after(out, "Mul", factor)
    if leaves:
        out.name, value.name = f"{name}.sums", name
