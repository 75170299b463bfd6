"""Attention, built from plain matrix products, whose output does not depend on the other rows of the forward pass.

A token that is verified in a tree and the same token decoded alone attend to the same keys, but some of these are in
other columns, next to masked ones. An fp32 sum is then rounded in another order and differs in its last bit. In the
int8 layer that follows, one bit can change a rounding, and with it a near tie of two tokens. Three facts make the sums
equal:

- A score is a sum over the width of one head. ONNX Runtime's products add it up in the same order for every column of
  the key (up to a width of WIDEST; wider ones are summed in fp64), if the product has at least two rows.
- Keys that are RECENT or more positions before the query are in the cache in both cases, in the same columns: weighted
  sums over them are in fp32. The columns after them have a weight of zero and add nothing. These sums are cut into so
  many products that ONNX Runtime does not divide one among threads, which would change the order.
- Newer keys, and the sum of both parts, are summed in fp64, where different orders agree to 1e-16, and so to the last
  bit after rounding to fp32 (except for one value in 1e8).

The past is head-major: all rows of a head, or of a piece of one, are contiguous, which a product reads up to twice as
fast as rows in which heads alternate. There may be more columns than rows, so that a cache can grow in steps: the first
new token's position is the number of rows; the columns after them are masked, but must be finite. There must be at
least one column, because ONNX Runtime divides by zero in an empty product.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import onnx_ir as ir

from eagle_export.base.errors import ExportError
from eagle_export.recipes.graph import MICROSOFT, WINDOW, Pass, Steps, constant, insert_split, made_by, made_of, replace
from eagle_runtime.base.tree import MAX_DEPTH

RECENT = MAX_DEPTH  # positions; no verified tree is deeper
COLUMNS = 16  # the fewest columns of a product that ONNX Runtime gives to one thread
THREADS = 16  # the most threads among which it divides a product
WIDEST = 128  # the widest head whose scores it sums in one order for any number of columns
HIDDEN, SEEN = np.float32(np.finfo(np.float32).min), np.float32(0)


@dataclass(frozen=True, slots=True)
class AttentionPass(Pass[ir.Node]):
    """A pass over all Attention nodes."""

    def pattern(self, model: ir.Model) -> list[ir.Node]:
        return attention_nodes(model)


@dataclass(frozen=True, slots=True)
class ExactAttention(AttentionPass):
    """Replaces every Attention node by products that are equal to the bit in any tree, and makes its past head-major:
    keys [kv_heads, C, width], values [kv_heads, pieces, C, width / pieces], C >= 1 columns. tree_mask becomes
    [1, 1, T, T]. Raises ExportError for an Attention node that does not read a cache."""

    name = "exact attention"

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        columns: dict[tuple[int | None, int], _Columns] = {}
        for node in matches:
            part = part_of(model, node)
            alike = part.window, part.heads // part.kv_heads
            if alike not in columns:
                columns[alike] = _columns(model, node, part)
            changed[str(node.outputs[0].name)] = "committed keys in fp32, recent ones in fp64"
            replace(node, _attend(model, node, part, columns[alike]))
            head_major(part.past, part.kv_heads, part.width)
        graph_input(model, "tree_mask").shape = ir.Shape([1, 1, "T", "T"])
        model.opset_imports[MICROSOFT] = 1
        return changed


@dataclass(frozen=True, slots=True)
class Part:
    """Inputs of one Attention node. q [1, heads, T, width]; past: keys and values, head-major as ExactAttention says;
    new: keys and values, each [1, T, kv_heads, width]. window: the number of positions that a row sees, itself
    included; None for all. cap: bound of the scores; None for none. sinks [heads]: scores without a key; None for
    none."""

    q: ir.Value
    past: tuple[ir.Value, ir.Value]
    new: tuple[ir.Value, ir.Value]
    heads: int
    kv_heads: int
    width: int
    window: int | None
    cap: float | None
    sinks: ir.Value | None

    @property
    def single(self) -> bool:
        """Whether each key serves one query head, so that a forward pass of one token would be a product of one row."""
        return self.heads == self.kv_heads

    @property
    def cut(self) -> int:
        """How many values of a head share one product."""
        return cut_of(self.kv_heads, self.width)


@dataclass(frozen=True, slots=True)
class _Columns:
    """Values that layers with equal windows and as many query heads per key share. The last RECENT rows of the past, or
    all if there are fewer, are in the columns from `start` to `end`. Biases are added to scores [kv_heads, R, columns],
    where R is T times the query heads per key: `committed` [R, C] masks recent keys, `recent` [R, end - start] masks
    all others, and `new` [R, T] is the tree's mask.

    start, end [1]; sizes [2]: numbers of recent and of new columns; ones [C, COLUMNS]"""

    start: ir.Value
    end: ir.Value
    sizes: ir.Value
    committed: ir.Value
    recent: ir.Value
    new: ir.Value
    ones: ir.Value


def attention_nodes(model: ir.Model) -> list[ir.Node]:
    """Returns all Attention nodes, in the graph's order."""
    return [node for node in model.graph if node.op_type == "Attention"]


def cut_of(kv_heads: int, width: int) -> int:
    """How many values of a head share one product: as many as possible with at least THREADS products."""
    cuts = [cut for cut in range(COLUMNS, width + 1, COLUMNS) if width % cut == 0]
    many = [cut for cut in cuts if kv_heads * width // cut >= THREADS]
    return max(many, default=min(cuts, default=width))


def head_major(past: tuple[ir.Value, ir.Value], kv_heads: int, width: int) -> None:
    """Gives the inputs of the past the shapes of a head-major cache: keys [Hkv, C, D], values [Hkv, S, C, D/S]."""
    cut = cut_of(kv_heads, width)
    past[0].shape = ir.Shape([kv_heads, "C", width])
    past[1].shape = ir.Shape([kv_heads, width // cut, "C", cut])


def part_of(model: ir.Model, node: ir.Node) -> Part:
    """Returns the inputs of an Attention node. Raises ExportError if it does not read a cache."""
    q, *cached = node.inputs[:3]
    sinks = _sinks(node)
    if sinks is not None:
        cached = [made_of(value, "Concat") for value in cached]
    pairs = []
    for value in cached:
        joined = made_by(made_of(value, "Transpose"), "Concat")
        if joined is None or joined.inputs[0] not in model.graph.inputs:
            raise ExportError(f"attention {node.name} does not read its keys from the cache; report this as a bug")
        past, new = joined.inputs
        assert past is not None and new is not None
        pairs.append((past, new))
    assert q is not None and q.shape is not None and cached[0] is not None and cached[0].shape is not None
    heads, kv_heads, width = q.shape[1], cached[0].shape[1], q.shape[3]
    assert isinstance(heads, int) and isinstance(kv_heads, int) and isinstance(width, int)
    past_pair, new_pair = zip(*pairs, strict=True)
    window = node.metadata_props.get(WINDOW)
    cap = node.attributes.get_float("softcap", 0.0)
    back = None if window is None else int(window)
    return Part(q, past_pair, new_pair, heads, kv_heads, width, back, cap or None, sinks)


def _sinks(node: ir.Node) -> ir.Value | None:
    """The sinks [heads] of an Attention node that graphs.py gave them: in the mask's last column."""
    joined = made_by(node.inputs[3] if len(node.inputs) > 3 else None, "Concat")
    last = None if joined is None else joined.inputs[-1]
    return None if made_by(last, "Expand") is None else made_of(made_of(last, "Expand"), "Reshape")


def _columns(model: ir.Model, node: ir.Node, part: Part) -> _Columns:
    op = Steps(model, node)
    ints = op.ints
    hidden, seen = (constant(model, name, np.array(bias)) for name, bias in (("hidden", HIDDEN), ("seen", SEEN)))
    zero, one = op.integer(0), op.integer(1)
    positions, mask = graph_input(model, "position_ids"), graph_input(model, "tree_mask")
    length = op("Slice", op("Reshape", positions, ints(-1)), ints(0), ints(1), ints(0))
    start, end = op("Max", op("Sub", length, ints(RECENT)), ints(0)), op("Max", length, ints(1))
    first = op("Sub", op("Reshape", positions, ints(-1, 1)), ints(RECENT))  # [T, 1], of the recent positions
    columns = op("Shape", part.past[0], start=1, end=2)
    window = op("Range", op("Squeeze", start), op("Squeeze", end), one)
    old = op("Less", op("Range", zero, op("Squeeze", columns), one), op("Min", first, length))
    near = op("And", op("GreaterOrEqual", window, first), op("Less", window, length))
    if part.window is not None:
        oldest = op("Sub", op("Reshape", positions, ints(-1, 1)), ints(part.window - 1))  # [T, 1], that a row sees
        old = op("And", old, op("GreaterOrEqual", op("Range", zero, op("Squeeze", columns), one), oldest))
        near = op("And", near, op("GreaterOrEqual", window, oldest))

    def tree_bias() -> ir.Value:
        """[T, T]"""
        bias = op("Squeeze", mask, ints(0, 1))
        if part.window is None:
            return bias
        return op("Where", op("GreaterOrEqual", op("Reshape", positions, ints(1, -1)), oldest), bias, hidden)

    def of_rows(bias: ir.Value) -> ir.Value:
        """[T, columns] -> [R, columns]"""
        if part.single:
            return op("Concat", bias, op("Slice", bias, ints(0), ints(1), ints(0)), axis=0)
        return op("Tile", bias, ints(part.heads // part.kv_heads, 1))

    return _Columns(
        start=start,
        end=end,
        sizes=op("Concat", op("Sub", end, start), op("Shape", mask, start=3, end=4), axis=0),
        committed=of_rows(op("Where", old, seen, hidden)),
        recent=of_rows(op("Where", near, seen, hidden)),
        new=of_rows(tree_bias()),
        ones=op(
            "ConstantOfShape", op("Concat", columns, ints(COLUMNS), axis=0), value=ir.tensor(np.ones(1, np.float32))
        ),
    )


def _attend(model: ir.Model, node: ir.Node, part: Part, columns: _Columns) -> ir.Value:
    """Inserts nodes before `node` that compute the same. Returns their result [1, heads, T, width]."""
    op = Steps(model, node)
    ints, number, single, double, greatest = op.ints, op.number, op.single, op.double, op.greatest

    def scores(keys: ir.Value, **layout: int) -> ir.Value:
        """[kv_heads, R, columns]"""
        if part.width > WIDEST:
            return bounded(single(_product(op, double(q), double(keys), transB=1, **layout)))
        return bounded(_product(op, q, keys, transB=1, **layout))

    def bounded(value: ir.Value) -> ir.Value:
        """cap * tanh(value / cap), by Exp, which computes each element alike wherever it stands in a tensor"""
        if part.cap is None:
            return value
        grown = op("Exp", op("Mul", value, number(2 / part.cap)))
        return op("Sub", number(part.cap), op("Div", number(2 * part.cap), op("Add", grown, number(1))))

    def weights(value: ir.Value) -> ir.Value:
        return op("Exp", op("Sub", value, top))

    def by_pieces(value: ir.Value) -> ir.Value:
        """[kv_heads, R, columns] -> [kv_heads, 1, R, columns]"""
        return op("Unsqueeze", value, ints(1))

    q = op("Reshape", part.q, ints(part.kv_heads, -1, part.width))
    if part.single:
        q = op("Concat", q, op("Slice", q, ints(0), ints(1), ints(1)), axis=1)
    keys, values = part.past
    new_keys, new_values = (op("Squeeze", value, ints(0)) for value in part.new)
    past_scores = scores(keys)
    committed = op("Add", past_scores, columns.committed)
    last = op("Add", op("Slice", past_scores, columns.start, columns.end, ints(2)), columns.recent)
    recent = op("Concat", last, op("Add", scores(new_keys, transBatchB=1), columns.new), axis=-1)
    top = op("Max", greatest(committed), greatest(recent))
    if part.sinks is not None:  # [kv_heads, R, 1]
        sharing = part.heads // part.kv_heads
        sinks = op("Reshape", part.sinks, ints(part.kv_heads, sharing, 1))
        if not part.single:
            rows = op("Concat", ints(1, 1), op("Shape", part.q, start=2, end=3), axis=0)
            sinks = op("Reshape", op("Expand", sinks, rows), ints(part.kv_heads, -1, 1))
        top = op("Max", top, sinks)

    committed = weights(committed)
    committed_sum = _product(op, by_pieces(committed), values)  # [kv_heads, pieces, R, cut]
    committed_total = op("Slice", op("MatMul", committed, columns.ones), ints(0), ints(1), ints(2))

    recent = double(weights(recent))
    last, new = insert_split(node, recent, 2, axis=-1, sizes=columns.sizes)
    last_values = double(op("Slice", values, columns.start, columns.end, ints(2)))
    past_sum = op("Add", _product(op, by_pieces(last), last_values), double(committed_sum))
    past_sum = op("Reshape", op("Transpose", past_sum, perm=[0, 2, 1, 3]), ints(part.kv_heads, -1, part.width))
    total_sum = op("Add", past_sum, _product(op, new, double(new_values), transBatchB=1))
    total = op("Add", op("ReduceSum", recent, ints(-1), keepdims=1), double(committed_total))
    if part.sinks is not None:
        total = op("Add", total, double(weights(sinks)))
    mixed = op("Reshape", single(op("Div", total_sum, total)), ints(1, part.heads, -1, part.width))
    return op("Slice", mixed, ints(0), ints(-1), ints(2)) if part.single else mixed


def _product(op: Callable[..., ir.Value], left: ir.Value, right: ir.Value, **layout: int) -> ir.Value:
    """[heads, ..., R, K] times [heads, ..., K, N]. layout: another layout of the right operand: transB=1 for
    [heads, ..., N, K]; transBatchB=1 if the heads are its second axis, as in new rows."""
    return op("FusedMatMul", left, right, domain=MICROSOFT, **layout)


def graph_input(model: ir.Model, name: str) -> ir.Value:
    return next(value for value in model.graph.inputs if value.name == name)
