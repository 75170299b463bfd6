"""A bundle's graph with the inputs of its linear layers as additional outputs."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from eagle_calib.errors import CalibrationError
from eagle_runtime.bundle.manifest import GraphSpec, TensorSpec

if TYPE_CHECKING:
    import onnx


@dataclass(frozen=True, slots=True)
class Observable:
    """model: the graph as bytes, which refer to the weights next to the bundle's file. spec: the manifest's, with the
    additional outputs. layers: input tensor -> (its channels, the weights of the layers that read it), in the graph's
    order."""

    model: bytes
    spec: GraphSpec
    layers: dict[str, tuple[int, tuple[str, ...]]]


def observable(path: Path, spec: GraphSpec) -> Observable:
    """Returns the graph at `path` with the inputs of all linear layers among its outputs. Writes no file.

    Raises CalibrationError for a graph without linear layers, or with inputs of unknown size."""
    import onnx

    model = onnx.load(str(path), load_external_data=False)
    graph = model.graph
    known = {value.name: value for value in (*graph.input, *graph.output, *graph.value_info)}
    feeds: dict[str, list[str]] = {}
    for tensor, weight in _linears(graph):
        assert not any(weight in others for others in feeds.values()), f"two layers with the weight {weight}"
        feeds.setdefault(tensor, []).append(weight)
    if not feeds:
        raise CalibrationError(f"{path} has no linear layers to observe; export the bundle again")
    outputs, layers = dict(spec.outputs), {}
    for tensor, weights in feeds.items():
        shape = _shape(known.get(tensor))
        if not shape or not isinstance(shape[-1], int) or not all(shape):
            raise CalibrationError(f"{path} does not state the size of {tensor!r}; export the bundle again")
        layers[tensor] = (shape[-1], tuple(weights))
        if tensor not in spec.inputs and tensor not in spec.outputs:
            outputs[tensor] = TensorSpec("float32", shape)
            graph.output.append(known[tensor])
    return Observable(model.SerializeToString(), dataclasses.replace(spec, outputs=outputs), layers)


def _linears(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """Yields (input, weight) of each product with a weight or, if it is also the embedding, with its transpose."""
    weights = {item.name for item in graph.initializer if len(item.dims) == 2}
    transposed = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Transpose"}
    for node in graph.node:
        if node.op_type == "MatMul":
            tensor, factor = node.input
            weight = transposed.get(factor, factor)
            if weight in weights:
                yield tensor, weight


def _shape(value: onnx.ValueInfoProto | None) -> tuple[int | str, ...]:
    """Returns the sizes or the names of dynamic sizes; empty if the shape is unknown."""
    if value is None:
        return ()
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)
