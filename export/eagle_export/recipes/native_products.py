"""Products of a native graph: RowExactMatMul in the place of MatMulNBits, with what surrounds it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from eagle_export.recipes.as_stored import packed_levels
from eagle_export.recipes.graph import Pass, insert, insert_all, made_by, made_of, only_reader, replace, take_place
from eagle_export.recipes.native_steps import DOMAIN
from eagle_export.recipes.weight_blocks import INT8_COMPUTE

LANES = 8  # a head's width, and a piece of its values, must be a multiple of it
JOINED = 3  # products of one input that one operator computes
NORM, BIAS = 3 * JOINED + 1, 3 * JOINED + 4  # places of the operator's inputs: norm, gated by, added; biases
SILU, GELU, SIGMOID = 1, 2, 4  # its activations


@dataclass(frozen=True, slots=True)
class NativeProducts(Pass[ir.Node]):
    """Replaces MatMulNBits with activations in int8 by RowExactMatMul, up to JOINED products of one input by one. Of a
    product that is cut into parts, as that of q, k and v is in Phi-3, the parts are products of their own."""

    name = "native products"

    def pattern(self, model: ir.Model) -> list[ir.Node]:
        return [node for node in model.graph if node.op_type == "MatMulNBits" and is_native(node)]

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        groups: dict[ir.Value, list[list[_Columns]]] = {}
        for node in matches:
            assert node.inputs[0] is not None
            of_input, columns = groups.setdefault(node.inputs[0], [[]]), _columns(node)
            if len(of_input[-1]) + len(columns) > JOINED:
                of_input.append([])
            of_input[-1] += columns
        for parts in groups.values():
            for group in filter(None, parts):
                first = group[0].node
                inputs: list[ir.Value | None] = [first.inputs[0]]  # which may have been replaced meanwhile
                attributes = {"K": first.attributes.get_int("K")}
                for index, part in enumerate(group):
                    stored = stored_weight(part.node)
                    inputs += [*stored, *[None] * (3 - len(stored))]
                    attributes[f"bits_{index}"], attributes[f"block_{index}"] = grid_of(part.node)
                    attributes[f"N_{index}"] = part.count
                    if part.first:
                        attributes[f"first_{index}"] = part.first
                biases = [part.bias for part in group]
                if any(bias is not None for bias in biases):
                    inputs += [*[None] * (BIAS - len(inputs)), *biases]
                outs = insert_all(first, "RowExactMatMul", inputs, len(group), DOMAIN, **attributes)
                for part, out in zip(group, outs, strict=True):
                    changed[str(stored_weight(part.node)[0].name)] = "rows exact to the bit"  # type: ignore[union-attr]
                    replace(part.last, out)
        return changed


@dataclass(frozen=True, slots=True)
class _Columns:
    """Columns first .. first + count - 1 of a product. last: the node that computes them, with their bias."""

    node: ir.Node
    first: int
    count: int
    last: ir.Node
    bias: ir.Value | None = None


def _columns(node: ir.Node) -> list[_Columns]:
    """The parts into which a product is cut at once, where it is cut and they are few; else all its columns."""
    out, whole = node.outputs[0], node.attributes.get_int("N")
    uses = [use.node for use in out.uses()]
    if len(uses) == 1 and uses[0].op_type == "Split":
        uses = _as_slices(uses[0], out)
    parts = [] if out.is_graph_output() or len(uses) > JOINED else [_slice(use) for use in uses]
    if parts and all(part is not None for part in parts):
        ranges = [range(whole)[part] for part in parts if part is not None]
        return [_Columns(node, each.start, len(each), use) for each, use in zip(ranges, uses, strict=True)]
    bias, last = bias_after(node)
    return [_Columns(node, 0, whole, last, bias)]


def _slice(node: ir.Node) -> slice | None:
    """The columns that a node of the graph takes of rows [1, T, N]; None if it is another node."""
    if node.op_type != "Slice" or any(value is None for value in node.inputs):
        return None
    tensors = [ir.convenience.get_const_tensor(value) for value in node.inputs[1:] if value is not None]
    numbers = [None if tensor is None else tensor.numpy().tolist() for tensor in tensors]
    match numbers:
        case [[first], [end], [2 | -1]] | [[first], [end], [2 | -1], [1]] if first >= 0 and end > first:
            return slice(first, end)
    return None


def _as_slices(split: ir.Node, value: ir.Value) -> list[ir.Node]:
    """Puts a Slice in the place of each output of a Split of rows [1, T, N] along N. Returns these nodes; the Split
    alone where it is not one."""
    widths = [None if out.shape is None else out.shape[-1] for out in split.outputs]
    if split.attributes.get_int("axis", 0) not in (2, -1) or not all(isinstance(width, int) for width in widths):
        return [split]
    made, first = [], 0
    assert isinstance(split.graph, ir.Graph)
    for out, width in zip(split.outputs, widths, strict=True):
        assert isinstance(width, int)
        bounds = [
            insert(split, "Constant", [], value=ir.tensor(np.array([each], np.int64)))
            for each in (first, first + width, 2)
        ]
        part = insert(split, "Slice", [value, *bounds])
        take_place(out, part)
        producer = part.producer()
        assert producer is not None
        made.append(producer)
        first += width
    split.graph.remove(split, safe=True)
    return made


def bias_after(node: ir.Node) -> tuple[ir.Value | None, ir.Node]:
    """The constant that is first added to each row of a product, and the node that adds it; None and the product's."""
    add, bias = _added_after(node) or (node, None)
    fits = bias is not None and bias.is_initializer() and bias.dtype == ir.DataType.FLOAT and bias.shape is not None
    if not fits or bias is None or list(bias.shape or ()) != [node.attributes.get_int("N")]:
        return None, node
    return bias, add


def is_native(node: ir.Node) -> bool:
    """Whether a MatMulNBits is one that RowExactMatMul computes."""
    stored = stored_weight(node)
    plain = len(node.inputs) <= 4 and all(value is not None and value.is_initializer() for value in stored)
    half = plain and stored[1] is not None and stored[1].dtype == ir.DataType.FLOAT16
    return half and node.attributes.get_int("accuracy_level", 0) == INT8_COMPUTE


def stored_weight(node: ir.Node) -> list[ir.Value | None]:
    """Levels, steps and, where it has them, zero levels of a MatMulNBits."""
    level, step, *zero = node.inputs[1:]
    if (packed := packed_levels(level)) is not None:
        return [packed, made_of(made_of(step, "Mul"), "Cast"), made_of(zero[0], "Squeeze")]
    return [level, made_of(step, "Cast") or step, *[value for value in zero if value is not None]]


def grid_of(node: ir.Node) -> tuple[int, int]:
    """Bits and channels of a block of a MatMulNBits' weight as it is stored."""
    bits = 4 if packed_levels(node.inputs[1]) is not None else node.attributes.get_int("bits")
    return bits, node.attributes.get_int("block_size")


@dataclass(frozen=True, slots=True)
class JoinedSteps(Pass[ir.Node]):
    """Lets RowExactMatMul compute what surrounds a product too: the norm or the gated activation before it, and the sum
    with the residual stream after it. Each is a row's own, so rows stay exact, and every node less saves a call."""

    name = "joined steps"

    def pattern(self, model: ir.Model) -> list[ir.Node]:
        return [node for node in model.graph if node.op_type == "RowExactMatMul" and _joinable(node)]

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed: dict[str, str] = {}
        while matches:  # what was joined may leave another product as the only reader of its input
            for node in matches:
                inputs = [*node.inputs[:NORM], *[None] * (NORM - len(node.inputs))]
                attributes = attributes_of(node)
                if (norm := _norm_before(node)) is not None:
                    inputs[0], extra = norm.inputs[0], [norm.inputs[1], None]
                    attributes["epsilon"] = norm.attributes.get_float("epsilon", 1e-5)
                    if (gate := gate_before(norm)) is not None:
                        inputs[0], attributes["activation"], extra[1] = gate
                elif (gate := gate_before(node)) is not None:
                    inputs[0], activation, up = gate
                    attributes["activation"], extra = activation, [None, up]
                else:
                    extra = [None, None]
                last, added = sum_after(node) or (node, None)
                if added is not None:
                    extra.append(added)
                if biases := node.inputs[BIAS:]:
                    extra += [*[None] * (BIAS - NORM - len(extra)), *biases]
                outs = insert_all(last, node.op_type, [*inputs, *extra], len(node.outputs), DOMAIN, **attributes)
                for old, new in zip(last.outputs, outs, strict=True):
                    take_place(old, new)
                changed[str(outs[0].name)] = "with what surrounds it"
            RemoveUnusedNodesPass()(model)  # else they count as users of what was joined
            matches = self.pattern(model)
        return changed


def _joinable(node: ir.Node) -> bool:
    alone = not any(value is not None for value in node.inputs[NORM:BIAS])
    before = node.attributes.get_int("K") % LANES == 0 and alone
    return before and (_norm_before(node) or gate_before(node) or sum_after(node)) is not None


def only_used_by(value: ir.Value | None, node: ir.Node) -> bool:
    return value is not None and not value.is_graph_output() and all(use.node is node for use in value.uses())


def _norm_before(node: ir.Node) -> ir.Node | None:
    """The norm of a row of inputs, if nothing else reads it."""
    norm = made_by(node.inputs[0], "RMSNormalization")
    if norm is None or not only_used_by(node.inputs[0], node):
        return None
    factor = norm.inputs[1]
    plain = factor is not None and factor.is_initializer() and factor.dtype == ir.DataType.FLOAT
    last = norm.attributes.get_int("axis", -1) in (-1, 2)
    row = factor is not None and factor.shape is not None and len(factor.shape) == 1
    return norm if plain and last and row else None


def gate_before(node: ir.Node) -> tuple[ir.Value, int, ir.Value] | None:
    """The gate, its activation and the values that it is multiplied by, if inputs are such products alone."""
    mul = made_by(node.inputs[0], "Mul")
    if mul is None or not only_used_by(node.inputs[0], node):
        return None
    first, second = mul.inputs
    return _gated(first, second, mul) or _gated(second, first, mul)


def _gated(active: ir.Value | None, up: ir.Value | None, mul: ir.Node) -> tuple[ir.Value, int, ir.Value] | None:
    made = None if active is None else active.producer()
    if made is None or up is None or up.is_initializer() or not made.inputs or not only_used_by(active, mul):
        return None
    gate = made.inputs[0]
    if made.op_type == "Gelu" and made.attributes.get_string("approximate", "none") == "tanh" and gate is not None:
        return gate, GELU, up
    if made.op_type == "Sigmoid" and gate is not None and gate is not up:
        return gate, SIGMOID, up
    swish = made.op_type == "Mul" and gate is not None and made_of(made.inputs[1], "Sigmoid") is gate
    return (gate, SILU, up) if swish and gate is not None else None


def sum_after(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The node that adds something of the same shape to the only product, and what it adds."""
    if (found := _added_after(node)) is None:
        return None
    out, (add, other) = node.outputs[0], found
    known = not other.is_initializer() and other.shape is not None and out.shape is not None
    return (add, other) if known and other.shape == out.shape and other.dtype == out.dtype else None


def _added_after(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The node Add that alone reads the only output of a node, and what it adds."""
    out, add = node.outputs[0], only_reader(node.outputs[0], "Add")
    if len(node.outputs) != 1 or add is None or out.is_graph_output():
        return None
    other = next((value for value in add.inputs if value is not out), None)
    return None if other is None else (add, other)


def attributes_of(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}
