"""Multipliers of products, such as Granite's residual_multiplier, as a part of the weights: c (x @ W) = x @ (c W).

So the sum with the residual stream follows the product itself, as in a Llama, and both are one step of a native graph
(native.py). The weights are rounded once more in fp32, before they are quantised."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.graph import LayerPass, Linear, is_lm_head, multiplied_after, replace, rescale


@dataclass(frozen=True, slots=True)
class Multipliers(LayerPass):
    """Takes a multiplier that alone reads a product into the product's weight."""

    name = "multipliers"

    def pattern(self, model: ir.Model) -> list[Linear]:
        return [linear for linear in LayerPass.pattern(self, model) if _multiplied(linear) is not None]

    def rewrite(self, model: ir.Model, matches: list[Linear]) -> dict[str, str]:
        changed = {}
        for linear in matches:
            found = _multiplied(linear)
            assert found is not None
            node, factor = found
            rescale(linear.weight, np.full(linear.shape[0], factor, np.float32), 0)
            changed[linear.name] = f"times {factor:g}"
            (out,) = linear.node.outputs
            name = out.name
            replace(node, out)
            if not out.is_graph_output():
                out.name = name  # by which worst_layers.py knows the product
        return changed


def _multiplied(linear: Linear) -> tuple[ir.Node, float] | None:
    """The node that multiplies a layer's output by a number, and this; None where others read output or weight."""
    (out,) = linear.node.outputs
    alone = not linear.rotated and len(linear.weight.uses()) == 1
    return multiplied_after(out) if alone and not out.is_graph_output() and not is_lm_head(linear) else None
