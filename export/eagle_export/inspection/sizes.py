"""Bytes of a pair's graphs at each precision, from shapes alone.

The recipes themselves are run, on a graph that has one linear layer of each kind and shape and computes nothing: what
stands before a layer decides how recipes store it, and its values are never read.

Shapes: K inputs and N outputs of a layer, V vocabulary, H hidden.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import onnx_ir as ir

from eagle_export.recipes.attention import ExactAttention
from eagle_export.recipes.fp16_sums import Fp16Sums
from eagle_export.recipes.graph_pass import Pass
from eagle_export.recipes.plan import AUTO, RECIPES, Passes, Recipe, routes_experts
from eagle_export.recipes.qdq import Int8Weights, StaticProducts
from eagle_export.recipes.smooth import Smooth

Before = Literal[
    "norm", "product", "attention", "joined", "lm_head"
]  # what computes a layer's input, or that it is last
OPERATORS = {"norm": "RMSNormalization", "product": "Mul", "attention": "Reshape", "joined": "Concat", "lm_head": "Neg"}
LOOKUPS = ("Gather", "GatherBlockQuantized")


@dataclass(frozen=True, slots=True)
class Layers:
    """Linear layers that are alike. name: of the first one's weight. shape: (K, N). count: how many there are."""

    name: str
    before: Before
    shape: tuple[int, int]
    count: int = 1


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """A graph's weights. layers: without a tied LM head. table: name and shape [V, H] of the embedding. tied: whether
    it is also the LM head. numbers: of all other tensors in floats; rest: bytes of those in whole numbers. chosen: the
    share of a layer's experts that one row needs."""

    layers: tuple[Layers, ...]
    table: tuple[str, tuple[int, int]]
    tied: bool
    numbers: int
    rest: int = 0
    chosen: float = 1.0


@dataclass(frozen=True, slots=True)
class GraphBytes:
    """stored: bytes of a graph's weights. read: of those that a forward pass over one row reads, which are all but the
    rows of the embedding that no token asks for, and the experts that it does not choose."""

    stored: int
    read: int

    def __add__(self, other: GraphBytes) -> GraphBytes:
        return GraphBytes(self.stored + other.stored, self.read + other.read)


def alike(layers: Iterable[Layers]) -> tuple[Layers, ...]:
    """Counts layers of the same kind and shape as one."""
    counted: dict[tuple[Any, ...], Layers] = {}
    for layer in layers:
        # The part that the layer has in its block, such as mlp.up_proj; experts are of another kind.
        key = (layer.name.split(".")[-2], ".experts." in layer.name, layer.before, layer.shape)
        first = counted.get(key)
        counted[key] = layer if first is None else replace(first, count=first.count + layer.count)
    return tuple(counted.values())


def precisions_of(backend: str) -> tuple[str, ...]:
    """Precisions whose size shapes decide: all but "auto", which measures."""
    return tuple(name for name in RECIPES[backend] if name != AUTO)


def graph_bytes(shapes: GraphShapes, backend: str, precision: str, graph: str) -> GraphBytes:
    """Bytes of a graph's weights. graph: "target" or "draft". precision: of that graph."""
    recipe = RECIPES[backend][precision]
    dtype = ir.DataType.FLOAT if recipe.traced == "fp32" else ir.DataType.FLOAT16
    model = _skeleton(shapes, dtype)
    for step in _storing(recipe, graph):
        step.apply(model)
    counts = {layer.name: layer.count for layer in shapes.layers} | {shapes.table[0]: 1}
    stored = read = shapes.numbers * dtype.itemsize + shapes.rest
    for name, value in model.graph.initializers.items():
        owner = next((key for key in counts if name == key or name.startswith(f"{key}.")), None)
        if owner is None or value.const_value is None:
            continue  # the recipes' small constants
        size = int(value.const_value.nbytes) * counts[owner]
        stored += int(size)
        share = shapes.chosen if ".experts." in owner and routes_experts(backend) else 1.0
        read += 0 if _only_looked_up(value) else int(share * size)
    return GraphBytes(int(stored), int(read))


def _storing(recipe: Recipe, graph: str) -> Passes:
    """The passes of a recipe that decide how weights are stored. Static products store them in as many bytes as int8 of
    weights alone."""
    make = recipe.draft if graph == "draft" and recipe.draft is not None else recipe.target
    passes: list[Pass[Any]] = []
    for step in make(None):
        if isinstance(step, StaticProducts):
            passes.append(Int8Weights(wanted=step.takes))
        elif not isinstance(step, ExactAttention | Smooth | Fp16Sums):
            passes.append(step)
    return tuple(passes)


def _only_looked_up(value: ir.Value) -> bool:
    """Whether rows of a weight are read by number alone."""
    nodes = [use.node for use in value.uses()]
    reshaped = [use.node for node in nodes if node.op_type == "Reshape" for use in node.outputs[0].uses()]
    nodes = [node for node in nodes if node.op_type != "Reshape"] + reshaped
    return bool(nodes) and all(node.op_type in LOOKUPS for node in nodes)


def _skeleton(shapes: GraphShapes, dtype: ir.DataType) -> ir.Model:
    """Returns a graph with the layers, fed by operators of the kinds that are before them."""
    ids = ir.Value(name="input_ids", type=ir.TensorType(ir.DataType.INT64))
    x = ir.Value(name="x", type=ir.TensorType(dtype))
    table = _weight(*shapes.table, dtype)
    nodes, weights = [ir.node("Gather", [table, ids])], [table]
    outputs = [nodes[0].outputs[0]]
    for layer in shapes.layers:
        weights.append(_weight(layer.name, layer.shape, dtype))
        nodes += _linear(layer.before, x, weights[-1], dtype)
        outputs.append(nodes[-1].outputs[0])
    if shapes.tied:
        turned = ir.node("Transpose", [table])
        nodes += [turned, *_linear("lm_head", x, turned.outputs[0], dtype)]
        outputs.append(nodes[-1].outputs[0])
    for index, output in enumerate(outputs):
        output.name = output.name or f"out_{index}"
        output.type = ir.TensorType(dtype)
    graph = ir.Graph([ids, x], outputs, nodes=nodes, initializers=weights, opset_imports={"": 24})
    return ir.Model(graph, ir_version=10)


def _linear(before: Before, x: ir.Value, weight: ir.Value, dtype: ir.DataType) -> Sequence[ir.Node]:
    """Nodes of a layer, the product last."""
    feeding = ir.node(OPERATORS[before], [x])
    feeding.outputs[0].type = ir.TensorType(dtype)
    product = ir.node("MatMul", [feeding.outputs[0], weight])
    if before == "lm_head":
        product.outputs[0].name = "logits"
    return feeding, product


def _weight(name: str, shape: tuple[int, int], dtype: ir.DataType) -> ir.Value:
    tensor = ir.LazyTensor(_no_values, dtype=dtype, shape=ir.Shape(shape), name=name)
    return ir.Value(name=name, const_value=tensor, type=ir.TensorType(dtype), shape=ir.Shape(shape))


def _no_values() -> ir.TensorProtocol:
    raise AssertionError("sizes need no values")
