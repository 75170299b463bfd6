"""A target's graph traced with one layer of each kind, and completed with copies of these.

Layers of a kind differ in nothing but their weights, so their nodes are the same, and tracing all of them takes as many
times as long. Layer 0 is traced apart: what later layers share with it, such as sizes and constants, belongs to it. The
short graph has inputs in the place of taps, because it may lack the layers that they come from, and outputs for the
hidden states between layers, by which its nodes are assigned to layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import onnx_ir as ir
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from eagle_export.base.errors import ExportError
from eagle_export.graphs.graphs import TargetGraph
from eagle_export.reading.families.family import Rows
from eagle_runtime.bundle.graph import CACHE_PARTS, past_names, present_names

OF_TORCH = frozenset(vars(nn.Module()))  # of every module; parameters and buffers are compared apart
# Besides, attributes of transformers' modules in which layers of one kind differ: their number, and whether layers that
# use others' keys read theirs, of which a model that is traced in parts has none (Gemma-4).
NOT_COMPARED = OF_TORCH | {"layer_idx", "store_full_length_kv"}
COMPARED_BY_VALUE = (bool, int, float, str, tuple, list, torch.dtype)  # attributes that are compared by value
UNSUPPORTED = "this version of torch or transformers is not supported (try the tested one)"


@dataclass(frozen=True, slots=True)
class Repeats:
    """traced: numbers of the layers that are traced, ascending. like: for each layer of the target the place in
    `traced` of the layer that it is like, of itself for those that are traced. keyed: numbers of the target's layers
    that have keys and values."""

    traced: tuple[int, ...]
    like: tuple[int, ...]
    keyed: tuple[int, ...]

    def of_traced(self, rows: Rows) -> Rows:
        """Returns those of the layers that are traced. rows: of all layers that have keys."""
        return tuple(row for number, row in zip(self.keyed, rows, strict=True) if number in self.traced)


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer in a graph: its nodes in order, the hidden state after it, the cache's inputs and outputs, and its
    weights, by what follows the layer in their names."""

    nodes: list[ir.Node]
    hidden: ir.Value
    past: list[ir.Value]
    present: list[ir.Value]
    weights: dict[str, ir.Value]


def repeats_of(module: TargetGraph) -> Repeats:
    """Returns layer 0 and the first layer of each kind after it."""
    layers, types = list(module.model.layers), getattr(module.config, "layer_types", None)
    # What is declared of each layer outside of it: its window, and the name of its kind.
    kinds = list(zip(module.windows, types or [None] * len(layers), strict=True))
    traced, like = [0], [0]
    for number in range(1, len(layers)):
        for place, other in enumerate(traced):
            if place and kinds[other] == kinds[number] and _alike(layers[other], layers[number]):
                like.append(place)
                break
        else:
            like.append(len(traced))
            traced.append(number)
    return Repeats(tuple(traced), tuple(like), tuple(module.numbers))


@contextmanager
def shortened(module: TargetGraph, repeats: Repeats) -> Iterator[None]:
    """Leaves the module with the layers that are traced, until the end."""
    model, layers, numbers, windows = module.model, module.model.layers, module.numbers, module.windows
    configs = {id(config): config for config in (module.config, model.config)}.values()
    before = [(config, config.num_hidden_layers, getattr(config, "layer_types", None)) for config in configs]
    try:
        model.layers = nn.ModuleList(layers[number] for number in repeats.traced)
        module.numbers = tuple(number for number in numbers if number in repeats.traced)
        module.windows = tuple(windows[number] for number in repeats.traced)
        for config, _, types in before:
            config.num_hidden_layers = len(repeats.traced)
            if types is not None:
                config.layer_types = [types[number] for number in repeats.traced]
        yield
    finally:
        model.layers, module.numbers, module.windows = layers, numbers, windows
        for config, count, types in before:
            config.num_hidden_layers = count
            if types is not None:
                config.layer_types = types


def tap_names(count: int) -> list[str]:
    """Names of a short graph's inputs that stand for taps."""
    return [f"tap.{index}" for index in range(count)]


def hidden_names(layers: int) -> list[str]:
    """Names of a short graph's outputs that are the hidden states after its layers."""
    return [f"hidden.{number}" for number in range(layers)]


def repeat_layers(model: ir.Model, repeats: Repeats, taps: Sequence[int]) -> None:
    """Completes a short graph, in place. taps: the hidden states that its inputs of tap_names stand for.

    Raises ExportError for a graph whose layers depend on each other in another way than by the hidden state."""
    graph, traced = model.graph, repeats.traced
    short = _layers(graph, [number in repeats.keyed for number in traced])
    _check_apart(short)
    readers = [list(layer.hidden.uses()) for layer in short]  # before there are copies
    layers: list[_Layer] = []
    for number, place in enumerate(repeats.like):
        layer = short[place]
        if number != traced[place]:
            layer = _copied(layer, {short[place - 1].hidden: layers[-1].hidden}, number)
            graph.insert_after(layers[-1].nodes[-1], layer.nodes)
        layers.append(layer)
    for place, uses in enumerate(readers):
        following = traced[place + 1] if place + 1 < len(traced) else len(layers)
        for use in uses:
            use.node.replace_input_with(use.idx, layers[following - 1].hidden)
    _set_ends(graph, layers, taps)
    _set_weights(graph, layers)


def _alike(first: nn.Module, second: nn.Module) -> bool:
    """Whether modules differ in nothing but parameters' values and the layer's number. What is incomparable differs."""
    parts, others = list(first.named_modules()), list(second.named_modules())
    return len(parts) == len(others) and all(
        name == other_name and _alike_alone(part, other)
        for (name, part), (other_name, other) in zip(parts, others, strict=True)
    )


def _alike_alone(first: nn.Module, second: nn.Module) -> bool:
    """As _alike, without what is below."""
    (kind, own), (other_kind, others) = _facts(first), _facts(second)
    return kind == other_kind and own.keys() == others.keys() and all(_same(own[key], others[key]) for key in own)


def _facts(module: nn.Module) -> tuple[object, dict[str, Any]]:
    """The class of a module with its parameters' shapes and types, and its attributes and buffers that are compared."""
    shapes = {name: (tuple(each.shape), each.dtype) for name, each in module.named_parameters(recurse=False)}
    own = {key: value for key, value in vars(module).items() if key not in NOT_COMPARED}
    return (type(module), shapes), own | dict(module.named_buffers(recurse=False))


def _same(first: object, second: object) -> bool:
    if first is second:
        return True
    if isinstance(first, Tensor) and isinstance(second, Tensor):
        of_checkpoint = isinstance(first, FakeTensor) and first.shape == second.shape  # without numbers here
        return first.dtype == second.dtype and (of_checkpoint or torch.equal(first, second))
    if isinstance(first, partial) and isinstance(second, partial):
        return _same(first.func, second.func) and (first.args, first.keywords) == (second.args, second.keywords)
    return isinstance(first, COMPARED_BY_VALUE) and type(first) is type(second) and first == second


def weight_prefix(number: int) -> str:
    """What the names of a layer's weights begin with."""
    return f"model.layers.{number}."


def _layers(graph: ir.Graph, keyed: Sequence[bool]) -> list[_Layer]:
    """The layers of a short graph. keyed: of each, whether it has keys and values. The first has all that the first
    hidden state depends on; of what that of another one depends on besides, a layer has what its weights, its rows or
    the hidden state before it reach: the rest is shared by all layers of its kind, such as their mask."""
    inputs, outputs = ({str(value.name): value for value in values} for values in (graph.inputs, graph.outputs))
    past, present = past_names(sum(keyed)), present_names(sum(keyed))
    before = set[ir.Node]()
    layers: list[_Layer] = []
    for place, name in enumerate(hidden_names(len(keyed))):
        first, end = (len(CACHE_PARTS) * sum(keyed[:last]) for last in (place, place + 1))
        own, prefix = slice(first, end), weight_prefix(place)
        layer = _Layer(
            [],
            outputs[name],
            [inputs[name] for name in past[own]],
            [outputs[name] for name in present[own]],
            {name.removeprefix(prefix): one for name, one in graph.initializers.items() if name.startswith(prefix)},
        )
        above = nodes_above([layer.hidden, *layer.present]) - before
        before |= above
        reached = {*layer.past, *layer.weights.values(), *(each.hidden for each in layers[-1:])}
        for node in graph:
            if node in above and (place == 0 or not reached.isdisjoint(node.inputs)):
                layer.nodes.append(node)
                reached.update(node.outputs)
        layers.append(layer)
    return layers


def nodes_above(values: Iterable[ir.Value]) -> set[ir.Node]:
    """All nodes that values depend on."""
    found: set[ir.Node] = set()
    left = [value.producer() for value in values]
    while left:
        node = left.pop()
        if node is not None and node not in found:
            found.add(node)
            left += [value.producer() for value in node.inputs if value is not None]
    return found


def _check_apart(layers: Sequence[_Layer]) -> None:
    """Raises ExportError unless each layer after the first gives nothing but its hidden state to the next one."""
    place_of = {node: place for place, layer in enumerate(layers) for node in layer.nodes}
    for place, layer in enumerate(layers):
        following = place + 1 if place + 1 < len(layers) else None
        for value in (value for node in layer.nodes for value in node.outputs):
            readers = {place_of.get(use.node) for use in value.uses()} - {place}
            if value is layer.hidden and readers != {following}:
                raise ExportError(f"the hidden state after layer {place} is read elsewhere too; {UNSUPPORTED}")
            if value is not layer.hidden and readers and place:
                raise ExportError(f"layer {place} gives {value.name} to other parts of the trace; {UNSUPPORTED}")


def _copied(layer: _Layer, known: Mapping[ir.Value, ir.Value], number: int) -> _Layer:
    """A copy of a layer as layer `number`. known: what it reads in the place of values of others."""
    past = [_like(value, number) for value in layer.past]
    weights = {name: _like(value, number) for name, value in layer.weights.items()}
    values = {**known, **dict(zip(layer.past, past, strict=True))}
    values |= {value: weights[name] for name, value in layer.weights.items()}
    nodes = copied_nodes(layer.nodes, values, number)
    return _Layer(nodes, values[layer.hidden], past, [values[value] for value in layer.present], weights)


def copied_nodes(nodes: Sequence[ir.Node], values: dict[ir.Value, ir.Value], end: object) -> list[ir.Node]:
    """Returns copies of nodes in order, whose names have another end. values: what copies read in the place of values;
    those that they write in the place of the nodes' own are added."""
    copies = []
    for node in nodes:
        attributes = list(node.attributes.values())
        if any(each.type in (ir.AttributeType.GRAPH, ir.AttributeType.GRAPHS) for each in attributes):
            raise ExportError(f"a layer holds a graph, in its {node.op_type}; {UNSUPPORTED}")
        outputs = [_like(value, end) for value in node.outputs]
        read = [None if value is None else values.get(value, value) for value in node.inputs]
        copies.append(ir.Node(node.domain, node.op_type, read, attributes, outputs=outputs, name=f"{node.name}.{end}"))
        values |= dict(zip(node.outputs, outputs, strict=True))
    return copies


def _like(value: ir.Value, end: object) -> ir.Value:
    """A value of the same type."""
    shape = None if value.shape is None else value.shape.copy()
    return ir.Value(name=f"{value.name}.{end}", shape=shape, type=value.type, const_value=value.const_value)


def _set_ends(graph: ir.Graph, layers: Sequence[_Layer], taps: Sequence[int]) -> None:
    """Gives a graph the inputs and outputs of all layers' rows, and connects its taps."""
    names = set(tap_names(len(taps)))
    stand_ins = [value for value in graph.inputs if value.name in names]
    for value, tap in zip(stand_ins, taps, strict=True):
        _read_length_elsewhere(graph, value)
        ir.convenience.replace_all_uses_with(value, layers[tap - 1].hidden)
    past = [value for layer in layers for value in layer.past]
    present = [value for layer in layers for value in layer.present]
    hidden = [layer.hidden for layer in layers]
    gone = {*past, *present, *hidden, *stand_ins}
    for ends, rows in ((graph.inputs, past), (graph.outputs, present)):
        others = [value for value in ends if value not in gone]
        ends.clear()
        ends.extend([*others, *rows])
    keyed = len(past) // len(CACHE_PARTS)
    numbered = ((past, past_names(keyed)), (present, present_names(keyed)), (hidden, hidden_names(len(layers))))
    for values, own_names in numbered:
        for value, name in zip(values, own_names, strict=True):
            value.name = name


def _read_length_elsewhere(graph: ir.Graph, tap: ir.Value) -> None:
    """Lets nodes that read the number of rows from a tap [1,T,H] read it from input_ids [1,T], which is there before
    them: torch takes a dimension's size from any input that has it."""
    (input_ids,) = (value for value in graph.inputs if value.name == "input_ids")
    for use in list(tap.uses()):
        if use.node.op_type == "Shape":
            if (use.node.attributes.get_int("start", 0), use.node.attributes.get_int("end", 3)) != (1, 2):
                raise ExportError(f"the trace reads more of a tap's shape than its rows; {UNSUPPORTED}")
            use.node.replace_input_with(0, input_ids)


def _set_weights(graph: ir.Graph, layers: Sequence[_Layer]) -> None:
    """Registers the weights of all layers in their order, where those of the short graph were."""
    before = list(graph.initializers.values())
    own = dict.fromkeys(value for layer in layers for value in layer.weights.values())
    first = next(index for index, value in enumerate(before) if value in own)
    others = [value for value in before if value not in own]
    for value in before:
        graph.initializers.pop(str(value.name))
    for number, layer in enumerate(layers):
        for name, value in layer.weights.items():
            value.name = weight_prefix(number) + name
    for value in [*others[:first], *own, *others[first:]]:
        graph.register_initializer(value)
