"""The native form of a quantised target for CPUs: the same weights and inputs and outputs, with the operators of
eagle-edge-kernels in the place of exact attention and of MatMulNBits.

A row of an operator's output depends on that row alone (kernels/src), so no number of rows needs padding. Of the 65
nodes per layer of the portable form five are left, which become steps of one node (native_steps.py). Both forms are
written into a bundle over one file of weights; the runtime takes the native one where the operators are installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from eagle_export.recipes.attention import ExactAttention, Part, attention_nodes, graph_input, head_major, part_of
from eagle_export.recipes.graph import Pass, insert, replace
from eagle_export.recipes.int8_cache import Int8Cache
from eagle_export.recipes.multipliers import Multipliers
from eagle_export.recipes.native_steps import DOMAIN as DOMAIN
from eagle_export.recipes.native_steps import KINDS, JoinedRuns
from eagle_export.recipes.plan import Passes, apply
from eagle_export.recipes.weight_blocks import INT8_COMPUTE
from eagle_runtime.bundle.graph import SCALE

LANES = 8  # a head's width, and a piece of its values, must be a multiple of it
JOINED = 3  # products of one input that one operator computes
NORM, BIAS = 3 * JOINED + 1, 3 * JOINED + 4  # places of the operator's inputs: norm, gated by, added; biases
SILU, GELU = 1, 2  # its activations
HEADS_FIRST = [0, 2, 1, 3]  # permutation between [1, T, heads, width] and [1, heads, T, width]


def both_forms(passes: Passes, model: ir.Model) -> tuple[dict[str, str], ir.Model | None]:
    """Runs a target's passes over its graph, in place, and makes the native form of it. Returns what `apply` does, and
    the native form; None where it has none."""
    exact = tuple(step for step in passes if isinstance(step, (ExactAttention, Int8Cache)))
    if not exact:
        return apply(passes, model), None
    done = Multipliers().apply(model)
    done |= apply(tuple(step for step in passes if step not in exact), model)
    attention = NativeAttention(in_bytes=isinstance(exact[0], Int8Cache))
    native = model.clone() if attention.fits(model) else None
    done |= apply(exact, model)
    if native is not None:
        for step in (NormsOfRows(), attention, NativeProducts(), JoinedSteps(), NativeNorms(), JoinedRuns()):
            step.apply(native)
        RemoveUnusedNodesPass()(native)
    return done, native


@dataclass(frozen=True, slots=True)
class NormsOfRows(Pass[ir.Node]):
    """Lets norms of heads read rows [1, T, heads, width] and not what is transposed from these, as Gemma-3 has it: a
    norm over the width is the same on either side, and the rotation after it becomes a part of attention."""

    name = "norms of rows"

    def pattern(self, model: ir.Model) -> list[ir.Node]:
        return [
            node
            for node in model.graph
            if node.op_type == "RMSNormalization"
            and node.attributes.get_int("axis", -1) in (-1, 3)
            and (before := None if node.inputs[0] is None else node.inputs[0].producer()) is not None
            and before.op_type == "Transpose"
            and list(before.attributes["perm"].as_ints()) == HEADS_FIRST
        ]

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        for node in matches:
            out, rows = node.outputs[0], _producer_input(node.inputs[0], "Transpose")
            assert rows is not None
            normed = insert(node, "RMSNormalization", [rows, *node.inputs[1:]], **_attributes(node))
            normed.shape, normed.type = rows.shape, out.type
            changed[str(out.name)] = "before the transposition"
            replace(node, insert(node, "Transpose", [normed], perm=HEADS_FIRST))
        return changed


def _attributes(node: ir.Node) -> dict[str, Any]:
    return {name: attribute.value for name, attribute in node.attributes.items()}


@dataclass(frozen=True, slots=True)
class NativeAttention(Pass[ir.Node]):
    """Replaces every Attention node, with the rotation and the layout of heads before it, by ExactTreeAttention. The
    past and tree_mask get the shapes that ExactAttention gives them; the past is in fp16, or in_bytes in rows of bytes
    (eagle_runtime.bundle.graph). Raises ExportError as that does."""

    in_bytes: bool = False
    name = "native attention"

    def fits(self, model: ir.Model) -> bool:
        """Whether the operator has what all nodes need."""
        parts = [part_of(model, node) for node in attention_nodes(model)]
        if self.in_bytes:
            return all(part.width % (2 * LANES) == 0 for part in parts)
        return all(part.width % LANES == 0 and part.cut % LANES == 0 for part in parts)

    def pattern(self, model: ir.Model) -> list[ir.Node]:
        return attention_nodes(model)

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        for node in matches:
            part = part_of(model, node)
            changed[str(node.outputs[0].name)] = "one operator"
            new = attend(model, node, part)
            head_major(part)
            for past in part.past:
                past.type = ir.TensorType(ir.DataType.FLOAT16)
            if self.in_bytes:
                _rows_of_bytes(part, new)
        graph_input(model, "tree_mask").shape = ir.Shape([1, 1, "T", "T"])
        model.opset_imports[DOMAIN] = 1
        return changed


def _rows_of_bytes(part: Part, new: Sequence[ir.Value]) -> None:
    """new: the outputs with new keys and values."""
    head: list[str | int] = ["C", part.width + SCALE]
    for past, rows, shape in zip(part.past, new, (head, [1, *head]), strict=True):
        past.shape, past.type = ir.Shape([part.kv_heads, *shape]), ir.TensorType(ir.DataType.UINT8)
        rows.shape = ir.Shape([1, "T", part.kv_heads, part.width // SCALE + 1])


def attend(model: ir.Model, node: ir.Node, part: Part, wanted: ir.Value | None = None) -> list[ir.Value]:
    """Puts the operator in the place of an Attention node. wanted: numbers [R] of the rows whose output the node
    computes, of as many queries as new keys; None for all. Returns its outputs with new keys and values."""
    op = partial(insert, node)
    scale = node.attributes.get_float("scale", part.width**-0.5)
    q, factor = _without_factor(part.q)
    new_keys, new_values = part.new
    rotated, turned = _rotation(q), _rotation(_producer_input(new_keys, "Transpose"))
    if rotated is not None and turned is not None and rotated[1:] == turned[1:]:
        q, k, angles = _flat(rotated[0]), _flat(turned[0]), list(rotated[1:])
    else:
        q, k, angles = op("Transpose", [q], perm=HEADS_FIRST), _flat(new_keys), []
    attributes = {"heads": part.heads, "kv_heads": part.kv_heads, "width": part.width, "scale": scale * factor}
    attributes |= {"window": part.window or 0, "softcap": part.cap or 0.0}
    inputs = [q, k, _flat(new_values), *part.past, graph_input(model, "position_ids"), graph_input(model, "tree_mask")]
    attention = ir.node("ExactTreeAttention", [*inputs, *angles], attributes, domain=DOMAIN, num_outputs=3)
    assert isinstance(node.graph, ir.Graph)
    node.graph.insert_before(node, attention)
    out, *rows = attention.outputs
    for old, new in zip(part.new, rows, strict=True):
        name, new.shape, new.type = old.name, old.shape, old.type
        at = list(model.graph.outputs).index(old)
        ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
        for index, value in enumerate(attention.inputs):
            if value is new:
                attention.replace_input_with(index, old)
        old.name, new.name = f"{name}.computed", name
        assert model.graph.outputs[at] is new
    out.type = node.outputs[0].type
    if wanted is not None:
        out = op("Gather", [out, wanted], axis=1)
    merged = _merged(node)
    if merged is not None:
        replace(merged, out)
        return rows
    shape = ir.tensor(np.array([1, -1, part.heads, part.width], np.int64))
    split = op("Reshape", [out, op("Constant", [], value=shape)])
    replace(node, op("Transpose", [split], perm=HEADS_FIRST))
    return rows


def _flat(rows: ir.Value) -> ir.Value:
    """[1, T, heads * width] of which [1, T, heads, width] are made; the latter where there is none."""
    before = _producer_input(rows, "Reshape")
    return before if before is not None and before.shape is not None and len(before.shape) == 3 else rows


def _producer_input(value: ir.Value | None, op_type: str) -> ir.Value | None:
    """The first input of the node of a type that computes a value; None if another one does."""
    node = None if value is None else value.producer()
    return node.inputs[0] if node is not None and node.op_type == op_type else None


def _without_factor(q: ir.Value) -> tuple[ir.Value, float]:
    """Queries before they are multiplied by a constant, and the constant; else as they are, and 1."""
    node = q.producer()
    if node is None or node.op_type != "Mul" or node.inputs[1] is None or node.inputs[1].const_value is None:
        return q, 1.0
    factor = node.inputs[1].const_value.numpy()
    value = node.inputs[0]
    return (value, float(factor.reshape(-1)[0])) if factor.size == 1 and value is not None else (q, 1.0)


def _rotation(value: ir.Value | None) -> tuple[ir.Value, ir.Value, ir.Value] | None:
    """Rows [1, T, heads, width] whose parts are rotated into `value` [1, heads, T, width], and cosines and sines of as
    many numbers of a head as are rotated, the first ones; None if that is not how it is computed."""
    node = None if value is None else value.producer()
    if node is None or node.op_type != "RotaryEmbedding" or node.attributes.get_int("interleaved", 0) != 0:
        return None
    x, cosine, sine = node.inputs[:3]
    before = None if x is None else x.producer()
    if before is None or before.op_type != "Transpose" or list(before.attributes["perm"].as_ints()) != HEADS_FIRST:
        return None
    (rows,) = before.inputs
    assert rows is not None and cosine is not None and sine is not None
    half = cosine.shape[2] if cosine.shape is not None and len(cosine.shape) == 3 else None
    return (rows, cosine, sine) if isinstance(half, int) and half % LANES == 0 else None


def _merged(node: ir.Node) -> ir.Node | None:
    """The node that makes [1, T, heads * width] of an Attention node's output, if nothing else reads that."""
    for op_type in ("Transpose", "Reshape"):
        uses = list(node.outputs[0].uses())
        if len(uses) != 1 or uses[0].node.op_type != op_type:
            return None
        node = uses[0].node
    shape = node.outputs[0].shape
    return node if shape is not None and len(shape) == 3 else None


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
                    level, step, *zero = part.node.inputs[1:4]
                    inputs += [level, _producer_input(step, "Cast") or step, zero[0] if zero else None]
                    for mine, theirs in (("bits", "bits"), ("block", "block_size")):
                        attributes[f"{mine}_{index}"] = part.node.attributes.get_int(theirs)
                    attributes[f"N_{index}"] = part.count
                    if part.first:
                        attributes[f"first_{index}"] = part.first
                biases = [part.bias for part in group]
                if any(bias is not None for bias in biases):
                    inputs += [*[None] * (BIAS - len(inputs)), *biases]
                joined = ir.node("RowExactMatMul", inputs, attributes, domain=DOMAIN, num_outputs=len(group))
                assert isinstance(first.graph, ir.Graph)
                first.graph.insert_before(first, joined)
                for part, out in zip(group, joined.outputs, strict=True):
                    changed[str(part.node.inputs[1].name)] = "rows exact to the bit"  # type: ignore[union-attr]
                    replace(part.last, out)
        model.opset_imports[DOMAIN] = 1
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
    bias, last = _bias_after(node)
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
        part.shape, part.type, name = out.shape, out.type, out.name
        ir.convenience.replace_all_uses_with(out, part, replace_graph_outputs=True)
        out.name, part.name = None, name
        producer = part.producer()
        assert producer is not None
        made.append(producer)
        first += width
    split.graph.remove(split, safe=True)
    return made


def _bias_after(node: ir.Node) -> tuple[ir.Value | None, ir.Node]:
    """The constant that is added to each row of a product, and the node that adds it; None and the product's node where
    nothing else is done first."""
    add, bias = _added_after(node) or (node, None)
    fits = bias is not None and bias.is_initializer() and bias.dtype == ir.DataType.FLOAT and bias.shape is not None
    if not fits or bias is None or list(bias.shape or ()) != [node.attributes.get_int("N")]:
        return None, node
    return bias, add


def is_native(node: ir.Node) -> bool:
    """Whether a MatMulNBits is one that RowExactMatMul computes."""
    level, step, *zero = node.inputs[1:]
    stored = [level, _producer_input(step, "Cast") or step, *[value for value in zero if value is not None]]
    plain = len(zero) <= 1 and all(value is not None and value.is_initializer() for value in stored)
    half = plain and stored[1] is not None and stored[1].dtype == ir.DataType.FLOAT16
    return half and node.attributes.get_int("accuracy_level", 0) == INT8_COMPUTE


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
            changed |= self._join(matches)
            RemoveUnusedNodesPass()(model)  # else they count as users of what was joined
            matches = self.pattern(model)
        return changed

    def _join(self, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        for node in matches:
            inputs = [*node.inputs[:NORM], *[None] * (NORM - len(node.inputs))]
            attributes = _attributes(node)
            if (norm := _norm_before(node)) is not None:
                inputs[0], extra = norm.inputs[0], [norm.inputs[1], None]
                attributes["epsilon"] = norm.attributes.get_float("epsilon", 1e-5)
            elif (gate := _gate_before(node)) is not None:
                inputs[0], activation, up = gate
                attributes["activation"], extra = activation, [None, up]
            else:
                extra = [None, None]
            last, added = _sum_after(node) or (node, None)
            if added is not None:
                extra.append(added)
            if biases := node.inputs[BIAS:]:
                extra += [*[None] * (BIAS - NORM - len(extra)), *biases]
            joined = ir.node(node.op_type, [*inputs, *extra], attributes, domain=DOMAIN, num_outputs=len(node.outputs))
            assert isinstance(last.graph, ir.Graph)
            last.graph.insert_before(last, joined)
            for old, new in zip(last.outputs, joined.outputs, strict=True):
                new.shape, new.type, name = old.shape, old.type, old.name
                ir.convenience.replace_all_uses_with(old, new, replace_graph_outputs=True)
                old.name, new.name = f"{name}.apart", name
            changed[str(joined.outputs[0].name)] = "with what surrounds it"
        return changed


@dataclass(frozen=True, slots=True)
class NativeNorms(Pass[ir.Node]):
    """Replaces norms of what native operators make, of heads before attention and of rows after a product, by
    RowExactNorm, with the sum after one: so a layer stays one run of native operators."""

    name = "native norms"

    def pattern(self, model: ir.Model) -> list[ir.Node]:
        return [
            node for node in model.graph if node.op_type == "RMSNormalization" and _norm_of_native(node) is not None
        ]

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed: dict[str, str] = {}
        while matches:  # a norm of what a norm made is one of native operators now
            changed |= {str(node.outputs[0].name): "one operator" for node in matches}
            for node in matches:
                self._replace(node)
            matches = self.pattern(model)
        return changed

    def _replace(self, node: ir.Node) -> None:
        rows, factors = _norm_of_native(node), node.inputs[1]
        assert rows is not None and factors is not None
        last, added = _sum_after(node) or (node, None)
        epsilon = node.attributes.get_float("epsilon", 1e-5)
        inputs = [rows, factors, *([] if added is None else [added])]
        normed = insert(last, "RowExactNorm", inputs, DOMAIN, epsilon=epsilon)
        replace(last, normed)
        normed.shape = rows.shape


def _norm_of_native(node: ir.Node) -> ir.Value | None:
    """Rows [1, T, W] that native operators make and RowExactNorm can read, of a norm over them or over the width of
    heads that only attention reads; else None."""
    rows, factors = node.inputs[0], node.inputs[1]
    if rows is None or factors is None or rows.shape is None or not factors.is_initializer() or factors.shape is None:
        return None
    width = factors.shape[-1] if len(factors.shape) == 1 else None
    if factors.dtype != ir.DataType.FLOAT or not isinstance(width, int) or width % LANES:
        return None
    if node.attributes.get_int("axis", -1) not in (-1, len(rows.shape) - 1):
        return None
    if len(rows.shape) == 4:
        rows = _flat(rows)
        if not all(use.node.op_type == "ExactTreeAttention" for use in node.outputs[0].uses()):
            return None
    made = rows.producer()
    native = made is not None and made.domain == DOMAIN and made.op_type in KINDS
    return rows if native and rows.shape is not None and len(rows.shape) == 3 else None


def _joinable(node: ir.Node) -> bool:
    alone = not any(value is not None for value in node.inputs[NORM:BIAS])
    before = node.attributes.get_int("K") % LANES == 0 and alone
    return before and (_norm_before(node) or _gate_before(node) or _sum_after(node)) is not None


def _only_used_by(value: ir.Value | None, node: ir.Node) -> bool:
    return value is not None and not value.is_graph_output() and all(use.node is node for use in value.uses())


def _norm_before(node: ir.Node) -> ir.Node | None:
    """The norm of a row of inputs, if nothing else reads it."""
    x = node.inputs[0]
    norm = None if x is None else x.producer()
    if norm is None or norm.op_type != "RMSNormalization" or not _only_used_by(x, node):
        return None
    factor = norm.inputs[1]
    plain = factor is not None and factor.is_initializer() and factor.dtype == ir.DataType.FLOAT
    last = norm.attributes.get_int("axis", -1) in (-1, 2)
    row = factor is not None and factor.shape is not None and len(factor.shape) == 1
    return norm if plain and last and row else None


def _gate_before(node: ir.Node) -> tuple[ir.Value, int, ir.Value] | None:
    """The gate, its activation and the values that it is multiplied by, if inputs are such products alone."""
    x = node.inputs[0]
    mul = None if x is None else x.producer()
    if mul is None or mul.op_type != "Mul" or not _only_used_by(x, node):
        return None
    first, second = mul.inputs
    return _gated(first, second, mul) or _gated(second, first, mul)


def _gated(active: ir.Value | None, up: ir.Value | None, mul: ir.Node) -> tuple[ir.Value, int, ir.Value] | None:
    made = None if active is None else active.producer()
    if made is None or up is None or up.is_initializer() or not made.inputs or not _only_used_by(active, mul):
        return None
    gate = made.inputs[0]
    if made.op_type == "Gelu" and made.attributes.get_string("approximate", "none") == "tanh" and gate is not None:
        return gate, GELU, up
    sigmoid = made.inputs[1].producer() if made.op_type == "Mul" and made.inputs[1] is not None else None
    if sigmoid is None or sigmoid.op_type != "Sigmoid" or sigmoid.inputs[0] is not gate or gate is None:
        return None
    return gate, SILU, up


def _sum_after(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The node that adds something of the same shape to the only product, and what it adds."""
    if (found := _added_after(node)) is None:
        return None
    out, (add, other) = node.outputs[0], found
    known = not other.is_initializer() and other.shape is not None and out.shape is not None
    return (add, other) if known and other.shape == out.shape and other.dtype == out.dtype else None


def _added_after(node: ir.Node) -> tuple[ir.Node, ir.Value] | None:
    """The node Add that alone reads the only output of a node, and what it adds."""
    out = node.outputs[0]
    uses = list(out.uses())
    if len(node.outputs) != 1 or len(uses) != 1 or out.is_graph_output() or uses[0].node.op_type != "Add":
        return None
    other = next((value for value in uses[0].node.inputs if value is not out), None)
    return None if other is None else (uses[0].node, other)
