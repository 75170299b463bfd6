"""Attention whose output does not depend on which other rows share the pass.

A token verified in a tree and the same token decoded alone attend to the same keys, but at other columns and beside
other masked ones, so a sum in fp32 is rounded in another order and differs in its last bit. Behind an int8 layer such a
bit can turn one rounding and with it a near tie of two tokens. In fp64 the two sums agree to 1e-16, hence to the last
bit once rounded to fp32 (except for one value in 1e8): quantised decoding with and without drafts is equal, bit by bit.
"""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.graph import constant, insert, replace


def exact_attention(model: ir.Model) -> dict[str, str]:
    """Replace every Attention node by products and a softmax in fp64. Returns node name -> what was done."""
    changed = {}
    masks: dict[ir.Value, ir.Value] = {}
    for node in list(model.graph):
        if node.op_type != "Attention":
            continue
        q, k, v, mask = (value for value in node.inputs[:4] if value is not None)
        assert q.shape is not None and k.shape is not None
        heads, kv_heads, width = q.shape[1], k.shape[1], q.shape[3]
        assert isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(width, int)
        if mask not in masks:
            masks[mask] = insert(node, "Cast", [mask], to=int(ir.DataType.DOUBLE))

        def reshaped(value: ir.Value, *dims: int, before: ir.Node = node) -> ir.Value:
            name = "shape_" + "_".join(map(str, dims))
            return insert(before, "Reshape", [value, constant(model, name, np.array(dims, np.int64))])

        def double(value: ir.Value, before: ir.Node = node) -> ir.Value:
            return insert(before, "Cast", [value], to=int(ir.DataType.DOUBLE))

        # The query heads of one key head lie side by side: their rows become rows of one product.
        grouped = reshaped(double(q), 1, kv_heads, -1, width)
        keys = double(insert(node, "Transpose", [k], perm=[0, 1, 3, 2]))
        scores = reshaped(insert(node, "MatMul", [grouped, keys]), 1, heads, -1, 0)
        weights = insert(node, "Softmax", [insert(node, "Add", [scores, masks[mask]])], axis=-1)
        mixed = insert(node, "MatMul", [reshaped(weights, 1, kv_heads, -1, 0), double(v)])
        out = insert(node, "Cast", [reshaped(mixed, 1, heads, -1, width)], to=int(ir.DataType.FLOAT))
        changed[str(node.outputs[0].name)] = "fp64"
        replace(node, out)
    return changed
