"""Tables of costs: straight lines between sizes, and where they are kept."""

from __future__ import annotations

import sys
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from eagle_runtime.drafting.cost_model import LARGEST, Costs, Timings
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


def test_the_users_own_folder_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EAGLE_CACHE", raising=False)
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    assert cache_folder().name == "eagle-edge" and cache_folder().is_relative_to(tmp_path)
