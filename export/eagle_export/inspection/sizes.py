"""Bytes of a pair's graphs at each precision, from shapes alone: which linear layers there are, what computes their
inputs, and how recipes store them.

The recipes themselves are run, on a graph that has one linear layer of each kind and shape and computes nothing: what
stands before a layer decides how recipes store it, and its values are never read.

Shapes: K inputs and N outputs of a layer, V vocabulary, H hidden.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, Literal

import onnx_ir as ir

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.kinds import KINDS, placed
from eagle_export.reading.checkpoint import EMBEDDING, LAYERS_TABLE, LM_HEAD, Checkpoint, is_table
from eagle_export.reading.families.family import Family
from eagle_export.reading.stored_tensors import StoredTensor
from eagle_export.recipes.attention import ExactAttention
from eagle_export.recipes.fp16_sums import Fp16Sums
from eagle_export.recipes.graph import Pass
from eagle_export.recipes.plan import RECIPES, Passes, Recipe, routes_experts
from eagle_export.recipes.qdq import Int8Weights, StaticProducts
from eagle_export.recipes.smooth import Smooth

# What computes a layer's input, or that it is last.
Before = Literal["norm", "product", "attention", "joined", "lm_head"]
OPERATORS = {"norm": "RMSNormalization", "product": "Mul", "attention": "Reshape", "joined": "Concat", "lm_head": "Neg"}
HEAD_EMBEDDING = "embed_tokens.weight"
MAPS = ("d2t", "t2d")
MAP_BYTES = 8  # of a draft token's id in the graph
LOOKUPS = ("Gather", "GatherBlockQuantized")
Table = tuple[str, tuple[int, int]]


@dataclass(frozen=True, slots=True)
class Layers:
    """Linear layers that are alike. name: of the first one's weight. shape: (K, N). count: how many there are."""

    name: str
    before: Before
    shape: tuple[int, int]
    count: int = 1


@dataclass(frozen=True, slots=True)
class GraphShapes:
    """A graph's weights. layers: without a tied LM head. table: name and shape [V, H] of the embedding. more: other
    tables, of which tokens read a row. tied: whether the embedding is also the LM head. numbers: of all other tensors
    in floats; rest: bytes of those in whole numbers. chosen: the share of a layer's experts that one row needs."""

    layers: tuple[Layers, ...]
    table: Table
    tied: bool
    numbers: int
    rest: int = 0
    chosen: float = 1.0
    more: tuple[Table, ...] = ()


@dataclass(frozen=True, slots=True)
class GraphBytes:
    """stored: bytes of a graph's weights. read: of those that a forward pass over one row reads, which are all but the
    rows of the embedding that no token asks for, and the experts that it does not choose."""

    stored: int
    read: int


def alike(layers: Iterable[Layers]) -> tuple[Layers, ...]:
    """Counts layers of the same kind and shape as one."""
    first, counts = dict[tuple[Any, ...], Layers](), Counter[tuple[Any, ...]]()
    for layer in layers:
        # The part that the layer has in its block, such as mlp.up_proj; experts are of another kind.
        key = (layer.name.rsplit(".", 2)[-2], ".experts." in layer.name, layer.before, layer.shape)
        first.setdefault(key, layer)
        counts[key] += layer.count
    return tuple(replace(layer, count=counts[key]) for key, layer in first.items())


def graph_bytes(shapes: GraphShapes, backend: str, precision: str, graph: str) -> GraphBytes:
    """Bytes of a graph's weights. graph: "target" or "draft". precision: of that graph."""
    recipe = RECIPES[backend][precision]
    dtype = ir.DataType.FLOAT if recipe.traced == "fp32" else ir.DataType.FLOAT16
    model = _skeleton(shapes, dtype)
    for step in _storing(recipe, graph):
        step.apply(model)
    counts = {layer.name: layer.count for layer in shapes.layers} | {
        name: 1 for name, _ in (shapes.table, *shapes.more)
    }
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
    """The passes of a recipe that store weights. Static products store them in as many bytes as Int8Weights does."""
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
    ids, x = ir.val("input_ids", ir.DataType.INT64), ir.val("x", dtype)
    weights = [_weight(name, shape, dtype) for name, shape in (shapes.table, *shapes.more)]
    nodes, table = [ir.node("Gather", [each, ids]) for each in weights], weights[0]
    outputs = [node.outputs[0] for node in nodes]
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
    return ir.val(name, const_value=ir.LazyTensor(_no_values, dtype=dtype, shape=ir.Shape(shape), name=name))


def _no_values() -> ir.TensorProtocol:
    raise AssertionError("sizes need no values")


def pair_shapes(
    family: Family, target: Checkpoint, head: Checkpoint | None, config: HeadConfig | None
) -> dict[str, GraphShapes]:
    """The graphs "target" and, if there is a head that fits, "draft"."""
    shapes = {"target": target_shapes(family, target, head, config)}
    if head is not None and config is not None:
        shapes["draft"] = draft_shapes(target, head, config)
    return shapes


def target_shapes(
    family: Family, target: Checkpoint, head: Checkpoint | None, config: HeadConfig | None
) -> GraphShapes:
    """The target's graph, with the part of an EAGLE-3 or block head that reads its taps."""
    experts = family.experts
    counts = None if experts is None else experts.counts(target.config)
    layers, numbers, scorers = [], 0, family.scorers
    for name, tensor in target.tensors.items():
        if name in (EMBEDDING, LAYERS_TABLE) or is_table(name):
            continue
        if _is_layer(name, tensor) and not name.endswith(scorers):
            layers.append(_layer(name, tensor, _before(name)))
        else:
            numbers += prod(tensor.shape)
    if head is not None and config is not None:
        for name in placed(config, head.tensors)[1]:
            tensor = head.tensors[name]
            if _is_layer(name, tensor):
                joined = name == "fc.weight" and config.tap_norm != "all"
                layers.append(_layer(f"head_reader.{name}", tensor, "joined" if joined else "norm"))
            else:
                numbers += prod(tensor.shape)
    table, *more = (_table(target, name) for name in (EMBEDDING, LAYERS_TABLE) if name in target.tensors)
    chosen = 1.0 if counts is None else counts[1] / counts[0]
    tied = LM_HEAD not in target.tensors
    return GraphShapes(alike(layers), table, tied, numbers, chosen=chosen, more=tuple(more))


def draft_shapes(target: Checkpoint, head: Checkpoint, config: HeadConfig) -> GraphShapes:
    """The head's graph, with what it borrows of the target."""
    layers, numbers = [], 0
    for name in placed(config, head.tensors)[0]:
        tensor = head.tensors[name]
        if name in (*MAPS, HEAD_EMBEDDING):
            continue
        if _is_layer(name, tensor):
            joined = re.match(KINDS[config.kind].joined, name) is not None
            before: Before = "lm_head" if name.endswith(".lm_head.weight") else "joined" if joined else _before(name)
            layers.append(_layer(f"head.{name}", tensor, before))
        else:
            numbers += prod(tensor.shape)
    borrowed = target.tensors.get(LM_HEAD)
    if config.borrows_lm_head and borrowed is not None:
        layers.append(_layer(LM_HEAD, borrowed, "lm_head"))
    table = head.tensors.get(HEAD_EMBEDDING, target.tensors[EMBEDDING])
    copied = config.borrows or config.ahead is not None
    name = EMBEDDING if table is target.tensors[EMBEDDING] or copied else f"head.{HEAD_EMBEDDING}"
    rest = MAP_BYTES * config.draft_vocab_size if "d2t" in head.tensors else 0
    rows, width = table.shape
    tied = config.borrows_lm_head and borrowed is None
    return GraphShapes(alike(layers), (name, (rows if config.embeds else 0, width)), tied, numbers, rest)


def _table(target: Checkpoint, name: str) -> Table:
    rows, width = target.tensors[name].shape
    return name, (rows, width)


def _is_layer(name: str, tensor: StoredTensor) -> bool:
    return len(tensor.shape) == 2 and name.endswith(".weight")


def _before(name: str) -> Before:
    if name == LM_HEAD:
        return "lm_head"
    part = name.split(".")[-2]
    if part in ("down_proj", "w2", "output_linear"):
        return "product"
    return "attention" if part in ("o_proj", "out_proj") else "norm"


def _layer(name: str, tensor: StoredTensor, before: Before) -> Layers:
    n, k = tensor.shape
    return Layers(name, before, (k, n))
