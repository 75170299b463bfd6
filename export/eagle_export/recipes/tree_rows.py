"""Where a row of a tree finds the tokens before it, in standard operators: a token of the text before the pass is in
the cache, and one of the tree is the new row of its position that tree_mask lets the row see.

Shapes: T new rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.attention import graph_input
from eagle_export.recipes.graph import Steps

END = np.iinfo(np.int64).max


@dataclass(frozen=True, slots=True)
class TreeRows:
    """What a graph's inputs say of the new rows. positions [T]; length [1]: of the text before them, which is the first
    one's position; visible [T, T]: whether a row sees another."""

    positions: ir.Value
    length: ir.Value
    visible: ir.Value

    def before(self, op: Steps, back: int) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Returns of the token `back` positions before each row, each [T]: its position, whether it is in the cache,
        and which new row it is if it is not."""
        ints = op.ints
        wanted = op("Sub", self.positions, ints(back))
        same = op("Equal", op("Unsqueeze", self.positions, ints(0)), op("Unsqueeze", wanted, ints(1)))
        match = op("Cast", op("And", self.visible, same), to=int(ir.DataType.INT32))
        return wanted, op("Less", wanted, self.length), op("ArgMax", match, axis=1, keepdims=0)


def tree_rows(op: Steps, model: ir.Model) -> TreeRows:
    """Adds the nodes that read a graph's inputs, once for all of its layers."""
    ints = op.ints
    positions = op("Reshape", graph_input(model, "position_ids"), ints(-1))
    length = op("Slice", positions, ints(0), ints(1), ints(0))
    newest = op("Slice", graph_input(model, "tree_mask"), op("Neg", op("Shape", positions)), ints(END), ints(3))
    mask = op("Cast", op("Squeeze", newest, ints(0, 1)), to=int(ir.DataType.FLOAT))
    return TreeRows(positions, length, op("Greater", mask, op.number(-1)))
