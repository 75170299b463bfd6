"""The graphs that move rows are valid ONNX and compute what their docstrings say."""

from __future__ import annotations

from typing import Any

import numpy as np
import onnx
import pytest
from onnx.reference import ReferenceEvaluator

from eagle_runtime.ort import small_graphs


@pytest.mark.parametrize(
    "graph", [small_graphs.allocate, small_graphs.pick, small_graphs.move, small_graphs.candidates]
)
def test_graphs_are_bytes_as_onnx_writes_them(graph: Any) -> None:
    model = onnx.load_model_from_string(graph())
    onnx.checker.check_model(model, full_check=True)
    assert model.SerializeToString() == graph()


def test_graphs_compute_what_they_should() -> None:
    """As onnx's reference evaluator computes them."""
    words = np.arange(2 * 6 * 3, dtype=np.float32).reshape(2, 6, 3)

    def run(graph: bytes, **feeds: Any) -> Any:
        (result,) = ReferenceEvaluator(onnx.load_model_from_string(graph)).run(None, feeds)
        return result

    zeros = run(small_graphs.allocate(), shape=np.array([5]))
    assert zeros.dtype == np.float32 and zeros.tolist() == [0] * 5
    index = np.array([1, 4, 5])
    np.testing.assert_array_equal(run(small_graphs.pick(), rows=words[0], index=index), words[0, index])
    places = np.array([[[array, 2 + row] for row in range(3)] for array in range(2)])
    moved = words.copy()
    moved[:, 2:5] = words[:, index]
    np.testing.assert_array_equal(run(small_graphs.move(), cache=words, index=index, places=places), moved)


def test_fields_longer_than_seven_bits() -> None:
    names = [f"{'x' * 200}{i}" for i in range(3)]
    model = small_graphs.model([small_graphs.node("Sum", names, ["y"])], dict.fromkeys(names, (1, 1)), {"y": (1, 1)})
    parsed = onnx.load_model_from_string(model)
    assert [value.name for value in parsed.graph.input] == names and parsed.SerializeToString() == model
