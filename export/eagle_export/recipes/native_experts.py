"""Mixtures of experts as one native step each. In the graph of routed_experts.py an expert is products of the rows that
are routed to it, and each expert costs some calls even where it has none; the operator gets all rows and the router's
shares of them, and computes the experts that have rows.

It is an operator only until native_steps.py makes it a step of RowExactSteps, which is what runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.graph import Pass, insert, made_by, made_of, only_reader, replace
from eagle_export.recipes.native_products import gate_before, is_native, stored_weight, sum_after
from eagle_export.recipes.native_steps import DOMAIN, EXPERTS

OF_SHARES = ("Unsqueeze", "Transpose", "Reshape", "Gather", "Reshape")  # from weights of rows to shares [1, T, E]


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts of one layer as routed_experts.py leaves them. x [1, T, H]. shares [1, T, E]. products: of each
    expert gate, up and down. total: the node that computes the mixture's output."""

    x: ir.Value
    shares: ir.Value
    products: tuple[tuple[ir.Node, ir.Node, ir.Node], ...]
    activation: int
    total: ir.Node


@dataclass(frozen=True, slots=True)
class NativeExperts(Pass[Routed]):
    """Replaces the experts of a layer, with the sum after them, by RowExactExperts."""

    name = "native experts"

    def pattern(self, model: ir.Model) -> list[Routed]:
        found = (_routed(node) for node in model.graph if node.op_type == "Concat")
        return [each for each in found if each is not None]

    def rewrite(self, model: ir.Model, matches: list[Routed]) -> dict[str, str]:
        changed = {}
        for routed in matches:
            weights = [node for expert in routed.products for node in expert]
            (out,) = routed.total.outputs
            last, added = sum_after(routed.total) or (routed.total, None)
            grids = [[node.attributes.get_int(name) for name in ("bits", "block_size")] for node in weights]
            grid = insert(last, "Constant", [], value=ir.tensor(np.array(grids, np.int64)))
            stored = [part for node in weights for part in stored_weight(node)]
            sizes = {"H": weights[0].attributes.get_int("K"), "I": weights[0].attributes.get_int("N")}
            inputs = [routed.x, routed.shares, added, grid, *stored]
            changed[str(out.name)] = "one step"
            replace(last, insert(last, EXPERTS, inputs, DOMAIN, **sizes, activation=routed.activation))
        model.opset_imports[DOMAIN] = 1
        return changed


def _routed(outs: ir.Node) -> Routed | None:
    """outs: a Concat, maybe of what experts compute for their rows."""
    products, activations, parts = [], set(), []
    for out in outs.inputs:
        down = _native_product(out)
        gated = None if down is None else gate_before(down)
        if down is None or gated is None:
            return None
        gate, up = _native_product(gated[0]), _native_product(gated[2])
        if gate is None or up is None or gate.inputs[0] is not up.inputs[0] or gate.inputs[0] is None:
            return None
        products.append((gate, up, down))
        activations.add(gated[1])
        parts.append(gate.inputs[0])
    split = made_by(parts[0], "Split") if parts else None
    if split is None or tuple(split.outputs) != tuple(parts) or len(activations) != 1:
        return None
    shapes = {tuple((node.attributes.get_int("K"), node.attributes.get_int("N")) for node in each) for each in products}
    if len(shapes) != 1 or any(size % 8 for shape in shapes for pair in shape for size in pair):
        return None
    x, chosen = made_of(split.inputs[0], "Gather"), only_reader(outs.outputs[0], "Gather")
    weighted = None if chosen is None else only_reader(chosen.outputs[0], "Mul")
    if weighted is None:
        return None
    shares, total = weighted.inputs[1], _squeezed(weighted)
    for op in OF_SHARES:
        shares = made_of(shares, op)
    if x is None or shares is None or total is None:
        return None
    return Routed(x, shares, tuple(products), activations.pop(), total)


def _native_product(value: ir.Value | None) -> ir.Node | None:
    """The product that made a value, if the operator computes it and its weight has zero levels; else None."""
    node = made_by(value, "MatMulNBits")
    return node if node is not None and is_native(node) and len(stored_weight(node)) == 3 else None


def _squeezed(node: ir.Node) -> ir.Node | None:
    """The Squeeze after a sum over what a node computes."""
    while len(readers := list(node.outputs[0].uses())) == 1:
        node = readers[0].node
        if node.op_type == "Squeeze":
            return node
        if node.op_type not in ("Split", "Add"):
            return None
    return None
