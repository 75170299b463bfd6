"""Gated delta nets (Qwen3.5) and state spaces (Granite 4) in standard operators.

A net's state [H, D, E] maps the key of a token to its value. A row lets the state decay, replaces a part of what its
key finds there by its own value, and reads the state with its query (arXiv 2412.06464). A state space's row adds its
value to what is there (arXiv 2405.21060). So a text's state cannot be taken back to fewer tokens, while a tree needs a
state for each of its nodes: the cache holds the state before the rows of the last pass, and these rows. The next pass
computes from those of them that were kept the state before its own rows, which it returns, and then each row's, from
that of its parent. All is computed row by row, in the same operators and shapes, so a row's bits depend on the rows
before it in the text alone.

Shapes: T new rows; W past ones that the state lacks, after K - 1 that it has; N = W + T rows to compute; K tokens that
a row's convolution sees, itself included; G key heads of width D, H value heads of width E; C = 2 G D + H E
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.graph import DELTA_NET, STATE_SPACE, Pass, Steps, insert_split, take_place
from eagle_export.recipes.tree_rows import END, tree_rows
from eagle_runtime.bundle.graph import AFTER, state_names

EPSILON = 1e-6  # under the root of the norms of queries and keys (transformers' l2norm)


@dataclass(frozen=True, slots=True)
class DeltaPart:
    """What a node reads. qkv [1, T, C]; gates: b and a, or dt, each [1, T, H]; stored: weights [C, 1, K], the
    convolution's bias [C] of a state space alone, log of the decay [H], and what a or dt gets added [H]; skip [H]: how
    much of its value a state space adds to what a row reads, None for a delta net. past: rows [1, W + K - 1, C + gates]
    and state [H, D, E], inputs of the graph; new: names of its outputs [1, T, C + gates] and [H, D, E]. key_heads,
    heads, key_width, width, tokens: G, H, D, E and K."""

    qkv: ir.Value
    gates: tuple[ir.Value, ...]
    stored: tuple[ir.Value, ...]
    skip: ir.Value | None
    past: tuple[ir.Value, ir.Value]
    new: tuple[str, str]
    key_heads: int
    heads: int
    key_width: int
    width: int
    tokens: int

    @property
    def read(self) -> int:
        """C"""
        return 2 * self.key_heads * self.key_width + self.heads * self.width

    @property
    def row(self) -> int:
        """Numbers of a past row."""
        return self.read + len(self.gates) * self.heads


def delta_nodes(model: ir.Model) -> list[ir.Node]:
    """Returns all nodes of gated delta nets and state spaces, in the graph's order."""
    return [node for node in model.graph if (node.domain, node.op_type) in (DELTA_NET, STATE_SPACE)]


def delta_parts(model: ir.Model, nodes: Sequence[ir.Node]) -> list[DeltaPart]:
    """Returns what all the nodes of a graph read, and gives it the inputs of their past."""
    parts = []
    for number, node in enumerate(nodes):
        sizes = [node.attributes.get_int(name) for name in ("key_heads", "heads", "key_width", "width")]
        qkv, *others = (value for value in node.inputs if value is not None)
        gates, stored = (others[:2], others[2:]) if node.op_type == DELTA_NET[1] else (others[:1], others[1:])
        skip = None if node.op_type == DELTA_NET[1] else stored.pop()
        assert stored[0].shape is not None
        tokens = stored[0].shape[2]
        assert isinstance(tokens, int)
        key_heads, heads, key_width, width = sizes
        row = 2 * key_heads * key_width + heads * width + len(gates) * heads
        past, new = state_names(number)
        shapes: tuple[list[int | str], ...] = ([1, f"{AFTER}{tokens - 1}", row], [heads, key_width, width])
        inputs = [
            ir.val(name, ir.DataType.FLOAT, shape) for name, shape in zip(past, map(ir.Shape, shapes), strict=True)
        ]
        model.graph.inputs.extend(inputs)
        read = qkv, tuple(gates), tuple(stored), skip, (inputs[0], inputs[1]), new
        parts.append(DeltaPart(*read, key_heads, heads, key_width, width, tokens))
    return parts


def finish(model: ir.Model, node: ir.Node, part: DeltaPart, made: Sequence[ir.Value]) -> None:
    """Puts what operators made in the place of a node. made: what its rows read [1, T, H E], new rows, and a state."""
    take_place(node.outputs[0], made[0])
    shapes: tuple[list[int | str], ...] = ([1, "T", part.row], [part.heads, part.key_width, part.width])
    for value, name, shape in zip(made[1:], part.new, shapes, strict=True):
        value.name, value.shape, value.type = name, ir.Shape(shape), ir.TensorType(ir.DataType.FLOAT)
        model.graph.outputs.append(value)
    model.graph.remove(node, safe=True)
    if not delta_nodes(model):
        model.opset_imports.pop(DELTA_NET[0], None)


@dataclass(frozen=True, slots=True)
class DeltaNets(Pass[ir.Node]):
    """Computes gated delta nets and state spaces by standard operators, in fp32."""

    name = "gated delta nets"

    def pattern(self, model: ir.Model) -> list[ir.Node]:
        return delta_nodes(model)

    def rewrite(self, model: ir.Model, matches: list[ir.Node]) -> dict[str, str]:
        changed = {}
        places: _Places | None = None
        for node, part in zip(matches, delta_parts(model, matches), strict=True):
            op = Steps(model, node)
            places = places or _places(op, model, part)
            changed[str(node.outputs[0].name)] = "row by row"
            finish(model, node, part, _computed(op, part, places))
        return changed


@dataclass(frozen=True, slots=True)
class _Places:
    """Where rows to compute find others, the same in all layers. before: of 1, 2, ... tokens before a row, [N]: its
    place among the past rows and the new ones. pending, count []: rows to compute that are past, and that are new.
    parents [T]: the new row before each, -1 for a past one. branches [T]: whether a row comes before one that does not
    follow it at once."""

    before: tuple[ir.Value, ...]
    pending: ir.Value
    count: ir.Value
    parents: ir.Value
    branches: ir.Value


def _places(op: Steps, model: ir.Model, part: DeltaPart) -> _Places:
    ints, tokens, tree = op.ints, part.tokens, tree_rows(op, model)
    past, rows = op("Shape", part.past[0], start=1, end=2), op("Shape", tree.positions)
    pending = op("Sub", past, ints(tokens - 1))
    own = op("Range", op.integer(tokens - 1), op("Squeeze", past, ints(0)), op.integer(1))  # of past rows
    before = []
    for back in range(1, tokens):
        wanted, committed, row = tree.before(op, back)
        new = op("Where", committed, op("Add", op("Sub", past, tree.length), wanted), op("Add", past, row))
        before.append(op("Concat", op("Sub", own, ints(back)), new, axis=0))
    parents = op("Sub", op("Slice", before[0], pending, ints(END), ints(0)), past)
    parents = op("Max", parents, ints(-1))
    number = op("Range", op.integer(0), op("Squeeze", rows, ints(0)), op.integer(1))
    next_one = op("Equal", op("Unsqueeze", number, ints(1)), op("Sub", number, ints(1)))  # [row, row after it]
    child = op("Equal", op("Unsqueeze", number, ints(1)), op("Unsqueeze", parents, ints(0)))
    apart = op("Cast", op("And", child, op("Not", next_one)), to=int(ir.DataType.INT32))
    branches = op("Cast", op("ReduceMax", apart, ints(1), keepdims=0), to=int(ir.DataType.BOOL))
    return _Places(tuple(before), op("Squeeze", pending, ints(0)), op("Squeeze", rows, ints(0)), parents, branches)


def _computed(op: Steps, part: DeltaPart, places: _Places) -> tuple[ir.Value, ir.Value, ir.Value]:
    """Returns the node's outputs."""
    ints, wide = op.ints, part.read
    rows = op.single(op("Concat", part.qkv, *part.gates, axis=-1))
    every = op("Squeeze", op("Concat", part.past[0], rows, axis=1), ints(0))
    seen = op("Slice", every, ints(0), ints(wide), ints(1))
    gates = op("Slice", every, ints(part.tokens - 1), ints(END), ints(0))
    weight, *bias, decay, added = part.stored
    sizes = ints(wide, *[part.heads] * len(part.gates))
    _, *taking, a = insert_split(op.before, gates, 1 + len(part.gates), 1, sizes)
    weights = op.single(op("Squeeze", weight, ints(1)))

    def factor(back: int) -> ir.Value:
        place = part.tokens - 1 - back
        return op("Squeeze", op("Slice", weights, ints(place), ints(place + 1), ints(1)), ints(1))

    total = op("Mul", op("Slice", seen, ints(part.tokens - 1), ints(END), ints(0)), factor(0))
    for back, place in enumerate(places.before, 1):
        total = op("Add", total, op("Mul", op("Gather", seen, place, axis=0), factor(back)))
    for each in bias:
        total = op("Add", total, op.single(each))
    mixed = op("Mul", total, op("Sigmoid", total))
    keys = part.key_heads * part.key_width
    parts = insert_split(op.before, mixed, 3, 1, ints(keys, keys, part.heads * part.width))
    q, k, v = (
        op("Reshape", each, ints(0, -1, part.width if n == 2 else part.key_width)) for n, each in enumerate(parts)
    )
    if part.heads > part.key_heads:
        share = part.heads // part.key_heads
        owners = op("Constant", value=ir.tensor(np.arange(part.heads) // share))
        q, k = (op("Gather", each, owners, axis=1) for each in (q, k))
    steps = op("Softplus", op("Add", a, op.single(added)))
    decays = op("Exp", op("Neg", op("Mul", op("Exp", op.single(decay)), steps)))
    takes = op("Sigmoid", taking[0]) if taking else steps
    skipped = None if part.skip is None else op("Mul", v, op("Unsqueeze", op.single(part.skip), ints(1)))
    each_row = _Rows(part, q, k, v, takes, decays, skipped)
    yes = op("Constant", value=ir.tensor(np.array(True)))
    (state,) = _loop(op, f"{part.new[1]}.past", places.pending, [yes, part.past[1]], _past_row(each_row))
    states = op("SequenceConstruct", state)
    _, _, read = _loop(op, f"{part.new[1]}.rows", places.count, [yes, state, states], _new_row(each_row, places), 1)
    out = op("Reshape", read, ints(1, -1, part.heads * part.width))
    new_state = op("Identity", state)
    return op("CastLike", out, part.qkv), rows, new_state


@dataclass(frozen=True, slots=True)
class _Rows:
    """What is computed of rows before their states. q, k [N, H, D], which are not normalised; v [N, H, E]; takes,
    decays [N, H]: which part of a value is replaced or added, and what the state is multiplied by. skipped [N, H, E]:
    what is added to what a row of a state space reads."""

    part: DeltaPart
    q: ir.Value
    k: ir.Value
    v: ir.Value
    takes: ir.Value
    decays: ir.Value
    skipped: ir.Value | None


@dataclass(frozen=True, slots=True)
class _Body:
    """Adds nodes to a graph of a loop or a branch. op: adds constants to the graph around it. name: of the graph, which
    its values' names begin with: no graph around it may have one of these."""

    op: Steps
    name: str
    nodes: list[ir.Node] = field(default_factory=list)

    def __call__(self, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        node = ir.node(kind, inputs, attributes)
        node.outputs[0].name = f"{self.name}.{len(self.nodes)}"
        self.nodes.append(node)
        return node.outputs[0]

    def inner(self, name: str) -> _Body:
        """Returns one for a branch."""
        return _Body(self.op, f"{self.name}.{name}")

    def graph(self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value]) -> ir.Graph:
        return ir.Graph(inputs, outputs, nodes=self.nodes, name=self.name)


Row = Callable[[_Body, ir.Value, Sequence[ir.Value]], list[ir.Value]]  # what a loop computes of a row's number and more


def _loop(
    op: Steps, name: str, count: ir.Value, carried: Sequence[ir.Value], row: Row, scanned: int = 0
) -> Sequence[ir.Value]:
    """Runs `row` for 0, 1, ... count - 1. name: that no other loop of the graph has. carried: first whether it goes on,
    then what `row` takes and returns anew. scanned: further values that it returns, which the node joins. Returns the
    node's outputs."""
    body, number = _Body(op, name), ir.val(f"{name}.row", ir.DataType.INT64, ir.Shape([]))
    goes_on = ir.val(f"{name}.goes_on", ir.DataType.BOOL, ir.Shape([]))
    inputs = [ir.Value(name=f"{name}.carried_{n}", type=one.type, shape=one.shape) for n, one in enumerate(carried[1:])]
    outputs = row(body, number, inputs)
    end = body("Identity", goes_on)
    graph = body.graph([number, goes_on, *inputs], [end, *outputs])
    node = ir.node("Loop", [count, *carried], {"body": graph}, num_outputs=len(inputs) + scanned)
    assert isinstance(op.before.graph, ir.Graph)
    op.before.graph.insert_before(op.before, node)
    for made, given in zip(node.outputs[: len(inputs)], carried[1:], strict=True):
        made.type, made.shape = given.type, given.shape
    return node.outputs


def _past_row(rows: _Rows) -> Row:
    def row(body: _Body, number: ir.Value, carried: Sequence[ir.Value]) -> list[ir.Value]:
        return [_state_after(body, rows, number, carried[0])]

    return row


def _new_row(rows: _Rows, places: _Places) -> Row:
    """carried: the state after the row before, and a list of the state before all new rows and, for those with
    branches, after each."""
    part = rows.part

    def row(body: _Body, number: ir.Value, carried: Sequence[ir.Value]) -> list[ir.Value]:
        op, (last, states) = body.op, carried
        parent = body("Gather", places.parents, number, axis=0)
        there, elsewhere = body.inner("last"), body.inner("other")
        same = there.graph([], [there("Identity", last)])
        found = elsewhere("SequenceAt", states, elsewhere("Add", parent, op.integer(1)))
        follows = body("Equal", body("Add", parent, op.integer(1)), number)
        other = elsewhere.graph([], [found])
        state = body("If", follows, then_branch=same, else_branch=other)
        place = body("Add", number, places.pending)
        after = _state_after(body, rows, place, state)
        q = body("Gather", rows.q, place, axis=0)
        if rows.skipped is None:
            q = body("Mul", _normed(body, q), op.number(part.key_width**-0.5))
        read = body("MatMul", body("Unsqueeze", q, op.ints(1)), after)
        if rows.skipped is not None:
            own = body("Gather", rows.skipped, place, axis=0)
            read = body("Add", read, body("Unsqueeze", own, op.ints(1)))
        read = body("Reshape", read, op.ints(-1))
        kept, dropped = body.inner("kept"), body.inner("dropped")
        whole = kept.graph([], [kept("Identity", after)])
        nothing = dropped.graph([], [dropped("Slice", after, op.ints(0), op.ints(0), op.ints(0))])
        branches = body("Gather", places.branches, number, axis=0)
        stored = body("If", branches, then_branch=whole, else_branch=nothing)
        return [after, body("SequenceInsert", states, stored), read]

    return row


def _normed(body: _Body, x: ir.Value) -> ir.Value:
    """x [H, D]"""
    squares = body("ReduceSum", body("Mul", x, x), body.op.ints(1), keepdims=1)
    return body("Div", x, body("Sqrt", body("Add", squares, body.op.number(EPSILON))))


def _state_after(body: _Body, rows: _Rows, place: ir.Value, state: ir.Value) -> ir.Value:
    """The state [H, D, E] after the row at a place, from that before it."""
    ints = body.op.ints
    k, v, takes, decay = (body("Gather", each, place, axis=0) for each in (rows.k, rows.v, rows.takes, rows.decays))
    left, new = body("Mul", state, body("Unsqueeze", decay, ints(1, 2))), body("Unsqueeze", v, ints(1))
    if rows.skipped is None:
        k = _normed(body, k)
        new = body("Sub", new, body("MatMul", body("Unsqueeze", k, ints(1)), left))
    new = body("Mul", new, body("Unsqueeze", takes, ints(1, 2)))
    return body("Add", left, body("Mul", body("Unsqueeze", k, ints(2)), new))
