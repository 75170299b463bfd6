"""Costs of passes: measured on the real pair, kept, and read back; a broken file only means measuring again."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from eagle_runtime import EagleModel
from eagle_runtime.cost import (
    HEAD_ROWS,
    LARGEST,
    TARGET_ROWS,
    Costs,
    Timings,
    fingerprint,
    measure,
    read_costs,
    write_costs,
)
from eagle_runtime.cost_aware import Rehearsal
from eagle_runtime.user_cache import cache_folder


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


def test_a_disturbed_measurement_does_not_make_smaller_trees_dearer() -> None:
    at = Timings((1, 2, 4), (64,), ((1.0, 9.0, 2.0),)).at(64)
    np.testing.assert_allclose(at[[1, 2, 4]], [1, 2, 2])
    assert np.all(np.diff(at) >= 0)


def test_both_graphs_are_measured(bundle_of: Callable[..., Path]) -> None:
    with EagleModel.load(bundle_of("eagle3"), backend="cpu", threads=1, context=256) as model:
        costs = measure(model._target, partial(Rehearsal, model.head))
        assert costs.head is not None
        assert costs.target.rows == TARGET_ROWS and costs.head.rows == HEAD_ROWS
        assert costs.target.contexts == (64, 192)
        assert np.all(np.array(costs.target.seconds) > 0) and np.all(np.array(costs.head.seconds) > 0)
        assert model._target.cache.length == model.head.cache.length == 0
        assert costs.plain is not None and costs.plain.rows == (1,) and costs.plain_at(64) > 0
        alone = measure(model._target, None)
        assert alone.head is alone.plain is None and alone.plain_at(64) == alone.target.at(64)[1]


def test_a_small_context_is_measured_as_far_as_it_goes(bundle_of: Callable[..., Path]) -> None:
    with EagleModel.load(bundle_of("eagle1"), backend="cpu", threads=1, context=20) as model:
        costs = measure(model._target, partial(Rehearsal, model.head))
        assert costs.target.contexts == (0,) and costs.target.rows == (1, 2, 4, 8, 16)
        assert np.all(costs.target.at(5) > 0)


def test_costs_are_kept_and_read_back(cache: Path) -> None:
    key = fingerprint(["a bundle", "cpu"])
    assert read_costs(key) is None
    write_costs(key, some_costs())
    assert read_costs(key) == some_costs()
    assert [path.suffix for path in cache.iterdir()] == [".json"]
    assert fingerprint(["another bundle", "cpu"]) != key
    with_head = Costs(some_costs().target, some_costs().target, Timings((1,), (64,), ((0.5,),)))
    write_costs(key, with_head)
    assert read_costs(key) == with_head and with_head.plain_at(9) == 0.5


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        '{"target": {}}',
        '{"target": {"rows": [1], "contexts": [1], "seconds": [[0]]}, "head": null, "plain": null}',
        '{"target": {"rows": [1, 2], "contexts": [1], "seconds": [[1.0]]}, "head": null, "plain": null}',
        '{"target": {"rows": [1], "contexts": [1], "seconds": [["x"]]}, "head": null, "plain": null}',
    ],
)
def test_what_cannot_be_read_is_as_good_as_nothing(cache: Path, text: str) -> None:
    cache.mkdir()
    (cache / "costs-key.json").write_text(text, encoding="utf-8")
    assert read_costs("key") is None


def test_a_folder_that_cannot_be_written_is_no_error(cache: Path) -> None:
    cache.write_text("a file where the folder should be", encoding="utf-8")
    write_costs("key", some_costs())
    assert read_costs("key") is None


def test_a_model_measures_once_for_a_machine(cache: Path, bundle_of: Callable[..., Path]) -> None:
    bundle = bundle_of("eagle1")
    with EagleModel.load(bundle, backend="cpu", threads=1, context=128) as model:
        first = model.costs()
        (kept,) = cache.iterdir()
        assert model.costs() is first
    with EagleModel.load(bundle, backend="cpu", threads=1, context=128) as model:
        assert model.costs() == first
        assert model.costs(measure_again=True) != first
    with EagleModel.load(bundle, backend="cpu", threads=2, context=128) as model:
        model.costs()
    assert len(list(cache.iterdir())) == 2 and json.loads(kept.read_text(encoding="utf-8"))["head"]
    shutil.rmtree(cache)


def test_the_users_own_folder_is_taken(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("EAGLE_CACHE", raising=False)
    for variable in ("XDG_CACHE_HOME", "LOCALAPPDATA", "HOME"):
        monkeypatch.setenv(variable, str(tmp_path))
    assert cache_folder().name == "eagle-edge" and cache_folder().is_relative_to(tmp_path)
