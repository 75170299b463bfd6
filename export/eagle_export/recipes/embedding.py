"""The embedding table in fp16, which is exact for checkpoints in fp16, or in blocks of 4 or 8 bits."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import onnx_ir as ir

from eagle_export.base.errors import ExportError
from eagle_export.base.parted import PartedTensor, part_of
from eagle_export.recipes.blocks import Grid, by_parts, fitted, rounded
from eagle_export.recipes.graph import MICROSOFT, Array, Pass, constant, initializer, insert, replace
from eagle_export.recipes.weight_blocks import stored


@dataclass(frozen=True, slots=True)
class EmbeddingFp16(Pass[ir.Node]):
    """Stores the table [V, H] that is indexed by input_ids in fp16. Writing raises ExportError for too large values."""

    name = "embedding fp16"

    def pattern(self, model: ir.Model) -> list[ir.Node]:
        return [node for node in model.graph if node.op_type == "Gather" and _is_embedding(*node.inputs[:2])]

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        for node in matches:
            table, ids = node.inputs[:2]
            assert table is not None and table.const_value is not None
            tensor, name = table.const_value, str(table.name)

            def part(axis: int, piece: slice, tensor: ir.TensorProtocol = tensor, name: str = name) -> Array:
                with np.errstate(over="ignore"):
                    rounded = part_of(tensor, axis, piece).astype(np.float16)
                if not np.isfinite(rounded).all():
                    raise ExportError(f"{name} holds a value beyond the range of fp16; export in fp32")
                return rounded

            shape = tuple(tensor.shape.numpy())
            stored = initializer(model, PartedTensor(part, 0, ir.DataType.FLOAT16, shape, f"{name}.fp16"))
            rows = insert(node, "Gather", [stored, ids], axis=0)
            changed[name] = "fp16"
            replace(node, insert(node, "Cast", [rows], to=int(ir.DataType.FLOAT)))
        return changed


@dataclass(frozen=True, slots=True)
class EmbeddingBlocks(Pass[ir.Node]):
    """Stores the table [V, H] that is indexed by input_ids as WeightBlocks stores a weight [H, V], and reads it with
    GatherBlockQuantized, an operator of ONNX Runtime. A table that is also the LM head is stored once, as it was
    rounded there. A table whose width no size of blocks divides is stored in fp16. others: other grids, by weight."""

    grid: Grid
    others: Mapping[str, Grid] = field(default_factory=dict)
    name = "embedding blocks"

    def pattern(self, model: ir.Model) -> list[ir.Node]:
        return EmbeddingFp16().pattern(model)

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed: dict[str, str] = {}
        for node in matches:
            table, ids = node.inputs[:2]
            assert table is not None and table.const_value is not None
            tensor, name, (v, h) = table.const_value, str(table.name), table.const_value.shape.numpy()
            grid = fitted(self.others.get(name, self.grid), h, whole=True)
            tied = f"{name}.int{grid.bits}" in model.graph.initializers
            if h % grid.size:
                changed |= EmbeddingFp16().rewrite(model, [node])
                continue

            def columns(piece: slice, tensor: ir.TensorProtocol = tensor) -> Array:
                return np.ascontiguousarray(part_of(tensor, 0, piece).astype(np.float32, copy=False).T)

            quantise = partial(by_parts, columns, (h, v), partial(rounded, grid=grid))
            weight, scale, *zero = stored(model, name, (h, v), quantise, grid)
            lines = insert(node, "Reshape", [weight, constant(model, "shape_lines", np.array([0, -1]))])
            attributes = {"bits": grid.bits, "block_size": grid.size}
            inputs = [lines, ids, scale, *zero]
            rows = insert(node, "GatherBlockQuantized", inputs, MICROSOFT, gather_axis=0, quantize_axis=1, **attributes)
            changed[name] = f"int{grid.bits} in blocks of {grid.size}"
            changed[name] += ", as rounded for the LM head" if tied else ""
            replace(node, insert(node, "Cast", [rows], to=int(ir.DataType.FLOAT)))
        return changed


def _is_embedding(table: ir.Value | None, ids: ir.Value | None) -> bool:
    """Whether a Gather of these inputs reads rows of an fp32 table for the tokens that are fed."""
    if table is None or ids is None or not table.is_initializer():
        return False
    tokens = ids.name == "input_ids" or str(ids.name).startswith("paths.")  # of Hydra's heads
    return tokens and table.dtype == ir.DataType.FLOAT
