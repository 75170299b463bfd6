"""What a native graph needs for the same bits on every processor. Native operators have them. Of a Llama's row ONNX
Runtime would compute the cosines and sines of rotations alone, and rounds some otherwise on ARM64 than on x86-64."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from eagle_export.recipes.graph import Pass, insert_all, only_reader, replace
from eagle_export.recipes.native_steps import DOMAIN, SINCOS

ONNX = "ai.onnx"  # the name of the domain ""
# Operators that move or choose numbers, or compute each with one operation that IEEE 754 rounds.
SAME = frozenset(
    ("Add", "Cast", "Clip", "Concat", "Constant", "Div", "Equal", "Expand", "Floor", "Gather", "GatherBlockQuantized")
    + ("GatherElements", "Identity", "Mul", "Neg", "Range", "Relu", "Reshape", "Shape", "Slice", "Split", "Squeeze")
    + ("Sub", "TopK", "Transpose", "Unsqueeze", "Where")
)

Pair = tuple[ir.Node, ir.Node]


def depends_on_processor(native: ir.Model) -> set[str]:
    """Returns the names, with their domains, of operators whose results may differ in the last bit between processors,
    such as "ai.onnx.Tanh"."""
    others = [node for node in native.graph if node.domain != DOMAIN and node.op_type not in SAME]
    return {f"{node.domain or ONNX}.{node.op_type}" for node in others}


@dataclass(frozen=True, slots=True)
class NativeRotations(Pass[Pair]):
    """Replaces cosines and sines of the same angles, and a number that multiplies both (YaRN), by ExactSinCos."""

    name = "native rotations"

    def pattern(self, model: ir.Model) -> list[Pair]:
        return [
            (node, sine) for node in model.graph if node.op_type == "Cos" and (sine := _sine_beside(node)) is not None
        ]

    def rewrite(self, model: ir.Model, matches: list[Pair]) -> dict[str, str]:
        changed = {}
        for pair in matches:
            changed[str(pair[0].outputs[0].name)] = "with its sine one operator"
            (multiplied, factor), (other, same) = map(_factor_after, pair)
            ends, attributes = ((multiplied, other), {"factor": factor}) if factor == same else (pair, {})
            for node, value in zip(
                ends, insert_all(pair[0], SINCOS, pair[0].inputs, 2, DOMAIN, **attributes), strict=True
            ):
                replace(node, value)
        model.opset_imports[DOMAIN] = 1
        return changed


def _sine_beside(cosine: ir.Node) -> ir.Node | None:
    (angles,) = cosine.inputs
    if angles is None or cosine.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    return next((use.node for use in angles.uses() if use.node.op_type == "Sin"), None)


def _factor_after(node: ir.Node) -> tuple[ir.Node, float]:
    """The node that alone reads an output and multiplies it by a number, and this; else the node itself, and 1."""
    reader = only_reader(node.outputs[0], "Mul")
    if reader is None:
        return node, 1.0
    other = next(value for value in reader.inputs if value is not node.outputs[0])
    tensor = None if other is None else ir.convenience.get_const_tensor(other)
    return (reader, float(tensor.numpy().reshape(-1)[0])) if tensor is not None and tensor.size == 1 else (node, 1.0)
