"""The graph that shows what its linear layers are fed: the bundle's own, with more outputs."""

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
    """model: the graph as bytes, its weights still beside the bundle's file. spec: the manifest's, with what was added
    to its outputs. layers: tensor that feeds linear layers -> (channels, their weights), in the graph's order."""

    model: bytes
    spec: GraphSpec
    layers: dict[str, tuple[int, tuple[str, ...]]]


def observable(path: Path, spec: GraphSpec) -> Observable:
    """The graph at `path` with the inputs of all its linear layers among its outputs; writes nothing.

    Raises CalibrationError for a graph without linear layers, or of sizes that the file does not tell."""
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
            raise CalibrationError(f"{path} does not tell the size of {tensor!r}; export the bundle again")
        layers[tensor] = (shape[-1], tuple(weights))
        if tensor not in spec.inputs and tensor not in spec.outputs:
            outputs[tensor] = TensorSpec("float32", shape)
            graph.output.append(known[tensor])
    return Observable(model.SerializeToString(), dataclasses.replace(spec, outputs=outputs), layers)


def _linears(graph: onnx.GraphProto) -> Iterator[tuple[str, str]]:
    """(input, weight) of every multiplication by a weight or, where it is also the embedding, by its transpose."""
    weights = {item.name for item in graph.initializer if len(item.dims) == 2}
    turned = {node.output[0]: node.input[0] for node in graph.node if node.op_type == "Transpose"}
    for node in graph.node:
        if node.op_type == "MatMul":
            tensor, factor = node.input
            weight = turned.get(factor, factor)
            if weight in weights:
                yield tensor, weight


def _shape(value: onnx.ValueInfoProto | None) -> tuple[int | str, ...]:
    """Sizes and names of sizes, empty where they are not given."""
    if value is None:
        return ()
    return tuple(dim.dim_param or dim.dim_value for dim in value.type.tensor_type.shape.dim)
