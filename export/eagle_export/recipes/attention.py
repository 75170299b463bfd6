"""Attention whose output does not depend on which other rows share the pass, at the price of plain products.

A token verified in a tree and the same token decoded alone attend to the same keys, but some of them at other columns
and beside masked ones, so a sum in fp32 is rounded in another order and differs in its last bit. Behind an int8 layer
such a bit can turn one rounding and with it a near tie of two tokens. Three facts make the sums equal:

- A score is a sum over the width of one head. ONNX Runtime's products add it up in one sequence, whichever column the
  key is at (up to a width of WIDEST; wider ones are summed in fp64), as long as a product has two rows or more.
- Keys RECENT or more positions before the query are in the cache in either case, at the same columns: weighted sums
  over them are in fp32, and the columns behind them, hidden by a weight of zero, add nothing. They are cut into as
  many products as keep ONNX Runtime from dividing one among threads, which would change the sequence.
- Newer keys, and the two parts together, are summed in fp64, where orders agree to 1e-16, hence to the last bit once
  rounded to fp32 (except for one value in 1e8).

Past and new keys are multiplied where they lie, with no copy of the cache. ONNX Runtime divides by zero in a product
with an empty one, so a pass without a past must be given a row that its mask hides (the runtime's CPU session does).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import onnx_ir as ir

from eagle_export.errors import ExportError
from eagle_export.recipes.graph import MICROSOFT, constant, insert, replace

RECENT = 64  # positions; a tree is never deeper
COLUMNS = 16  # ONNX Runtime's smallest share of a product's columns
THREADS = 16  # the most that it divides a product among
WIDEST = 128  # values of a head that it sums in one sequence, however many columns there are
HIDDEN = np.array(np.finfo(np.float32).min, np.float32)
END = 2**62


def exact_attention(model: ir.Model) -> dict[str, str]:
    """Replace every Attention node by products that are equal to the bit in any tree. Returns node name -> what was
    done; raises ExportError for a node that does not read a cache."""
    changed = {}
    masks: dict[ir.Value, _Columns] = {}
    for node in [node for node in model.graph if node.op_type == "Attention"]:
        part = _part(model, node)
        mask = node.inputs[3]
        assert mask is not None
        if mask not in masks:
            masks[mask] = _columns(model, node, mask, part)
        changed[str(node.outputs[0].name)] = "settled keys in fp32, recent ones in fp64"
        replace(node, _attend(model, node, part, masks[mask]))
    if changed:
        model.opset_imports[MICROSOFT] = 1
    return changed


@dataclass(frozen=True, slots=True)
class _Part:
    """What one node attends with. q [1, heads, T, width]; keys and values, past and new [1, P or T, kv_heads, width]"""

    q: ir.Value
    past: tuple[ir.Value, ir.Value]
    new: tuple[ir.Value, ir.Value]
    heads: int
    kv_heads: int
    width: int

    @property
    def single(self) -> bool:
        """Whether a key serves one query head, so that a pass of one token would be a product of one row."""
        return self.heads == self.kv_heads

    @property
    def cut(self) -> int:
        """Values of a head in one product: many, yet few enough that there are THREADS products."""
        cuts = [cut for cut in range(COLUMNS, self.width + 1, COLUMNS) if self.width % cut == 0]
        many = [cut for cut in cuts if self.kv_heads * self.width // cut >= THREADS]
        return max(many, default=min(cuts, default=self.width))


@dataclass(frozen=True, slots=True)
class _Columns:
    """What all layers with one mask share. Biases are added to scores [kv_heads, R, columns], where the R rows are T
    for each query head of a key's: `settled` [R, P] hides recent keys, `recent` [R, P up to RECENT] all others, and
    both, like `new` [R, T], what the tree's mask hides.

    ones [P, COLUMNS]; values: the shape of past values cut into pieces."""

    settled: ir.Value
    recent: ir.Value
    new: ir.Value
    ones: ir.Value
    values: ir.Value


def _part(model: ir.Model, node: ir.Node) -> _Part:
    q, *cached = node.inputs[:3]
    pairs = []
    for value in cached:
        turned = None if value is None else value.producer()
        joined = None if turned is None or turned.inputs[0] is None else turned.inputs[0].producer()
        if joined is None or joined.op_type != "Concat" or joined.inputs[0] not in model.graph.inputs:
            raise ExportError(f"attention {node.name} does not read its keys from the cache; report this as a bug")
        past, new = joined.inputs
        assert past is not None and new is not None
        pairs.append((past, new))
    assert q is not None and q.shape is not None and cached[0] is not None and cached[0].shape is not None
    heads, kv_heads, width = q.shape[1], cached[0].shape[1], q.shape[3]
    assert isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(width, int)
    past_pair, new_pair = zip(*pairs, strict=True)
    return _Part(q, past_pair, new_pair, heads, kv_heads, width)


def _columns(model: ir.Model, node: ir.Node, mask: ir.Value, part: _Part) -> _Columns:
    op = partial(insert, node)
    ints = partial(_ints, model)
    past_rows = op("Shape", [part.past[0]], start=1, end=2)
    positions = next(value for value in model.graph.inputs if value.name == "position_ids")
    columns = op("Range", [_scalar(model, 0), op("Squeeze", [past_rows]), _scalar(model, 1)])
    old = op("Less", [columns, op("Sub", [op("Reshape", [positions, ints(-1, 1)]), ints(RECENT)])])
    hidden = constant(model, "hidden", HIDDEN)
    rows_of_mask = op("Squeeze", [mask, ints(0, 1)])
    behind = op("Slice", [rows_of_mask, ints(0), past_rows, ints(1)])

    def of_rows(bias: ir.Value) -> ir.Value:
        """[T, columns] -> [R, columns]"""
        if part.single:
            return op("Concat", [bias, op("Slice", [bias, ints(0), ints(1), ints(0)])], axis=0)
        return op("Tile", [bias, ints(part.heads // part.kv_heads, 1)])

    recent = op("Where", [old, hidden, behind])
    return _Columns(
        settled=of_rows(op("Where", [old, behind, hidden])),
        recent=of_rows(op("Slice", [recent, ints(-RECENT), ints(END), ints(1)])),
        new=of_rows(op("Slice", [rows_of_mask, past_rows, ints(END), ints(1)])),
        ones=op(
            "ConstantOfShape",
            [op("Concat", [past_rows, ints(COLUMNS)], axis=0)],
            value=ir.tensor(np.ones(1, np.float32)),
        ),
        values=op("Concat", [past_rows, ints(part.kv_heads, part.width // part.cut, part.cut)], axis=0),
    )


def _attend(model: ir.Model, node: ir.Node, part: _Part, columns: _Columns) -> ir.Value:
    """What `node` computes, by nodes put before it."""
    ints = partial(_ints, model)

    def op(name: str, *inputs: ir.Value, domain: str = "", **attributes: Any) -> ir.Value:
        return insert(node, name, inputs, domain, **attributes)

    def double(value: ir.Value) -> ir.Value:
        return op("Cast", value, to=int(ir.DataType.DOUBLE))

    def single(value: ir.Value) -> ir.Value:
        return op("Cast", value, to=int(ir.DataType.FLOAT))

    def scores(keys: ir.Value) -> ir.Value:
        """[kv_heads, R, columns]"""
        if part.width > WIDEST:
            return single(_fused(op, double(q), double(keys), rotated=True))
        return _fused(op, q, keys, rotated=True)

    def greatest(value: ir.Value) -> ir.Value:
        return op("ReduceMax", value, ints(-1), keepdims=1)

    def weights(value: ir.Value) -> ir.Value:
        return op("Exp", op("Sub", value, top))

    q = op("Reshape", part.q, ints(part.kv_heads, -1, part.width))
    if part.single:
        q = op("Concat", q, op("Slice", q, ints(0), ints(1), ints(1)), axis=1)
    (keys, new_keys), (values, new_values) = (
        [op("Squeeze", value, ints(0)) for value in pair] for pair in zip(part.past, part.new, strict=True)
    )
    past_scores = scores(keys)
    settled = op("Add", past_scores, columns.settled)
    last = op("Add", op("Slice", past_scores, ints(-RECENT), ints(END), ints(2)), columns.recent)
    recent = op("Concat", last, op("Add", scores(new_keys), columns.new), axis=-1)
    top = op("Max", greatest(settled), greatest(recent))

    settled = weights(settled)
    cut = op("Reshape", values, columns.values)
    pieces = _fused(op, op("Unsqueeze", settled, ints(1)), cut)  # [kv_heads, pieces, R, cut]
    settled_sum = op("Reshape", op("Transpose", pieces, perm=[0, 2, 1, 3]), ints(part.kv_heads, -1, part.width))
    settled_total = op("Slice", op("MatMul", settled, columns.ones), ints(0), ints(1), ints(2))

    recent = double(weights(recent))
    recent_values = op("Concat", op("Slice", values, ints(-RECENT), ints(END), ints(0)), new_values, axis=0)
    recent_sum = _fused(op, recent, double(recent_values))
    recent_total = op("ReduceSum", recent, ints(-1), keepdims=1)

    total_sum = op("Add", recent_sum, double(settled_sum))
    total = op("Add", recent_total, double(settled_total))
    mixed = op("Reshape", single(op("Div", total_sum, total)), ints(1, part.heads, -1, part.width))
    return op("Slice", mixed, ints(0), ints(-1), ints(2)) if part.single else mixed


def _fused(op: Callable[..., ir.Value], left: ir.Value, right: ir.Value, rotated: bool = False) -> ir.Value:
    """[heads, ..., R, K] times [K, heads, ..., N], or [N, heads, K] if rotated: the right one as it lies in a cache."""
    return op("FusedMatMul", left, right, domain=MICROSOFT, transBatchB=1, transB=int(rotated))


def _ints(model: ir.Model, *values: int) -> ir.Value:
    name = "ints_" + "_".join(map(str, values))
    return constant(model, name, np.array(values, np.int64))


def _scalar(model: ir.Model, value: int) -> ir.Value:
    return constant(model, f"int_{value}", np.array(value, np.int64))
