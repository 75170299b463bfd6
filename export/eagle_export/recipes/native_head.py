"""The native form of a draft head for CPUs: as native.py makes a target's, with the operators in the place of attention
and of MatMulNBits. Its inputs, outputs and cache stay: rows in which heads alternate, of which the newest may belong to
a growing tree.

A head computes queries for the rows alone whose output is wanted. The operator takes as many queries as keys, so that
the other rows are dropped after it."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass

from eagle_export.recipes.attention import AttentionPass, Part, attention_nodes, part_of
from eagle_export.recipes.graph import made_of
from eagle_export.recipes.native import attend
from eagle_export.recipes.native_products import LANES, JoinedSteps, NativeProducts, is_native
from eagle_export.recipes.native_steps import DOMAIN, JoinedRuns
from eagle_export.recipes.same_bits import NativeRotations

# What may stand between the rows of a head's input and its queries.
OF_QUERIES = ("Mul", "RotaryEmbedding", "Transpose", "RMSNormalization", "Reshape", "Add", "MatMulNBits")


def native_head(model: ir.Model) -> ir.Model | None:
    """Returns the native form of a head's graph whose passes are done; None where it has none."""
    if not any(node.op_type == "MatMulNBits" and is_native(node) for node in model.graph):
        return None
    native = model.clone()
    steps = (NativeHeadAttention(), NativeProducts(), JoinedSteps(), NativeRotations(), JoinedRuns())
    for step in steps if all(_fits(native, node) for node in attention_nodes(native)) else steps[1:]:
        step.apply(native)
    RemoveUnusedNodesPass()(native)
    return native


def _fits(model: ir.Model, node: ir.Node) -> bool:
    """Whether the operator computes an attention node: it reads the cache, and each row sees all before it."""
    if made_of(made_of(node.inputs[1], "Transpose"), "Concat") not in model.graph.inputs:
        return False
    part = part_of(model, node)
    cached = all(past.shape is not None and len(past.shape) == 4 for past in part.past)
    return cached and part.window is None and part.width % LANES == 0 and part.q.dtype == ir.DataType.FLOAT


@dataclass(frozen=True, slots=True)
class NativeHeadAttention(AttentionPass):
    """Replaces a head's Attention nodes by ExactTreeAttention, for all rows. Past and tree_mask keep their shapes."""

    name = "native attention of a head"

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        for node in matches:
            changed[str(node.outputs[0].name)] = "one operator"
            part = part_of(model, node)
            attend(model, node, part, _of_all_rows(model, part))
        model.opset_imports[DOMAIN] = 1
        return changed


def _of_all_rows(model: ir.Model, part: Part) -> ir.Value | None:
    """Lets queries be computed for all rows. Returns the numbers of those that were wanted; None if all were."""
    value: ir.Value | None = part.q
    chosen = None
    while value is not None and (node := value.producer()) is not None and node.op_type in OF_QUERIES:
        for index, one in enumerate(node.inputs[1:], 1) if node.op_type == "RotaryEmbedding" else ():
            if one is not None and (before := one.producer()) is not None and _chooses_rows(before):
                node.replace_input_with(index, before.inputs[0])
        value = node.inputs[0]
        if value is not None and (before := value.producer()) is not None and _chooses_rows(before):
            chosen = before.inputs[1]
            node.replace_input_with(0, before.inputs[0])
            break
    if chosen is not None:
        _stretch(part.q)
    return chosen


def _chooses_rows(node: ir.Node) -> bool:
    return node.op_type == "Gather" and node.attributes.get_int("axis", 0) == 1


def _stretch(value: ir.Value | None) -> None:
    """Gives values between a head's input and its queries the number of rows of the pass."""
    while value is not None and (node := value.producer()) is not None and node.op_type in OF_QUERIES:
        assert value.shape is not None
        value.shape = ir.Shape(["T" if str(size) == "R" else size for size in value.shape])
        value = node.inputs[0]
