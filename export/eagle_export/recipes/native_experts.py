"""Mixtures of experts as one native step each. In the graph of routed_experts.py an expert is products of the rows that
are routed to it, and each expert costs some calls even where it has none; the operator gets all rows and the router's
shares of them, and computes the experts that have rows.

It is an operator only until native_steps.py makes it a step of RowExactSteps, which is what runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.graph import Pass, insert, made_by, made_of, number_of, only_reader, replace
from eagle_export.recipes.native_products import bias_after, gate_before, grid_of, is_native, stored_weight, sum_after
from eagle_export.recipes.native_steps import DOMAIN, EXPERTS

BOUNDED = 3  # an activation; 1 and 2 are those of native_products.py
OF_SHARES = ("Unsqueeze", "Transpose", "Reshape", "Gather", "Reshape")  # from weights of rows to shares [1, T, E]


@dataclass(frozen=True, slots=True)
class Routed:
    """The experts of one layer as routed_experts.py leaves them. x [1, T, H]. shares [1, T, E]. products: of each
    expert gate, up and down. biases: of them, in their order; none where they have none. gated: attributes of the
    operator that say what down reads. total: the node that computes the mixture's output."""

    x: ir.Value
    shares: ir.Value
    products: tuple[tuple[ir.Node, ir.Node, ir.Node], ...]
    biases: tuple[ir.Value, ...]
    gated: dict[str, Any]
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
            grids = np.array([grid_of(node) for node in weights], np.int64)
            grid = insert(last, "Constant", [], value=ir.tensor(grids))
            stored = [part for node in weights for part in stored_weight(node)]
            sizes = {"H": weights[0].attributes.get_int("K"), "I": weights[0].attributes.get_int("N")}
            inputs = [routed.x, routed.shares, added, grid, *stored, *routed.biases]
            settings = {**sizes, **routed.gated, "biases": int(bool(routed.biases))}
            changed[str(out.name)] = "one step"
            replace(last, insert(last, EXPERTS, inputs, DOMAIN, **settings))
        return changed


def _routed(outs: ir.Node) -> Routed | None:
    """outs: a Concat, maybe of what experts compute for their rows."""
    products, biases, gates, parts = [], [], list[dict[str, Any]](), []
    for out in outs.inputs:
        down = _native_product(out)
        found = None if down is None else _gate_before(down[0])
        if down is None or found is None:
            return None
        gate, up = _native_product(found[0]), _native_product(found[2])
        if gate is None or up is None or gate[0].inputs[0] is not up[0].inputs[0] or gate[0].inputs[0] is None:
            return None
        products.append((gate[0], up[0], down[0]))
        biases += [gate[1], up[1], down[1]]
        gates.append(found[1])
        parts.append(gate[0].inputs[0])
    given = tuple(bias for bias in biases if bias is not None)
    if len(given) not in (0, len(biases)):
        return None
    split = made_by(parts[0], "Split") if parts else None
    if split is None or tuple(split.outputs) != tuple(parts) or any(each != gates[0] for each in gates):
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
    return Routed(x, shares, tuple(products), given, gates[0], total)


def _native_product(value: ir.Value | None) -> tuple[ir.Node, ir.Value | None] | None:
    """The product that made a value, and its bias or None, if the operator computes it and its weight has zero levels;
    else None."""
    node = made_by(value, "MatMulNBits")
    add = made_by(value, "Add")
    if node is None and add is not None:
        node = next((each for each in (made_by(term, "MatMulNBits") for term in add.inputs) if each is not None), None)
    if node is None or not is_native(node) or len(stored_weight(node)) != 3:
        return None
    bias, last = bias_after(node)
    return (node, bias) if last.outputs[0] is value else None


def _gate_before(down: ir.Node) -> tuple[ir.Value, dict[str, Any], ir.Value] | None:
    """What becomes the input of a product: gate, attributes that say how it is activated, and the values that it is
    multiplied by."""
    plain = gate_before(down)
    return _bounded(down) if plain is None else (plain[0], {"activation": plain[1]}, plain[2])


def _bounded(down: ir.Node) -> tuple[ir.Value, dict[str, Any], ir.Value] | None:
    """As `_gate_before`, of (up + 1) * (gate * sigmoid(gate * alpha)) with both bounded (gpt-oss)."""
    product = made_by(down.inputs[0], "Mul")
    more, active = (None, None) if product is None else (made_by(product.inputs[0], "Add"), product.inputs[1])
    swish = made_by(active, "Mul")
    if more is None or swish is None:
        return None
    up, gate = made_by(more.inputs[0], "Clip"), made_by(swish.inputs[0], "Clip")
    grown = made_by(made_of(swish.inputs[1], "Sigmoid"), "Mul")
    if up is None or gate is None or grown is None or grown.inputs[0] is not gate.outputs[0]:
        return None
    one, alpha = number_of(more.inputs[1]), number_of(grown.inputs[1])
    bounds = [number_of(value) for value in (*gate.inputs[1:], *up.inputs[1:])]
    if one != 1.0 or alpha is None or bounds[-1] is None or bounds != [None, bounds[-1], -bounds[-1], bounds[-1]]:
        return None
    assert gate.inputs[0] is not None and up.inputs[0] is not None
    return gate.inputs[0], {"activation": BOUNDED, "alpha": alpha, "limit": bounds[-1]}, up.inputs[0]


def _squeezed(node: ir.Node) -> ir.Node | None:
    """The Squeeze after a sum over what a node computes."""
    while len(readers := list(node.outputs[0].uses())) == 1:
        node = readers[0].node
        if node.op_type == "Squeeze":
            return node
        if node.op_type not in ("Split", "Add"):
            return None
    return None
