"""The embedding table in fp16: exact for checkpoints in fp16, and half of the size of fp32."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from eagle_export.errors import ExportError
from eagle_export.recipes.graph import Array, insert, lazy_weight, replace
from eagle_export.recipes.graph_pass import Pass


@dataclass(frozen=True, slots=True)
class EmbeddingFp16(Pass[ir.Node]):
    """Stores the table [V, H] that is indexed by input_ids in fp16. Writing it raises ExportError if a value is beyond
    the range of fp16."""

    name = "embedding fp16"

    def pattern(self, model: ir.Model) -> list[ir.Node]:
        return [node for node in model.graph if node.op_type == "Gather" and _is_embedding(*node.inputs[:2])]

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        for node in matches:
            table, ids = node.inputs[:2]
            assert table is not None and table.const_value is not None
            tensor, name = table.const_value, str(table.name)

            def read(tensor: ir.TensorProtocol = tensor, name: str = name) -> Array:
                with np.errstate(over="ignore"):
                    rounded = tensor.numpy().astype(np.float16)
                if not np.isfinite(rounded).all():
                    raise ExportError(f"{name} holds a value beyond the range of fp16; export in fp32")
                return rounded

            stored = lazy_weight(model, f"{name}.fp16", ir.DataType.FLOAT16, tuple(tensor.shape.numpy()), read)
            rows = insert(node, "Gather", [stored, ids], axis=0)
            changed[name] = "fp16"
            replace(node, insert(node, "Cast", [rows], to=int(ir.DataType.FLOAT)))
        return changed


def _is_embedding(table: ir.Value | None, ids: ir.Value | None) -> bool:
    """Whether a Gather of these inputs reads rows of an fp32 table for the tokens that are fed."""
    if table is None or ids is None or not table.is_initializer():
        return False
    return ids.name == "input_ids" and table.dtype == ir.DataType.FLOAT
