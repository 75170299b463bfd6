"""Mixtures of experts on a CPU: each expert is computed for the rows that are routed to it, and an expert without rows
is not read.

    order    the rows of expert 0, then those of expert 1, ...; a row stands there once for each of its k experts
    experts  x, gathered in that order and split where an expert ends; products of no rows cost a call and no memory
    result   row t: the sum of its k experts' outputs times their shares, added up in the experts' order

A row's bits depend on no other row. Which experts it has depends on it alone, as do the order and the terms of its sum.
Kernels treat an odd number of rows, or a single one, in another way than others (docs/dev/precision.md), so an expert
with an odd number gets one of its rows twice. ONNX Runtime's own MoE and QMoE operators fill up nothing
(microsoft/onnxruntime, onnxruntime/contrib_ops/cpu/moe), and take weights in another layout.

The pass rewrites the dense form that families/dense_experts.py traces. That form stays for other engines: the number of
an expert's rows is known only when its layer runs, and such shapes neither stay on a GPU nor fit an engine's profile.

Shapes: T rows, k experts per row, E experts, N = rows of all experts, H hidden.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

import onnx_ir as ir

from eagle_export.recipes.graph import Pass, Steps, insert_split, linears, made_of, only_reader, replace, size_of

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(\w+)\.weight")
MULTIPLE = 2  # of which an expert's rows are a whole number


@dataclass(frozen=True, slots=True)
class Mixture:
    """The experts of one layer, dense. readers: of each expert the nodes that read x [1, T, H]. outs: their outputs.
    chosen [1, T, k, E]: which experts a row's k are. shares [1, T, E]: their weights. total: the node that adds the
    last expert's output. names: of the experts."""

    x: ir.Value
    readers: tuple[tuple[ir.Node, ...], ...]
    outs: tuple[ir.Value, ...]
    chosen: ir.Value
    shares: ir.Value
    total: ir.Node
    names: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class RoutedExperts(Pass[Mixture]):
    """Computes experts for the rows that are routed to them alone."""

    name = "routed experts"

    def pattern(self, model: ir.Model) -> list[Mixture]:
        return mixtures(model)

    def rewrite(self, model: ir.Model, matches: list[Mixture]) -> dict[str, str]:
        for mixture in matches:
            _route(model, mixture)
        return {name: "computed for its rows alone" for mixture in matches for name in mixture.names}


def mixtures(model: ir.Model) -> list[Mixture]:
    """Returns the mixtures of a graph that are still dense."""
    layers: dict[str, dict[int, dict[str, ir.Node]]] = {}
    for linear in linears(model):
        if named := EXPERT.fullmatch(linear.name):
            layer, number, part = named.groups()
            layers.setdefault(layer, {}).setdefault(int(number), {})[part] = linear.node
    dense = []
    for layer, experts in layers.items():
        parts = [experts[number] for number in sorted(experts)]
        outs = tuple(_with_bias(expert["down_proj"].outputs[0]) for expert in parts)
        weighted = only_reader(outs[0], "Mul")
        if weighted is None:
            continue  # routed
        last = only_reader(outs[-1], "Mul")
        assert last is not None
        total = only_reader(last.outputs[0], "Add")
        x, shares = parts[0]["gate_proj"].inputs[0], made_of(weighted.inputs[1], "Slice")
        assert total is not None and x is not None and shares is not None
        readers = tuple((expert["gate_proj"], expert["up_proj"]) for expert in parts)
        names = tuple(f"{layer}.{number}" for number in sorted(experts))
        dense.append(Mixture(x, readers, outs, _ancestor(shares, "Equal"), shares, total, names))
    return dense


def _with_bias(value: ir.Value) -> ir.Value:
    """What a product becomes by the bias that is added to it, if there is one."""
    add = only_reader(value, "Add")
    return add.outputs[0] if add is not None and any(each.is_initializer() for each in add.inputs if each) else value


def _route(model: ir.Model, mixture: Mixture) -> None:
    first, count = mixture.readers[0][0], len(mixture.outs)
    hidden, k = size_of(mixture.x, 2), size_of(mixture.chosen, 2)

    op = Steps(model, first)
    ints = op.ints
    is_routed = op("ReduceSum", op("Cast", mixture.chosen, to=int(ir.DataType.INT64)), ints(0, 2), keepdims=0)  # [T, E]
    by_expert = op("Transpose", is_routed, perm=[1, 0])
    own = op("ArgMax", op("Cast", by_expert, to=int(ir.DataType.INT32)), axis=1, keepdims=0)  # [E], a row of each
    spare = op("Mod", op("ReduceSum", by_expert, ints(1), keepdims=1), op.integer(MULTIPLE))  # [E, 1]
    by_expert = op("Concat", by_expert, spare, axis=1)  # [E, T + 1]: the last column is the padding row
    number, rows = insert_split(first, op("NonZero", by_expert), 2, 0)  # [1, N], the expert and its row
    number, rows = op("Squeeze", number, ints(0)), op("Squeeze", rows, ints(0))
    is_padding = op("Equal", rows, op("Shape", mixture.x, start=1, end=2))
    rows = op("Where", is_padding, op("Gather", own, number), rows)
    gathered = op("Gather", mixture.x, rows, axis=1)  # [1, N, H]
    sizes = op("ReduceSum", by_expert, ints(1), keepdims=0)
    for name, part, nodes, out in zip(
        mixture.names, insert_split(first, gathered, count, 1, sizes), mixture.readers, mixture.outs, strict=True
    ):
        # Each expert's number of rows has a name of its own: ONNX Runtime reuses memory between tensors of equal shape.
        part.type, part.shape = mixture.x.type, ir.Shape([1, name, hidden])
        for node in nodes:
            node.replace_input_with(0, part)
        _rename_rows(part, out, name)

    op = Steps(model, mixture.total)
    places = op("CumSum", op("Reshape", by_expert, ints(-1)), op.integer(0), exclusive=1)
    places = op("Slice", op("Reshape", places, op("Shape", by_expert)), ints(0), ints(-1), ints(1))
    places = op("Reshape", op("Transpose", places, perm=[1, 0]), ints(-1))  # [T * E]
    used = op("NonZero", op("Reshape", is_routed, ints(-1)))  # [1, T * k], a row's experts in order

    def by_choice(value: ir.Value) -> ir.Value:
        """[T * E] -> [k, T]"""
        return op("Transpose", op("Reshape", op("Gather", value, used), ints(-1, k)), perm=[1, 0])

    outs = op("Concat", *mixture.outs, axis=1)  # [1, N, H]
    shares = op("Unsqueeze", by_choice(op("Reshape", mixture.shares, ints(-1))), ints(0, 3))
    weighted = op("Mul", op("Gather", outs, by_choice(places), axis=1), shares)  # [1, k, T, H]
    # Added one by one: reductions add up one row in another order than several.
    mixed, *others = insert_split(mixture.total, weighted, k, 1) if k > 1 else (weighted,)
    for other in others:
        mixed = op("Add", mixed, other)
    replace(mixture.total, op("Squeeze", mixed, ints(1)))


def _rename_rows(part: ir.Value, out: ir.Value, name: str) -> None:
    """Writes the name of an expert's number of rows into the shapes of everything from its rows to its output."""
    rest = [part]
    while rest:
        for use in rest.pop().uses():
            for value in use.node.outputs:
                value.shape = ir.Shape([1, name, size_of(value, 2)])
                if value is not out:
                    rest.append(value)


def _ancestor(value: ir.Value, op: str) -> ir.Value:
    """Returns what the nearest node of an operator computes, of those that a value depends on."""
    rest = [value]
    for each in rest:
        node = each.producer()
        if node is not None and node.op_type == op:
            return node.outputs[0]
        rest += [] if node is None else [before for before in node.inputs if before is not None]
    raise AssertionError(f"nothing before {value.name} is of {op}")
