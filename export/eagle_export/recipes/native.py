"""The native form of a quantised target for CPUs: the same weights and inputs and outputs, with the operators of
eagle-edge-kernels in the place of exact attention and of MatMulNBits.

A row of an operator's output depends on that row alone (kernels/src), so no number of rows needs padding. Of the 65
nodes per layer of the portable form five are left, which become steps of one node (native_steps.py). Both forms are
written into a bundle over one file of weights; the runtime takes the native one where the operators are installed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from eagle_export.base.errors import ExportError
from eagle_export.recipes.attention import (
    AttentionPass,
    ExactAttention,
    Part,
    attention_nodes,
    graph_input,
    head_major,
    part_of,
)
from eagle_export.recipes.convolutions import Convolutions, convolution_nodes, convolution_of
from eagle_export.recipes.delta_nets import DeltaNets, delta_nodes, delta_parts, finish
from eagle_export.recipes.graph import (
    Pass,
    insert,
    insert_all,
    made_by,
    made_of,
    number_of,
    only_reader,
    replace,
    take_place,
)
from eagle_export.recipes.int8_cache import Int8Cache
from eagle_export.recipes.multipliers import Multipliers
from eagle_export.recipes.native_experts import NativeExperts
from eagle_export.recipes.native_products import LANES, JoinedSteps, NativeProducts, attributes_of, sum_after
from eagle_export.recipes.native_steps import CONVOLUTION, DELTA, DOMAIN, KINDS, SCAN, JoinedRuns
from eagle_export.recipes.plan import Passes, apply
from eagle_export.recipes.same_bits import NativeRotations
from eagle_runtime.bundle.graph import SCALE

ANGLES, SINKS = 7, 9  # places of the operator's inputs
Rotation = tuple[ir.Value, ir.Value, ir.Value]  # of _rotation
HEADS_FIRST = [0, 2, 1, 3]  # permutation between [1, T, heads, width] and [1, heads, T, width]


def both_forms(passes: Passes, model: ir.Model) -> tuple[dict[str, str], ir.Model | None]:
    """Runs a target's passes over its graph, in place, and makes the native form of it. Returns what `apply` does, and
    the native form; None where it has none."""
    exact = tuple(step for step in passes if isinstance(step, (ExactAttention, Int8Cache)))
    if not exact:
        return apply(passes, model) | Convolutions(in_heads=False).apply(model) | DeltaNets().apply(model), None
    done = Multipliers().apply(model)
    done |= apply(tuple(step for step in passes if step not in exact), model)
    attention = NativeAttention(in_bytes=isinstance(exact[0], Int8Cache))
    native = model.clone() if attention.fits(model) else None
    done |= apply(exact, model) | Convolutions(in_heads=True).apply(model) | DeltaNets().apply(model)
    if native is not None:
        products = NativeExperts(), NativeProducts(), JoinedSteps()
        for step in (
            NormsOfRows(),
            attention,
            NativeConvolutions(),
            NativeDeltaNets(),
            *products,
            NativeNorms(),
            NativeRotations(),
            JoinedRuns(),
        ):
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
            and (before := made_by(node.inputs[0], "Transpose")) is not None
            and list(before.attributes["perm"].as_ints()) == HEADS_FIRST
        ]

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        for node in matches:
            out, rows = node.outputs[0], made_of(node.inputs[0], "Transpose")
            assert rows is not None
            normed = insert(node, "RMSNormalization", [rows, *node.inputs[1:]], **attributes_of(node))
            normed.shape, normed.type = rows.shape, out.type
            changed[str(out.name)] = "before the transposition"
            replace(node, insert(node, "Transpose", [normed], perm=HEADS_FIRST))
        return changed


@dataclass(frozen=True, slots=True)
class NativeAttention(AttentionPass):
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

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        for node in matches:
            part = part_of(model, node)
            changed[str(node.outputs[0].name)] = "one operator"
            new = attend(model, node, part)
            head_major(part.past, part.kv_heads, part.width)
            for past in part.past:
                past.type = ir.TensorType(ir.DataType.FLOAT16)
            if self.in_bytes:
                _rows_of_bytes(part, new)
        graph_input(model, "tree_mask").shape = ir.Shape([1, 1, "T", "T"])
        model.opset_imports[DOMAIN] = 1
        return changed


@dataclass(frozen=True, slots=True)
class NativeConvolutions(Pass[ir.Node]):
    """Replaces every short convolution by the operator, whose past is as that of NativeAttention, in fp16."""

    name = "native convolutions"

    def pattern(self, model: ir.Model) -> list[ir.Node]:
        return convolution_nodes(model)

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        ids, mask = graph_input(model, "position_ids"), graph_input(model, "tree_mask")
        for node in matches:
            part = convolution_of(node)
            head_major(part.past, part.heads, part.width)
            for past in part.past:
                past.type = ir.TensorType(ir.DataType.FLOAT16)
            inputs = [part.inputs, *part.past, ids, mask, part.weight, *([] if part.bias is None else [part.bias])]
            new = insert_all(node, CONVOLUTION, inputs, 3, DOMAIN, kv_heads=part.heads, width=part.width)
            for old, made in zip(node.outputs, new, strict=True):
                take_place(old, made)
            model.graph.remove(node, safe=True)
            changed[str(new[0].name)] = "one operator"
        return changed


@dataclass(frozen=True, slots=True)
class NativeDeltaNets(Pass[ir.Node]):
    """Replaces every gated delta net and state space by the operator, whose states are in fp32."""

    name = "native delta nets"

    def pattern(self, model: ir.Model) -> list[ir.Node]:
        return delta_nodes(model)

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        ids, mask = graph_input(model, "position_ids"), graph_input(model, "tree_mask")
        for node, part in zip(matches, delta_parts(model, matches), strict=True):
            changed[str(node.outputs[0].name)] = "one operator"
            inputs = [part.qkv, *part.gates, *part.past, ids, mask, *part.stored]
            inputs, kind = (inputs, DELTA) if part.skip is None else ([*inputs, part.skip], SCAN)
            finish(model, node, part, insert_all(node, kind, inputs, 3, DOMAIN, **attributes_of(node)))
        return changed


def _rows_of_bytes(part: Part, new: Sequence[ir.Value]) -> None:
    """new: the outputs with new keys and values."""
    head: list[str | int] = ["C", part.width + SCALE]
    for past, rows, shape in zip(part.past, new, (head, [1, *head]), strict=True):
        past.shape, past.type = ir.Shape([part.kv_heads, *shape]), ir.TensorType(ir.DataType.UINT8)
        rows.shape = ir.Shape([1, "T", part.kv_heads, part.width // SCALE + 1])


def attend(model: ir.Model, node: ir.Node, part: Part, wanted: ir.Value | None = None) -> list[ir.Value]:
    """Puts the operator in the place of an Attention node. wanted: numbers [R] of the rows whose output the node
    computes, of as many queries as new keys; None for all. Returns its outputs with new keys and values; none where it
    reads the cache of a layer before it."""
    op = partial(insert, node)
    scale = node.attributes.get_float("scale", part.width**-0.5)
    q, factor = _without_factor(part.q)
    rotated = _rotation(q)
    first = next((use.node for use in part.past[0].uses() if use.node.op_type == "ExactTreeAttention"), None)
    if first is None:
        k, v, *angles = _new_rows(part, rotated)
    else:  # the same rows are computed, and put into the cache, once more
        k, v, angles = first.inputs[1], first.inputs[2], [each for each in first.inputs[ANGLES:SINKS] if each]
    if angles and rotated is not None and list(rotated[1:]) == angles:
        q = _flat(rotated[0])
    elif angles:
        raise ExportError(f"attention {node.name} rotates queries otherwise than keys; report this as a bug")
    elif (unturned := _of_heads(q)) is not None:
        q = _flat(unturned)
    else:
        q = op("Transpose", [q], perm=HEADS_FIRST)
    attributes = {"heads": part.heads, "kv_heads": part.kv_heads, "width": part.width, "scale": scale * factor}
    attributes |= {"window": part.window or 0, "softcap": part.cap or 0.0}
    ids, mask = graph_input(model, "position_ids"), graph_input(model, "tree_mask")
    inputs: list[ir.Value | None] = [q, k, v, *part.past, ids, mask, *angles]
    if part.sinks is not None:
        inputs += [*[None] * (SINKS - len(inputs)), part.sinks]
    out, *rows = insert_all(node, "ExactTreeAttention", inputs, 3, DOMAIN, **attributes)
    rows = rows if first is None else []
    for old, new in zip(part.new[: len(rows)], rows, strict=True):
        name, new.shape, new.type = old.name, old.shape, old.type
        model.graph.outputs[list(model.graph.outputs).index(old)] = new  # what else reads them, as features, still does
        old.name, new.name = f"{name}.computed", name
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


def _new_rows(part: Part, rotated: Rotation | None) -> list[ir.Value | None]:
    """New keys and values, each [1, T, kv_heads * width], and the cosines and sines by which the operator rotates keys
    and queries; without the latter where these are rotated before."""
    new_keys, new_values = part.new
    turned = _rotation(made_of(new_keys, "Transpose"))
    if rotated is None or turned is None or rotated[1:] != turned[1:]:
        return [_flat(new_keys), _flat(new_values)]
    return [_flat(turned[0]), _flat(new_values), *turned[1:]]


def _flat(rows: ir.Value) -> ir.Value:
    """[1, T, heads * width] of which [1, T, heads, width] are made; the latter where there is none."""
    before = made_of(rows, "Reshape")
    return before if before is not None and before.shape is not None and len(before.shape) == 3 else rows


def _without_factor(q: ir.Value) -> tuple[ir.Value, float]:
    """Queries before they are multiplied by a constant, and the constant; else as they are, and 1."""
    node = made_by(q, "Mul")
    value, factor = (None, None) if node is None else (node.inputs[0], number_of(node.inputs[1]))
    return (q, 1.0) if value is None or factor is None else (value, factor)


def _rotation(value: ir.Value | None) -> Rotation | None:
    """Rows [1, T, heads, width] whose parts are rotated into `value` [1, heads, T, width], and cosines and sines of as
    many numbers of a head as are rotated, the first ones; None if that is not how it is computed."""
    node = made_by(value, "RotaryEmbedding")
    if node is None or node.attributes.get_int("interleaved", 0) != 0:
        return None
    x, cosine, sine = node.inputs[:3]
    if (rows := _of_heads(x)) is None:
        return None
    assert cosine is not None and sine is not None
    half = cosine.shape[2] if cosine.shape is not None and len(cosine.shape) == 3 else None
    return (rows, cosine, sine) if isinstance(half, int) and half % LANES == 0 else None


def _of_heads(value: ir.Value | None) -> ir.Value | None:
    """Rows [1, T, heads, width] of which [1, heads, T, width] are made; None if they are not."""
    before = made_by(value, "Transpose")
    return None if before is None or list(before.attributes["perm"].as_ints()) != HEADS_FIRST else before.inputs[0]


def _merged(node: ir.Node) -> ir.Node | None:
    """The node that makes [1, T, heads * width] of an Attention node's output, if nothing else reads that."""
    for op in ("Transpose", "Reshape"):
        if (reader := only_reader(node.outputs[0], op)) is None:
            return None
        node = reader
    shape = node.outputs[0].shape
    return node if shape is not None and len(shape) == 3 else None


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
                rows, factors = _norm_of_native(node), node.inputs[1]
                assert rows is not None and factors is not None
                last, added = sum_after(node) or (_joined_heads(node) or node, None)
                epsilon = node.attributes.get_float("epsilon", 1e-5)
                inputs = [rows, factors, *([] if added is None else [added])]
                normed = insert(last, "RowExactNorm", inputs, DOMAIN, epsilon=epsilon)
                replace(last, normed)
                normed.shape = rows.shape
            matches = self.pattern(model)
        return changed


def _joined_heads(node: ir.Node) -> ir.Node | None:
    """The node that makes rows [1, T, heads * width] of what a norm of heads makes, if nothing else reads that."""
    reader = only_reader(node.outputs[0], "Reshape")
    shape = None if reader is None else reader.outputs[0].shape
    return reader if shape is not None and len(shape) == 3 else None


def _norm_of_native(node: ir.Node) -> ir.Value | None:
    """Rows [1, T, W] that native operators make, or whose norms they read, and RowExactNorm can read, of a norm over
    them or over the width of heads that only attention reads, or that are joined; else None."""
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
        before_attention = all(use.node.op_type == "ExactTreeAttention" for use in node.outputs[0].uses())
        if not before_attention and _joined_heads(node) is None:
            return None
    readers = [use.node for use in node.outputs[0].uses()]  # all that rows of an embedding have of native operators
    native = _is_native(rows.producer()) or (bool(readers) and all(map(_is_native, readers)))
    return rows if native and rows.shape is not None and len(rows.shape) == 3 else None


def _is_native(node: ir.Node | None) -> bool:
    return node is not None and node.domain == DOMAIN and node.op_type in KINDS
