"""What recipes need of a graph: its linear layers, new weights that are computed as they are written, new nodes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir

Array = npt.NDArray[Any]
MICROSOFT = "com.microsoft"  # domain of ONNX Runtime's own operators
KEPT_WIDE = "kept wide"  # mark of a node that recipes leave alone
KEPT = ".kept"  # behind the name of an LM head of which some columns were kept


@dataclass(frozen=True, slots=True)
class Linear:
    """A multiplication x [..., K] by a weight [K, N]. rotated: the weight lies as [N, K] behind a Transpose, since it
    is also the embedding."""

    node: ir.Node
    weight: ir.Value
    rotated: bool

    @property
    def x(self) -> ir.Value:
        """The input as it is now: the layer that computes it may have been replaced since this one was found."""
        (value, _) = self.node.inputs
        assert value is not None
        return value

    @property
    def name(self) -> str:
        """The weight's."""
        return str(self.weight.name)

    @property
    def shape(self) -> tuple[int, int]:
        """K, N"""
        assert self.weight.shape is not None
        rows, columns = self.weight.shape.numpy()
        return (columns, rows) if self.rotated else (rows, columns)

    def reader(self) -> Callable[[], Array]:
        """Reads the weight as [K, N] fp32; outlives this layer in the graph."""
        tensor, rotated = self.weight.const_value, self.rotated
        assert tensor is not None

        def read() -> Array:
            array = tensor.numpy().astype(np.float32)
            return np.ascontiguousarray(array.T) if rotated else array

        return read


def linears(model: ir.Model) -> list[Linear]:
    """Every multiplication by a weight that recipes may change, in the graph's order."""
    found = []
    for node in model.graph:
        if node.op_type != "MatMul" or KEPT_WIDE in node.meta:
            continue
        _, weight = node.inputs
        assert weight is not None
        producer = weight.producer()
        rotated = producer is not None and producer.op_type == "Transpose"
        if rotated:
            assert producer is not None and producer.inputs[0] is not None
            weight = producer.inputs[0]
        if weight.is_initializer() and weight.shape is not None and len(weight.shape) == 2:
            found.append(Linear(node, weight, rotated))
    return found


def any_linear(_: Linear) -> bool:
    """Whether a pass takes the layer: always."""
    return True


def is_lm_head(linear: Linear) -> bool:
    """Whether the layer computes the target's logits, or what the head's log-probabilities are taken of."""
    (out,) = linear.node.outputs
    casts = [use.node for use in out.uses() if use.node.op_type == "Cast"]
    if casts and len(out.uses()) == 1:  # halves are made fp32 first
        (out,) = casts[0].outputs
    return out.name == "logits" or any(use.node.op_type == "LogSoftmax" for use in out.uses())


def fed_by_product(linear: Linear) -> bool:
    """Whether its input is one activation times another, as down's is: a few values of a row are then far larger than
    the others."""
    producer = linear.x.producer()
    return producer is not None and producer.op_type == "Mul"


def fed_by_norm(linear: Linear) -> bool:
    """Whether its input is normalised, as that of q, k, v, gate and up is."""
    producer = linear.x.producer()
    return producer is not None and producer.op_type == "RMSNormalization"


def narrows(linear: Linear) -> bool:
    """Whether it puts out less than it reads, as k and v do where several query heads read them."""
    k, n = linear.shape
    return n < k


def lazy_weight(
    model: ir.Model, name: str, dtype: ir.DataType, shape: tuple[int, ...], read: Callable[[], Array]
) -> ir.Value:
    """A new initializer whose values are computed when they are written; one that is there already stays."""
    graph = model.graph
    if name in graph.initializers:
        return graph.initializers[name]
    tensor = ir.LazyTensor(lambda: ir.tensor(read(), dtype=dtype), dtype=dtype, shape=ir.Shape(shape), name=name)
    return _register(graph, name, tensor)


def pieces(compute: Callable[[], tuple[Array, ...]], count: int) -> tuple[Callable[[], Array], ...]:
    """Readers of the `count` arrays that `compute` returns. It runs when one of them is first read; each is let go as
    it is read, and what is read again is computed again."""
    held: dict[int, Array] = {}

    def read(index: int) -> Array:
        if index not in held:
            held.update(enumerate(compute()))
        return held.pop(index)

    return tuple(partial(read, index) for index in range(count))


def constant(model: ir.Model, name: str, array: Array) -> ir.Value:
    """A small initializer; one of this name that is there already stays."""
    if name in model.graph.initializers:
        return model.graph.initializers[name]
    return _register(model.graph, name, ir.tensor(array, name=name))


def insert(
    before: ir.Node, op: str, inputs: Sequence[ir.Value | None], domain: str = "", **attributes: Any
) -> ir.Value:
    """A new node before another one; returns its output."""
    node = ir.node(op, inputs, attributes, domain=domain)
    assert isinstance(before.graph, ir.Graph)
    before.graph.insert_before(before, node)
    return node.outputs[0]


def insert_split(
    before: ir.Node, value: ir.Value, parts: int, axis: int, sizes: ir.Value | None = None
) -> tuple[ir.Value, ...]:
    """A value cut along an axis into equal parts, or into parts of `sizes` [parts]."""
    inputs, attributes = ([value], {"num_outputs": parts}) if sizes is None else ([value, sizes], {})
    node = ir.node("Split", inputs, {"axis": axis, **attributes}, num_outputs=parts)
    assert isinstance(before.graph, ir.Graph)
    before.graph.insert_before(before, node)
    return tuple(node.outputs)


def replace(node: ir.Node, value: ir.Value) -> None:
    """Let `value` stand for the only output of a node, name and all, and remove the node with what fed it alone."""
    (old,) = node.outputs
    value.shape, value.type, name = old.shape, old.type, old.name
    ir.convenience.replace_all_uses_with(old, value, replace_graph_outputs=True)
    old.name = None
    value.name = name
    _remove(node)


def _remove(node: ir.Node) -> None:
    graph = node.graph
    assert isinstance(graph, ir.Graph)
    inputs = [value for value in node.inputs if value is not None]
    graph.remove(node, safe=True)
    for value in inputs:
        if value.uses() or value.is_graph_output():
            continue
        if value.is_initializer():
            graph.initializers.pop(str(value.name), None)
        elif (producer := value.producer()) is not None and not any(out.uses() for out in producer.outputs):
            _remove(producer)


def _register(graph: ir.Graph, name: str, tensor: ir.TensorProtocol) -> ir.Value:
    shape = ir.Shape(tensor.shape.numpy())
    value = ir.Value(name=name, const_value=tensor, type=ir.TensorType(tensor.dtype), shape=shape)
    graph.register_initializer(value)
    return value
