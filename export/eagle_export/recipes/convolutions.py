"""Short convolutions (LFM2) in standard operators.

Take a row at position 10 whose layer sees three tokens. What the layer read of positions 9 and 8 is in the cache, or
among the new rows of the tree: the row of that position that tree_mask lets it see. Both are gathered and multiplied by
their weights, each number for itself, so a row's bits depend on no other row.

Shapes: T rows, P past rows, C columns of a head-major cache, H hidden, K tokens that a row sees, itself included.
"""

from __future__ import annotations

from dataclasses import dataclass

import onnx_ir as ir

from eagle_export.recipes.attention import head_major
from eagle_export.recipes.graph import CONVOLUTION, Pass, Steps, insert_split, take_place
from eagle_export.recipes.tree_rows import TreeRows, tree_rows


@dataclass(frozen=True, slots=True)
class ConvolutionPart:
    """What a node reads. inputs [1, T, 3 H]; past: keys and values, of these heads and this width; weight [H, 1,
    K]; bias [H] or None. tokens: K."""

    inputs: ir.Value
    past: tuple[ir.Value, ir.Value]
    weight: ir.Value
    bias: ir.Value | None
    heads: int
    width: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Ancestor:
    """Where each row finds the token some positions before it. there, committed [1, T, 1]: whether the text has it, and
    whether it is in the cache, there in `column` [T]; else it is the new row `row` [T]."""

    there: ir.Value
    committed: ir.Value
    column: ir.Value
    row: ir.Value


def convolution_nodes(model: ir.Model) -> list[ir.Node]:
    """Returns all nodes of short convolutions, in the graph's order."""
    return [node for node in model.graph if (node.domain, node.op_type) == CONVOLUTION]


def convolution_of(node: ir.Node) -> ConvolutionPart:
    """Returns what a node reads."""
    inputs, keys, values, weight, *bias = node.inputs
    shape = node.outputs[1].shape
    assert inputs is not None and keys is not None and values is not None and weight is not None
    assert weight.shape is not None and shape is not None
    heads, width, tokens = shape[2], shape[3], weight.shape[2]
    assert isinstance(heads, int) and isinstance(width, int) and isinstance(tokens, int)
    return ConvolutionPart(inputs, (keys, values), weight, bias[0] if bias else None, heads, width, tokens)


@dataclass(frozen=True, slots=True)
class Convolutions(Pass[ir.Node]):
    """Computes short convolutions by standard operators. in_heads: whether their past becomes that of ExactAttention,
    which has at least one column."""

    in_heads: bool
    name = "short convolutions"

    def pattern(self, model: ir.Model) -> list[ir.Node]:
        return convolution_nodes(model)

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        ancestors: list[Ancestor] = []
        tree = tree_rows(Steps(model, matches[0]), model)
        for node in matches:
            part, op = convolution_of(node), Steps(model, node)
            if self.in_heads:
                head_major(part.past, part.heads, part.width)
            while len(ancestors) < part.tokens - 1:
                ancestors.append(self._ancestor(op, tree, part.past[0], 1 + len(ancestors)))
            changed[str(node.outputs[0].name)] = "gathered"
            for old, new in zip(node.outputs, self._computed(op, part, ancestors), strict=True):
                take_place(old, new)
            model.graph.remove(node, safe=True)
        model.opset_imports.pop(CONVOLUTION[0], None)
        return changed

    def _computed(
        self, op: Steps, part: ConvolutionPart, ancestors: list[Ancestor]
    ) -> tuple[ir.Value, ir.Value, ir.Value]:
        """Returns the node's outputs: [1, T, H], and new keys and values [1, T, heads, width]."""
        before, after, x = insert_split(op.before, part.inputs, 3, axis=-1)
        rows = op("Mul", before, x)
        flat, shaped = op.ints(1, -1, part.heads * part.width), op.ints(1, -1, part.heads, part.width)
        new_keys, new_values = (op("Reshape", each, shaped) for each in insert_split(op.before, rows, 2, axis=-1))
        all_rows: list[ir.Value] = []  # the new ones after the past, where heads do not keep their columns apart
        if not self.in_heads:
            pairs = zip(part.past, (new_keys, new_values), strict=True)
            all_rows = [op("Concat", past, new, axis=1) for past, new in pairs]

        def weighted(back: int, row: ir.Value) -> ir.Value:
            place = part.tokens - 1 - back
            weight = op("Slice", part.weight, op.ints(place), op.ints(place + 1), op.ints(2))
            return op("Mul", row, op("Squeeze", weight, op.ints(1, 2)))

        def found(ancestor: Ancestor) -> ir.Value:
            """[1, T, H]"""
            if self.in_heads:
                # keys [heads, C, width], values [heads, pieces, C, width / pieces]
                keys, values = (op("Gather", past, ancestor.column, axis=1 + n) for n, past in enumerate(part.past))
                rows_first = op("Transpose", keys, perm=[1, 0, 2]), op("Transpose", values, perm=[2, 0, 1, 3])
                old = op("Concat", *(op("Reshape", each, flat) for each in rows_first), axis=-1)
                one = op("Where", ancestor.committed, old, op("Gather", rows, ancestor.row, axis=1))
            else:
                taken = [op("Gather", each, ancestor.column, axis=1) for each in all_rows]
                one = op("Concat", *(op("Reshape", each, flat) for each in taken), axis=-1)
            return op("Where", ancestor.there, one, op("CastLike", op.number(0), one))

        total = weighted(0, rows)
        for back, ancestor in enumerate(ancestors[: part.tokens - 1], 1):
            total = op("Add", total, weighted(back, found(ancestor)))
        if part.bias is not None:
            total = op("Add", total, part.bias)
        return op("Mul", after, total), new_keys, new_values

    def _ancestor(self, op: Steps, tree: TreeRows, keys: ir.Value, back: int) -> Ancestor:
        """keys: a past of keys."""
        ints = op.ints
        wanted, committed, row = tree.before(op, back)
        there = op("GreaterOrEqual", wanted, op.integer(0))
        if self.in_heads:
            last = op("Sub", op("Shape", keys, start=1, end=2), ints(1))
            column = op("Max", op("Min", wanted, last), ints(0))
        else:  # new rows follow the past ones
            column = op("Max", op("Where", committed, wanted, op("Add", tree.length, row)), ints(0))
        return Ancestor(op("Unsqueeze", there, ints(0, 2)), op("Unsqueeze", committed, ints(0, 2)), column, row)
