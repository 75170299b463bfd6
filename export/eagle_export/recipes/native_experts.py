"""Mixtures of experts as one native step each. In the graph of routed_experts.py an expert is products of the rows that
are routed to it, and each expert costs some calls even where it has none; the operator gets all rows and the router's
shares of them, and computes the experts that have rows.

It is an operator only until native_steps.py makes it a step of RowExactSteps, which is what runs."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.graph import Pass, insert, replace
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
    split = parts[0].producer() if parts else None
    if split is None or split.op_type != "Split" or tuple(split.outputs) != tuple(parts) or len(activations) != 1:
        return None
    shapes = {tuple((node.attributes.get_int("K"), node.attributes.get_int("N")) for node in each) for each in products}
    if len(shapes) != 1 or any(size % 8 for shape in shapes for pair in shape for size in pair):
        return None
    gathered = None if split.inputs[0] is None else split.inputs[0].producer()
    weighted = _reader(_reader(outs, "Gather"), "Mul")
    if gathered is None or gathered.op_type != "Gather" or weighted is None:
        return None
    shares, total = _back(weighted.inputs[1], OF_SHARES), _squeezed(weighted)
    x = gathered.inputs[0]
    if x is None or shares is None or total is None:
        return None
    return Routed(x, shares, tuple(products), activations.pop(), total)


def _native_product(value: ir.Value | None) -> ir.Node | None:
    """The product that made a value, if the operator computes it and its weight has zero levels; else None."""
    node = None if value is None else value.producer()
    made = node is not None and node.op_type == "MatMulNBits" and is_native(node)
    return node if made and node is not None and len(stored_weight(node)) == 3 else None


def _reader(node: ir.Node | None, op: str) -> ir.Node | None:
    """The node that alone reads a node's first output; None if it is of another operator."""
    readers = [] if node is None else [use.node for use in node.outputs[0].uses()]
    return readers[0] if len(readers) == 1 and readers[0].op_type == op else None


def _back(value: ir.Value | None, operators: tuple[str, ...]) -> ir.Value | None:
    """What a value was made of by nodes of these operators, the last first."""
    for op in operators:
        node = None if value is None else value.producer()
        if node is None or node.op_type != op:
            return None
        value = node.inputs[0]
    return value


def _squeezed(node: ir.Node) -> ir.Node | None:
    """The Squeeze after a sum over what a node computes."""
    while len(readers := list(node.outputs[0].uses())) == 1:
        node = readers[0].node
        if node.op_type == "Squeeze":
            return node
        if node.op_type not in ("Split", "Add"):
            return None
    return None
