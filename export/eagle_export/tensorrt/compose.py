"""Building a new graph out of nodes and of copies of a bundle's graph, for the graphs that engines are built from."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
from onnx_ir.passes.common import RemoveUnusedNodesPass, TopologicalSortPass

from eagle_export.base.errors import ExportError
from eagle_export.graphs.trace import OPSET
from eagle_export.recipes.graph import Array, size_of
from eagle_runtime.bundle.graph import past_names

EMBEDS = "embeds"  # input [1, T, H] of engine graphs in place of input_ids: the rows of the embedding
F16, F32, INT, I32 = ir.DataType.FLOAT16, ir.DataType.FLOAT, ir.DataType.INT64, ir.DataType.INT32


@dataclass(slots=True)
class Writer:
    """Collects the nodes and weights of a new graph."""

    nodes: list[ir.Node] = field(default_factory=list)
    weights: dict[str, ir.Value] = field(default_factory=dict)

    def op(self, kind: str, *inputs: ir.Value, **attributes: Any) -> ir.Value:
        """Adds a node of one output, which it returns."""
        return self.ops(kind, *inputs, outputs=1, **attributes)[0]

    def ops(self, kind: str, *inputs: ir.Value, outputs: int, **attributes: Any) -> Sequence[ir.Value]:
        """Adds a node; returns its outputs."""
        node = ir.node(kind, inputs, attributes, num_outputs=outputs)
        node.name = f"{kind}_{len(self.nodes)}"
        for index, value in enumerate(node.outputs):
            value.name = f"{node.name}.{index}"
        self.nodes.append(node)
        return node.outputs

    def constant(self, name: str, array: Array) -> ir.Value:
        """Returns a weight of this name, which is added when it is first asked for."""
        if name not in self.weights:
            self.weights[name] = ir.val(name, const_value=ir.tensor(array, name=name))
        return self.weights[name]

    def ints(self, *numbers: int) -> ir.Value:
        """Returns int64 [n] of these numbers."""
        return self.constant("ints_" + "_".join(map(str, numbers)), np.array(numbers, np.int64))

    def take(self, values: ir.Value, index: ir.Value, axis: int = 0) -> ir.Value:
        return self.op("Gather", values, index, axis=axis)

    def flat(self, value: ir.Value) -> ir.Value:
        return self.op("Reshape", value, self.ints(-1))

    def narrow(self, ids: ir.Value) -> ir.Value:
        """Returns ids as int32, half the bytes to download."""
        return self.op("Cast", ids, to=int(ir.DataType.INT32))

    def copy(self, source: Path, prefix: str, feeds: Mapping[str, ir.Value]) -> dict[str, ir.Value]:
        """Adds a copy of a bundle's graph; returns its outputs, and as "draft_ids" the indices that its TopK returns if
        it has one.

        feeds: a value for every input, but EMBEDS for input_ids, and as tree_mask [1, 1, T, P + T] the mask over all
        columns. prefix: to the names of its nodes. Copies share the weights, so each is stored once; quantised ones by
        their place in the file, since TensorRT for RTX 1.7 fails on products that share one of int8 or int4."""
        model = ir.load(source)
        graph = model.graph
        embedding, mask = embedding_of(graph), mask_of(graph)
        outputs = {str(value.name): value for value in graph.outputs}
        for node in graph:
            if node.op_type == "TopK":
                outputs["draft_ids"] = node.outputs[1]
        graph.outputs.clear()
        ir.convenience.replace_all_uses_with(embedding.outputs[0], feeds[EMBEDS])
        ir.convenience.replace_all_uses_with(mask.outputs[0], feeds["tree_mask"])
        for value in graph.inputs:
            if value.name in feeds:
                ir.convenience.replace_all_uses_with(value, feeds[str(value.name)])
        for name, weight in [*graph.initializers.items()]:
            if any(node.op_type == "DequantizeLinear" for node, _ in weight.uses()):
                weight.name = f"{prefix}{name}"
            shared = self.weights.setdefault(str(weight.name), weight)
            if shared is not weight:
                ir.convenience.replace_all_uses_with(weight, shared)
        graph.initializers.clear()
        nodes = [*graph]
        graph.remove(nodes)
        for node in nodes:
            node.name = f"{prefix}{node.name}"
            for value in node.outputs:
                value.name = f"{prefix}{value.name}"
                value.shape = None  # T, P and R mean other sizes in each copy
            if node is embedding or node is mask:
                for index in range(len(node.inputs)):
                    node.replace_input_with(index, None)  # or their inputs would count as used
            else:
                self.nodes.append(node)
        return outputs

    def model(self, inputs: Sequence[ir.Value], outputs: Sequence[ir.Value], name: str) -> ir.Model:
        """Returns the graph of all nodes, without those that no output needs."""
        graph = ir.Graph(inputs, outputs, nodes=self.nodes, initializers=[*self.weights.values()], name=name)
        graph.opset_imports[""] = OPSET
        model = ir.Model(graph, ir_version=11)
        TopologicalSortPass()(model)
        RemoveUnusedNodesPass()(model)  # and unused weights
        return model


def mask_over_all(write: Writer, past_mask: ir.Value, tree_mask: ir.Value) -> ir.Value:
    """Returns a mask [1, 1, T, P + T] of past_mask [1, 1, 1, P], the same for all rows, and tree_mask [1, 1, T, T]."""
    rows = write.op("Slice", write.op("Shape", tree_mask), write.ints(2), write.ints(3))
    ones = write.ints(1, 1)
    shape = write.op("Concat", ones, rows, write.ints(1), axis=0)
    return write.op("Concat", write.op("Expand", past_mask, shape), tree_mask, axis=-1)


def embedding_of(graph: ir.Graph) -> ir.Node:
    """Returns the lookup of the tokens that are fed. Raises ExportError for a graph whose lookup is another one."""
    lookups = [node for node in graph if node.op_type == "Gather" and node.inputs[1] in graph.inputs]
    lookups = [node for node in lookups if node.inputs[1].name == "input_ids" and node.inputs[0].is_initializer()]  # type: ignore[union-attr]
    if len(lookups) != 1:
        raise ExportError(
            f"the graph looks tokens up in {len(lookups)} tables that can be left to the host, but must in one; export "
            "the bundle again with this release"
        )
    return lookups[0]


def table_of(graph: ir.Graph) -> ir.Value:
    """Returns the embedding [V, H]."""
    table = embedding_of(graph).inputs[0]
    assert table is not None
    return table


def mask_of(graph: ir.Graph) -> ir.Node:
    """Returns the node that puts zeros for the first columns before tree_mask."""
    (node,) = (
        node
        for node in graph
        if node.op_type == "Concat" and node.inputs[-1] is not None and node.inputs[-1].name == "tree_mask"
    )
    return node


def end_of(graph: ir.Graph, name: str) -> ir.Value:
    """Returns an input or output of a bundle's graph."""
    (end,) = (value for value in (*graph.inputs, *graph.outputs) if value.name == name)
    return end


def dtype_of(graph: ir.Graph) -> ir.DataType:
    """Returns the type that the graph computes in."""
    dtype = end_of(graph, "tree_mask").dtype
    assert dtype is not None
    return dtype


def past_of(graph: ir.Graph) -> dict[str, ir.Value]:
    """Returns inputs for past keys and values, by name, as the bundle's graph has them."""
    given = {str(value.name): value for value in graph.inputs}
    names = past_names(sum(name.startswith("past_key_values.") for name in given) // 2)
    return {name: ir.val(name, dtype_of(graph), given[name].shape) for name in names}


def embeds_of(graph: ir.Graph, rows: int | str) -> ir.Value:
    """Returns the input EMBEDS of so many rows."""
    return ir.val(EMBEDS, dtype_of(graph), [1, rows, size_of(table_of(graph), 1)])


def same_shape(graph: ir.Graph, name: str) -> Sequence[int | str]:
    """Returns the shape of an output of the bundle's graph."""
    shape = end_of(graph, name).shape
    assert shape is not None
    return [size if isinstance(size, int) else str(size) for size in shape]


def named(value: ir.Value, name: str, dtype: ir.DataType, shape: Sequence[int | str]) -> ir.Value:
    """Returns the value as an output of the graph."""
    value.name, value.dtype, value.shape = name, dtype, ir.Shape(shape)
    return value
