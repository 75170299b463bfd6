"""The embedding in halves: exact for checkpoints of halves, and half the size of fp32 beside layers of one byte."""

from __future__ import annotations

import numpy as np
import onnx_ir as ir

from eagle_export.errors import ExportError
from eagle_export.recipes.graph import Array, insert, lazy_weight, replace


def embedding_fp16(model: ir.Model) -> dict[str, str]:
    """Store the table that input_ids look up in fp16. Returns its name -> what was done; raises ExportError when it is
    written if a value is beyond fp16."""
    changed = {}
    for node in list(model.graph):
        table, ids = (node.inputs[0], node.inputs[1]) if node.op_type == "Gather" else (None, None)
        if table is None or not table.is_initializer() or ids is None or ids.name != "input_ids":
            continue
        tensor, name = table.const_value, str(table.name)
        assert tensor is not None

        def read(tensor: ir.TensorProtocol = tensor, name: str = name) -> Array:
            with np.errstate(over="ignore"):
                halves = tensor.numpy().astype(np.float16)
            if not np.isfinite(halves).all():
                raise ExportError(f"{name} holds a value beyond the range of fp16; export in fp32")
            return halves

        halves = lazy_weight(model, f"{name}.fp16", ir.DataType.FLOAT16, tuple(tensor.shape.numpy()), read)
        rows = insert(node, "Gather", [halves, ids], axis=0)
        changed[name] = "fp16"
        replace(node, insert(node, "Cast", [rows], to=int(ir.DataType.FLOAT)))
    return changed
