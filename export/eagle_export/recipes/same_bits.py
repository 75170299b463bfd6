"""What a native graph needs for the same bits on every processor. Native operators have them. Of a Llama's row ONNX
Runtime would compute the cosines and sines of rotations alone, and rounds some otherwise on ARM64 than on x86-64."""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from eagle_export.recipes.graph import Pass, insert_all, multiplied_after, replace
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
            ends, factor = _with_factor(pair)
            outputs = insert_all(pair[0], SINCOS, pair[0].inputs, 2, DOMAIN, factor=factor)
            for node, value in zip(ends, outputs, strict=True):
                replace(node, value)
        return changed


def _sine_beside(cosine: ir.Node) -> ir.Node | None:
    (angles,) = cosine.inputs
    if angles is None or cosine.outputs[0].dtype != ir.DataType.FLOAT:
        return None
    return next((use.node for use in angles.uses() if use.node.op_type == "Sin"), None)


def _with_factor(pair: Pair) -> tuple[Pair, float]:
    """The nodes that multiply a cosine and a sine by the same number, and that number; else the pair itself, and 1."""
    cosine, sine = (multiplied_after(node.outputs[0]) for node in pair)
    if cosine is None or sine is None or cosine[1] != sine[1]:
        return pair, 1.0
    return (cosine[0], sine[0]), cosine[1]
