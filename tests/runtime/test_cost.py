"""Tables of costs: straight lines between sizes, and measuring them before a generation."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from eagle_runtime import EagleModel
from eagle_runtime.drafting.cost_measurement import measure
from eagle_runtime.drafting.cost_model import HEAD_ROWS, LARGEST, TARGET_ROWS, Costs, Timings
from eagle_runtime.drafting.cost_storage import file_name
from eagle_runtime.machine import user_cache
from eagle_runtime.machine.user_cache import cache_folder
from eagle_runtime.opening.backends import library_version


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("EAGLE_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


def some_costs() -> Costs:
    return Costs(Timings((1, 8, 64), (64, 2048), ((1.0, 2.0, 4.0), (2.0, 3.0, 5.0))), None)


def test_between_measured_sizes_costs_are_straight_lines() -> None:
    timings = some_costs().target
    near = timings.at(64)
    assert len(near) == LARGEST + 1
    np.testing.assert_allclose(near[[1, 8, 64]], [1, 2, 4])
    np.testing.assert_allclose(near[36], 3)
    np.testing.assert_allclose(timings.at(2048)[[1, 8, 64]], [2, 3, 5])
    np.testing.assert_allclose(timings.at(1056)[1], 1.5)
    np.testing.assert_allclose(timings.at(0)[1], 1)


def test_a_disturbed_measurement_does_not_raise_the_cost_of_smaller_trees() -> None:
    at = Timings((1, 2, 4), (64,), ((1.0, 9.0, 2.0),)).at(64)
    np.testing.assert_allclose(at[[1, 2, 4]], [1, 2, 2])
    assert np.all(np.diff(at) >= 0)


def test_both_graphs_are_measured(bundle_of: Callable[..., Path]) -> None:
    with EagleModel.load(bundle_of("eagle3"), backend="cpu", threads=1, context=256) as model:
        costs = measure(model.bundle.target, model.head)
        assert costs.head is not None
        assert costs.target.rows == TARGET_ROWS and costs.head.rows == HEAD_ROWS
        assert costs.target.contexts == (64, 192)
        assert np.all(np.array(costs.target.seconds) > 0) and np.all(np.array(costs.head.seconds) > 0)
        assert model.bundle.target.cache.length == model.head.cache.length == 0
        assert costs.plain is not None and costs.plain.rows == (1,) and costs.plain_at(64) > 0
        alone = measure(model.bundle.target, None)
        assert alone.head is alone.plain is None and alone.plain_at(64) == alone.target.at(64)[1]


def test_a_small_context_is_measured_as_far_as_it_goes(bundle_of: Callable[..., Path]) -> None:
    with EagleModel.load(bundle_of("eagle1"), backend="cpu", threads=1, context=20) as model:
        costs = measure(model.bundle.target, model.head)
        assert costs.target.contexts == (0,) and costs.target.rows == (1, 2, 4, 8, 16)
        assert np.all(costs.target.at(5) > 0)


def test_costs_of_another_library_or_processor_are_others(monkeypatch: pytest.MonkeyPatch) -> None:
    key = file_name(["a bundle", "cpu"])
    assert file_name(["a bundle", "cpu"]) == key != file_name(["another bundle", "cpu"])
    for place, name, other in (
        (metadata, "version", lambda package: "9"),
        (user_cache, "processor_features", lambda: ("fpu",)),
    ):
        with monkeypatch.context() as patch:
            patch.setattr(place, name, other)
            assert file_name(["a bundle", "cpu"]) != key
    assert file_name(["a bundle", "cpu"]) == key


def test_the_version_of_the_engine_library(monkeypatch: pytest.MonkeyPatch) -> None:
    import onnxruntime

    assert library_version("cpu") == library_version("cuda") == f"onnxruntime {onnxruntime.__version__}"
    monkeypatch.setitem(sys.modules, "tensorrt_rtx", SimpleNamespace(__version__="1.7"))
    assert library_version("tensorrt-rtx") == "tensorrt_rtx 1.7"
    monkeypatch.delitem(sys.modules, "tensorrt_rtx")
    assert library_version("tensorrt-rtx") == "tensorrt_rtx "  # and nothing was imported for it


def test_measured_costs_are_returned_and_kept(cache: Path, bundle_of: Callable[..., Path]) -> None:
    bundle = bundle_of("eagle1")
    with EagleModel.load(bundle, backend="cpu", threads=1, context=128) as model:
        of_shapes = model.costs()
        assert not cache.exists()
        measured = model.costs(measure_again=True)
        assert measured != of_shapes and model.costs() == measured
        (kept,) = cache.iterdir()
        assert json.loads(kept.read_text(encoding="utf-8"))["costs"]["head"]
    with EagleModel.load(bundle, backend="cpu", threads=1, context=128) as model:
        np.testing.assert_allclose(model.costs().target.at(100), measured.target.at(100), rtol=1e-6)
    with EagleModel.load(bundle, backend="cpu", threads=2, context=128) as model:
        assert model.costs() == of_shapes
    assert list(cache.iterdir()) == [kept]


def test_measuring_between_two_pieces_leaves_the_conversation_alone(
    cache: Path, bundle_of: Callable[..., Path]
) -> None:
    with EagleModel.load(bundle_of("eagle1"), backend="cpu", threads=1, context=256) as model:
        settings: dict[str, Any] = {"max_new_tokens": 24, "ignore_eos": True}
        wanted = model.generate([5, 6, 7], method="vanilla", **settings).token_ids
        tokens: list[int] = []
        for number, piece in enumerate(model.stream([5, 6, 7], **settings)):
            tokens += piece.token_ids
            if number == 2:
                model.costs(measure_again=True)
        assert tuple(tokens) == wanted


def test_the_users_own_folder_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EAGLE_CACHE", raising=False)
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    assert cache_folder().name == "eagle-edge" and cache_folder().is_relative_to(tmp_path)
