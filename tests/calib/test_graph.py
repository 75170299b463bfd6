"""Which linear layers `observable` lists, and which outputs it adds for their inputs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import TensorProto, helper, numpy_helper

from eagle_calib.errors import CalibrationError
from eagle_calib.graph import observable
from eagle_runtime.bundle.manifest import GraphSpec, TensorSpec


def tensor(name: str, shape: list[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, TensorProto.FLOAT, shape)


def graph(
    folder: Path, sizes: bool = True, weights: tuple[str, ...] = ("a", "b", "embedding")
) -> tuple[Path, GraphSpec]:
    """x -> a -> h (an output) -> b -> y; y * y^T is not a layer; y -> the transposed embedding -> z."""
    nodes = [
        helper.make_node("MatMul", ["x", "a"], ["h"]),
        helper.make_node("MatMul", ["h", "b"], ["y"]),
        helper.make_node("Transpose", ["y"], ["y_transposed"], perm=[0, 2, 1]),
        helper.make_node("MatMul", ["y", "y_transposed"], ["scores"]),
        helper.make_node("Transpose", ["embedding"], ["transposed"], perm=[1, 0]),
        helper.make_node("MatMul", ["y", "transposed"], ["z"]),
    ]
    shapes = {"a": (3, 4), "b": (4, 4), "embedding": (7, 4)}
    inputs = [tensor("x", [1, "T", 3]), *(tensor(n, list(shapes[n])) for n in shapes if n not in weights)]
    model = helper.make_model(
        helper.make_graph(
            nodes,
            "graph",
            inputs,
            [tensor("h", [1, "T", 4]), tensor("z", [1, "T", 7])],
            [numpy_helper.from_array(np.ones(shapes[name], np.float32), name) for name in weights],
            value_info=[tensor("y", [1, "T", 4])] if sizes else [],
        )
    )
    onnx.save(model, str(folder / "model.onnx"))
    outputs = {"h": TensorSpec("float32", (1, "T", 4)), "z": TensorSpec("float32", (1, "T", 7))}
    return folder / "model.onnx", GraphSpec("model.onnx", {"x": TensorSpec("float32", (1, "T", 3))}, outputs, {}, {})


def test_layers_and_added_outputs(tmp_path: Path) -> None:
    path, spec = graph(tmp_path)
    graph_with_outputs = observable(path, spec)
    assert graph_with_outputs.layers == {"x": (3, ("a",)), "h": (4, ("b",)), "y": (4, ("embedding",))}
    assert graph_with_outputs.spec.outputs == {**spec.outputs, "y": TensorSpec("float32", (1, "T", 4))}
    assert [output.name for output in onnx.load_from_string(graph_with_outputs.model).graph.output] == ["h", "z", "y"]


def test_graphs_that_cannot_be_observed(tmp_path: Path) -> None:
    path, spec = graph(tmp_path, sizes=False)
    with pytest.raises(CalibrationError, match="does not state the size of 'y'; export the bundle again"):
        observable(path, spec)
    path, spec = graph(tmp_path, weights=())
    with pytest.raises(CalibrationError, match="has no linear layers to observe"):
        observable(path, spec)
