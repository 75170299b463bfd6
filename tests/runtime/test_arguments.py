"""Settings of the wrong type or range are refused where they come in, by name, and shown short."""

from __future__ import annotations

import copy
import dataclasses
import inspect
import math
import pickle
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest

from eagle_runtime import EagleModel, RequestError, SamplingParams, Settings
from eagle_runtime.base.arguments import short_repr
from eagle_runtime.drafting.shapes import DynamicTree
from eagle_runtime.sampling.sampler import Sampler

NUMBERS = ("temperature", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty")
WHOLE = ("max_new_tokens", "seed", "top_k", "total_token", "depth", "draft_top_k")
PROMPT = [5, 6, 7]


class Unshowable:
    def __repr__(self) -> str:
        raise ValueError


@pytest.mark.parametrize(
    "value", ["0.7", None, [0.7], True, math.nan, math.inf, 1j, np.float32("nan"), 10**400, "x" * 10**7]
)
@pytest.mark.parametrize("name", NUMBERS)
def test_numbers(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=name) as refused:
        SamplingParams(**{name: value})
    assert len(str(refused.value)) < 200


@pytest.mark.parametrize("value", [2.5, 2.0, "7", [7], True, np.bool_(True), np.float64(3), math.nan, -3, Unshowable()])
@pytest.mark.parametrize("name", WHOLE)
def test_whole_numbers(name: str, value: Any, model_of: Callable[..., EagleModel]) -> None:
    with pytest.raises(RequestError, match=f"{name} is ") as refused:
        model_of("eagle1").stream(PROMPT, **{name: value})
    assert len(str(refused.value)) < 200


def test_a_length_of_none(model_of: Callable[..., EagleModel]) -> None:
    with pytest.raises(RequestError, match="max_new_tokens is None"):
        model_of("eagle1").stream(PROMPT, max_new_tokens=None)  # type: ignore[arg-type]


@pytest.mark.parametrize("name", ["top_k", "temperature", "top_p", "logit_bias", "stop"])
def test_none_is_what_the_model_recommends(name: str, model_of: Callable[..., EagleModel]) -> None:
    settings: dict[str, Any] = {"max_new_tokens": 4, "seed": 3}
    model = model_of("eagle1")
    none: dict[str, Any] = {name: None}
    assert model.generate(PROMPT, **settings, **none).token_ids == model.generate(PROMPT, **settings).token_ids


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_model_is_not_copied(copied: Callable[[EagleModel], Any], model_of: Callable[..., EagleModel]) -> None:
    with pytest.raises(TypeError, match=r"load the bundle there, or call twin\(\)"):
        copied(model_of("eagle1"))


@pytest.mark.parametrize(
    "bias",
    [
        {10**30: 1.0},
        {-1: 1.0},
        {"5": 1.0},
        {2.5: 1.0},
        {True: 1.0},
        {None: 1.0},
        {5: "1"},
        {5: None},
        {5: math.nan},
        {5: math.inf},
        {5: [1]},
        {5: 10**400},
        {10**5000: 1.0},
        [5, 1.0],
        "5=1",
    ],
)
def test_biases(bias: Any, model_of: Callable[..., EagleModel]) -> None:
    with pytest.raises(RequestError, match="logit_bias") as refused:
        model_of("eagle1").stream(PROMPT, logit_bias=bias)
    assert len(str(refused.value)) < 250


@pytest.mark.parametrize("ids", ["abc", b"abc", 5, None, [2.5], ["7"], [True], [None], [[1]], np.array([1.5])])
def test_stop_tokens(ids: Any, model_of: Callable[..., EagleModel]) -> None:
    with pytest.raises(RequestError, match="stop_token_ids"):
        model_of("eagle1").stream(PROMPT, stop_token_ids=ids)


@pytest.mark.parametrize("prompt", [[5, 10**30], [5, -1], [5, 256]])
def test_ids_outside_the_vocabulary(prompt: Any, model_of: Callable[..., EagleModel]) -> None:
    with pytest.raises(RequestError, match="at position 1 is outside the vocabulary of 256"):
        model_of("eagle1").stream(prompt)


@pytest.mark.parametrize("settings", [{"tree": 5}, {"tree": ["chain"]}, {"method": 5}, {"method": ["eagle"]}])
def test_trees_and_methods(settings: dict[str, Any], model_of: Callable[..., EagleModel]) -> None:
    with pytest.raises(RequestError, match=f"{next(iter(settings))} is .* must be one of"):
        model_of("eagle1").stream(PROMPT, **settings)


@pytest.mark.parametrize("name", ["context", "threads"])
@pytest.mark.parametrize("value", [2.5, "64", True, [64], math.nan])
def test_what_a_model_is_loaded_with(name: str, value: Any, bundle_of: Callable[..., Any]) -> None:
    with pytest.raises(RequestError, match=f"{name} is "):
        EagleModel.load(bundle_of("eagle1"), **{name: value})


def test_trees_of_ones_own() -> None:
    with pytest.raises(RequestError, match=r"depth is 2\.5"):
        DynamicTree(20, 2.5, 4)  # type: ignore[arg-type]


def test_numbers_of_numpy_are_numbers(model_of: Callable[..., EagleModel]) -> None:
    """And come out as Python's, also in the stats."""
    params = SamplingParams(
        temperature=np.float32(0.5),  # type: ignore[arg-type]
        top_k=np.int64(5),  # type: ignore[arg-type]
        min_p=Fraction(1, 4),  # type: ignore[arg-type]
        seed=np.uint64(2**64 - 1),  # type: ignore[arg-type]
        logit_bias={np.int32(3): np.float32(-1)},  # type: ignore[dict-item]
    )
    assert params == SamplingParams(temperature=0.5, top_k=5, min_p=0.25, seed=2**64 - 1, logit_bias={3: -1.0})
    assert type(params.seed) is int and type(params.temperature) is float
    assert Sampler(params, np.array([1, 2]), 8).params is params  # type: ignore[arg-type]
    model = model_of("eagle1")
    settings: dict[str, Any] = {"max_new_tokens": 6, "depth": 2, "total_token": 8, "draft_top_k": 3, "ignore_eos": True}
    plain = model.generate(PROMPT, seed=3, temperature=1.0, **settings)
    theirs = {name: np.int64(value) if type(value) is int else value for name, value in settings.items()}
    drawn = model.generate(np.array(PROMPT), seed=np.int64(3), temperature=np.float64(1), **theirs)  # type: ignore[arg-type]
    assert drawn.token_ids == plain.token_ids and type(drawn.usage.seed) is int


def test_values_are_shown_short() -> None:
    for value in (
        "x" * 10**7,
        list(range(10**6)),
        {i: i for i in range(10**5)},
        10**5000,
        Unshowable(),
        np.zeros(10**6),
    ):
        assert 0 < len(short_repr(value)) < 200
    assert (short_repr("0.7"), short_repr(2.5), short_repr(np.float64(2.5)), short_repr(None)) == (
        "'0.7'",
        "2.5",
        "2.5",
        "None",
    )


def test_all_settings_of_sampling_are_settings_of_an_answer() -> None:
    assert {field.name for field in dataclasses.fields(SamplingParams)} < Settings.__annotations__.keys()


def test_what_editors_complete_is_imported_by_nothing_that_decodes() -> None:
    """`**settings: Unpack[Settings]` is for type checkers: the signature holds it as text."""
    kinds = {
        inspect.signature(call).parameters["settings"].annotation for call in (EagleModel.generate, EagleModel.stream)
    }
    assert kinds == {"Unpack[Settings]"}
