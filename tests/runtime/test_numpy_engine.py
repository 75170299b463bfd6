"""ONNX Runtime computes what ONNX's reference implementation in NumPy computes: outputs, and whole generations."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.opening.opened import bundle_of_sessions
from eagle_tools.compare_engines import compare_sessions
from insides import sessions_of
from numpy_engine import NumpySession


def numpy_sessions(bundle: Path) -> tuple[NumpySession, ...]:
    """The bundle's graphs, target first."""
    graphs = [model.graph for model in read_manifest(bundle).models.values()]
    return tuple(NumpySession(bundle / graph.file, graph) for graph in graphs)


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_outputs_of_onnx_runtime_are_those_of_numpy(
    kind: str, bundle_of: Callable[..., Path], model_of: Callable[..., EagleModel], prompts: list[list[int]]
) -> None:
    sessions = sessions_of(model_of(kind))
    differences = compare_sessions(numpy_sessions(bundle_of(kind)), sessions, 256, [prompts[0][:20], prompts[1][:5]])
    assert [(each.graph, each.output) for each in differences] == [
        ("target", "logits"), ("target", "features"), ("draft", "log_probs"), ("draft", "hidden")
    ]  # fmt: skip
    assert all(each.largest < 1e-4 * each.scale for each in differences)


@pytest.mark.parametrize(("kind", "temperature"), [("eagle1", 0.0), ("eagle3", 1.0)])
def test_generations_with_numpy_are_those_of_onnx_runtime(
    kind: str,
    temperature: float,
    bundle_of: Callable[..., Path],
    model_of: Callable[..., EagleModel],
    prompts: list[list[int]],
) -> None:
    """With drafts and without. Reference operators take milliseconds, so the texts are short."""
    bundle = bundle_of(kind)
    settings: dict[str, Any] = {"temperature": temperature, "seed": 3, "max_new_tokens": 12}
    expected = model_of(kind).generate(prompts[0][:16], method="vanilla", **settings).token_ids
    manifest = read_manifest(bundle)
    with EagleModel(bundle_of_sessions(bundle, manifest, numpy_sessions(bundle), 256)) as model:
        for method in ("vanilla", "eagle"):
            assert (
                model.generate(
                    prompts[0][:16], method=method, tree="dynamic" if method == "eagle" else None, **settings
                ).token_ids
                == expected
            )
