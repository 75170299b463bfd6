"""Attention over a cache of bytes, whose output does not depend on the other rows of the forward pass.

A key or value of one token and head is quantised once, when it is computed, with a scale of its own. New keys are read
in that form too, so a key is the same number in the tree that proposes it, alone, and later in the cache:

    scale = largest absolute value of the key (of one token and head)
    byte  = round(key / scale * 127)

Both products of attention then multiply bytes and add whole numbers, which is exact in any order, so no column needs
care, as it does in eagle_export.recipes.attention:

- Queries are quantised like keys, in 63 levels. A score is one sum over the head's width, times both scales.
- Weights of values are multiplied by the values' scales, which differ by column, and then quantised: LEVELS coarse
  steps up to the largest that the row may have, and LEVELS fine ones inside a coarse one, so that thousands of small
  weights next to a large one count. Both products share one reading of the values.
- The weights' total is not a product of bytes. Keys are added up in fp32 by BLOCK columns, the same ones in any tree if
  all of them are RECENT or more positions before the query. Newer keys, and all blocks, are added up in fp64, where
  different orders agree to 1e-16, and so to the last bit after rounding to fp32 (except for one value in 1e8).

Passes over [kv_heads, R, C] cost as much as the products, so there are few of them, and none over past and new columns
joined. Queries and weights are unsigned bytes below 128: with AVX2 alone, ONNX Runtime adds up two products of an
unsigned and a signed byte in 16 bits, which saturates beyond. Its products of unsigned bytes alone do not saturate, but
take 1.6 times as long with AVX-512 VNNI. A sum stays below 2**31 up to MOST columns.

Scales per token and head: KIVI (arXiv 2402.02750) measures such values as near lossless.
ONNX Runtime's GroupQueryAttention reads int8 caches as well (microsoft/onnxruntime, pull request 28576), but adds up
values in fp32 by column, and takes its scales from a calibration.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.attention import RECENT, SEEN, AttentionPass, Part, graph_input, part_of
from eagle_export.recipes.graph import MICROSOFT, Steps, constant, insert_split, replace

LEVELS = 127  # of a key, a value or a weight above zero
QUERY_LEVELS = 63  # of a query, on each side of
QUERY_ZERO = np.uint8(64)  # the byte of zero
BLOCK = 64  # columns; caches are laid out in multiples of them (eagle_runtime.core.cache.STEP)
LEAST = 1e-20  # the scale of a row of zeros
UNUSED = np.float32(-1e30)  # added to the scores of columns without a key, before the query's scale is applied
MOST = (2**31 - 1) // LEVELS**2  # columns: 133,143


@dataclass(frozen=True, slots=True)
class Int8Cache(AttentionPass):
    """Replaces every Attention node by products of bytes that are equal to the bit in any tree. The past becomes keys
    [kv_heads, width, C] and values [kv_heads, 1, C, width] in int8, and scales of both [kv_heads, 1, C] in fp32, where
    C is a multiple of BLOCK; new rows have scales [1, T, kv_heads, 1]. tree_mask becomes [1, 1, T, T]. Raises
    ExportError for an Attention node that does not read a cache; none may have a window or bounded scores."""

    name = "int8 cache"

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        columns: _Columns | None = None
        for node in matches:
            part = part_of(model, node)
            assert part.window is None and part.cap is None  # writing/pair_checks.py refuses them
            columns = columns or _columns(model, node, part)
            changed[str(node.outputs[0].name)] = "queries, keys, values and their weights in int8"
            replace(node, _attend(model, node, part, columns))
        graph_input(model, "tree_mask").shape = ir.Shape([1, 1, "T", "T"])
        model.opset_imports[MICROSOFT] = 1
        return changed


@dataclass(frozen=True, slots=True)
class _Rows:
    """Quantised rows: bytes [..., width], and scales [..., 1], the largest absolute value of each row."""

    bytes: ir.Value
    scales: ir.Value


@dataclass(frozen=True, slots=True)
class _Columns:
    """Values that all layers share; R is T times the query heads per key.

    unused [C]: bias of the past's scores before the query's scale. new [R, T]: the tree's mask, a bias. seen [R, T]: 1
    where a row sees a new key, else 0. blocks [R, C / BLOCK]: 1 for blocks that a row's total adds up in fp32. Of the
    columns from `start` to `end` [1], window [R, end - start] is 1 for those that it adds up in fp64."""

    unused: ir.Value
    new: ir.Value
    seen: ir.Value
    blocks: ir.Value
    start: ir.Value
    end: ir.Value
    window: ir.Value


def _columns(model: ir.Model, node: ir.Node, part: Part) -> _Columns:
    op = Steps(model, node)
    ints, single = op.ints, op.single
    zero, one = op.integer(0), op.integer(1)
    positions, mask = graph_input(model, "position_ids"), graph_input(model, "tree_mask")

    def range_of(first: ir.Value, limit: ir.Value) -> ir.Value:
        return op("Range", op("Squeeze", first), op("Squeeze", limit), one)

    def blocks_before(position: ir.Value) -> ir.Value:
        return op("Div", op("Max", op("Sub", position, ints(RECENT)), ints(0)), ints(BLOCK))

    def of_rows(value: ir.Value) -> ir.Value:
        """[T, columns] -> [R, columns]"""
        return op("Tile", value, ints(part.heads // part.kv_heads, 1))

    columns = op("Shape", part.past[0], start=2, end=3)
    length = op("Slice", op("Reshape", positions, ints(-1)), ints(0), ints(1), ints(0))
    start, end = op("Mul", blocks_before(length), ints(BLOCK)), op("Max", length, ints(1))
    whole = blocks_before(op("Reshape", positions, ints(-1, 1)))  # [T, 1]
    window = op("GreaterOrEqual", range_of(start, end), op("Mul", whole, ints(BLOCK)))
    empty = op("GreaterOrEqual", range_of(zero, columns), length)
    new = op("Squeeze", mask, ints(0, 1))
    hidden, seen = (constant(model, name, np.array(bias)) for name, bias in (("unused", UNUSED), ("seen", SEEN)))
    return _Columns(
        unused=op("Where", empty, hidden, seen),
        new=of_rows(new),
        seen=of_rows(single(op("Equal", new, seen))),
        blocks=of_rows(single(op("Less", range_of(zero, op("Div", columns, ints(BLOCK))), whole))),
        start=start,
        end=end,
        window=of_rows(single(window)),
    )


def _attend(model: ir.Model, node: ir.Node, part: Part, columns: _Columns) -> ir.Value:
    """Inserts nodes before `node` that compute the same. Returns their result [1, heads, T, width]."""
    op = Steps(model, node)
    ints, number, single, double, greatest = op.ints, op.number, op.single, op.double, op.greatest

    def total_of(value: ir.Value) -> ir.Value:
        return op("ReduceSum", value, ints(-1), keepdims=1)

    def quantised(rows: ir.Value, levels: int, zero: ir.Value) -> _Rows:
        scales = op("Max", greatest(op("Abs", rows)), number(LEAST))
        return _Rows(op("QuantizeLinear", op("Div", rows, scales), number(1 / levels), zero), scales)

    def by_column(rows: ir.Value) -> ir.Value:
        """[1, T, kv_heads, N] -> [kv_heads, N, T]"""
        return op("Squeeze", op("Transpose", rows, perm=[2, 3, 1, 0]), ints(3))

    def scores(keys: ir.Value, scales: ir.Value, *bias: ir.Value) -> ir.Value:
        """[kv_heads, R, columns]"""
        inputs = (q.bytes, keys, number(1 / (QUERY_LEVELS * LEVELS)), scales, query_zero, signed, *bias)
        return op("Mul", op("MatMulIntegerToFloat", *inputs, domain=MICROSOFT), q.scales)

    def shares(value: ir.Value) -> ir.Value:
        return op("Exp", op("Sub", value, top))

    def mixed(shares: ir.Value, scales: ir.Value, values: ir.Value) -> ir.Value:
        """Returns sums [kv_heads, 1, 2 R, width] of values [kv_heads, 1, columns, width]: coarse steps first."""
        steps = op("Mul", shares, scales)
        coarse = op("Floor", steps)
        fine = op("QuantizeLinear", op("Sub", steps, coarse), number(1 / LEVELS), unsigned)
        both = op("Concat", op("QuantizeLinear", coarse, number(1), unsigned), fine, axis=1)
        return op("MatMulInteger", op("Unsqueeze", both, ints(1)), values, unsigned, signed)

    query_zero = constant(model, "query_zero", np.array(QUERY_ZERO))
    signed, unsigned = (constant(model, f"zero_{kind.__name__}", np.array(0, kind)) for kind in (np.int8, np.uint8))
    q = quantised(op("Reshape", part.q, ints(part.kv_heads, -1, part.width)), QUERY_LEVELS, query_zero)
    keys, values = (quantised(rows, LEVELS, signed) for rows in part.new)
    past_keys, past_values, past_key_scales, past_scales = _cache(model, part, keys, values)
    new_scales = by_column(values.scales)

    past = scores(past_keys, past_key_scales, columns.unused)
    new = op("Add", scores(by_column(keys.bytes), by_column(keys.scales)), columns.new)
    # No weight times its value's scale exceeds LEVELS. In fp64, where a logarithm is the same in any place of a tensor.
    largest = op("Max", greatest(past_scales), greatest(op("Mul", columns.seen, new_scales)))
    room = op("Log", double(op("Mul", largest, number(1 / LEVELS))))
    top = op("Add", op("Max", greatest(past), greatest(new)), single(room))

    past, new = shares(past), shares(new)
    by_block = op("Reshape", past, ints(part.kv_heads, 0, -1, BLOCK))
    old = op("Mul", op("Squeeze", total_of(by_block), ints(3)), columns.blocks)
    recent = op("Mul", op("Slice", past, columns.start, columns.end, ints(2)), columns.window)
    total = op("Sum", *(total_of(double(value)) for value in (old, recent, new)))

    new_values = op("Transpose", values.bytes, perm=[2, 0, 1, 3])
    sums = op("Add", mixed(past, past_scales, past_values), mixed(new, new_scales, new_values))
    coarse, fine = insert_split(node, single(sums), 2, axis=2)
    mean = op("Div", op("Add", coarse, op("Mul", fine, number(1 / LEVELS))), op("Unsqueeze", single(total), ints(1)))
    return op("Reshape", op("Mul", mean, number(1 / LEVELS)), ints(1, part.heads, -1, part.width))


def _cache(model: ir.Model, part: Part, keys: _Rows, values: _Rows) -> tuple[ir.Value, ...]:
    """Makes the layer's past and new rows bytes, and adds their scales to the graph's inputs and outputs. Returns past
    keys, values, and scales of keys and of values."""
    graph = model.graph
    shapes = (part.kv_heads, part.width, "C"), (part.kv_heads, 1, "C", part.width)
    scales = []
    for past, new, rows, shape in zip(part.past, part.new, (keys, values), shapes, strict=True):
        past.shape, past.type = ir.Shape(shape), ir.TensorType(ir.DataType.INT8)
        single = ir.TensorType(ir.DataType.FLOAT)
        scale = ir.val(f"{past.name}_scale", ir.DataType.FLOAT, [part.kv_heads, 1, "C"])
        graph.inputs.append(scale)
        scales.append(scale)
        graph.outputs[graph.outputs.index(new)] = rows.bytes
        rows.bytes.name, new.name = new.name, f"{new.name}.computed"
        rows.bytes.shape, rows.bytes.type = new.shape, past.type
        graph.outputs.append(rows.scales)
        rows.scales.name = f"{rows.bytes.name}_scale"
        rows.scales.shape, rows.scales.type = ir.Shape([1, "T", part.kv_heads, 1]), single
    return (*part.past, *scales)
