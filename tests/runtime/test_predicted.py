"""Drafts from an expected text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from eagle_runtime import EagleModel, RequestError
from eagle_runtime.drafting.matches import PredictedText

PROMPT = [90, 91, 92]


def test_the_beginning_matches() -> None:
    predicted = PredictedText(PROMPT, [1, 2, 3, 4, 5])
    assert predicted.continuation(PROMPT, 3) == ([1, 2, 3], 3)
    assert predicted.continuation([*PROMPT, 1], 3) == ([2, 3, 4], 4)
    assert predicted.continuation([*PROMPT, 1, 2, 3, 4], 3) == ([5], 7)
    assert (predicted.accepted, predicted.rejected) == (4, 1)
    assert predicted.continuation([*PROMPT, 1, 2, 3, 4, 5], 3) == ([], 0)
    assert (predicted.accepted, predicted.rejected) == (5, 0)


def test_it_is_taken_up_again_after_a_change() -> None:
    predicted = PredictedText(PROMPT, [1, 2, 3, 4, 5, 6, 7])
    assert predicted.continuation([*PROMPT, 1, 2, 50, 51], 3) == ([], 0)
    assert predicted.continuation([*PROMPT, 1, 2, 50, 51, 4, 5], 3) == ([6, 7], 2)
    assert predicted.accepted == 2
    assert predicted.continuation([*PROMPT, 1, 2, 50, 51, 4, 5, 6, 7], 3) == ([], 0)
    assert (predicted.accepted, predicted.rejected) == (4, 3)


def test_the_nearest_place_counts() -> None:
    """In a text that repeats itself, the answer stays where it is."""
    line = [7, 8, 9]
    text = [token for number in range(20) for token in (*line, 20 + number)]
    predicted = PredictedText(PROMPT, text)
    followed = [*PROMPT, *text[:40]]
    assert predicted.continuation(followed, 4) == (text[40:44], 16)
    changed = [*followed, 60, *line[:2]]  # where the text has 7, 8
    assert predicted.continuation(changed, 2)[0] == [9, 30]


def test_an_empty_text_proposes_nothing() -> None:
    predicted = PredictedText(PROMPT, [])
    assert predicted.continuation(PROMPT, 3) == ([], 0)
    assert (predicted.accepted, predicted.rejected) == (0, 0)
    assert PredictedText([], [4, 5]).continuation([4], 3) == ([], 0)


def test_what_it_proposes_is_text_that_follows_the_last_tokens() -> None:
    """For random texts over few tokens, against every place of the text."""
    draw = np.random.default_rng(5)
    for _ in range(300):
        prompt, text = draw.integers(0, 3, 6).tolist(), draw.integers(0, 3, 30).tolist()
        predicted, tokens = PredictedText(prompt, text), prompt.copy()
        whole = [*prompt, *text]
        for _ in range(20):
            tokens.append(int(draw.integers(0, 3)))
            following, length = predicted.continuation(tokens, 4)
            places = [p for p in range(len(prompt), len(whole)) if whole[p - 2 : p] == tokens[-2:]]
            assert (length > 0) == bool(places)
            if length:
                assert any(whole[p : p + 4] == following and whole[p - length : p] == tokens[-length:] for p in places)
        assert predicted.accepted + predicted.rejected == len(text)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_predictions_change_no_token(
    model_of: Callable[..., EagleModel], prompts: list[list[int]], temperature: float
) -> None:
    """The output itself, a part of it, changed in the middle, and a text of its own; every method that drafts."""
    model = model_of("eagle1", "int8")
    settings: dict[str, Any] = {"max_new_tokens": 48, "temperature": temperature, "seed": 3, "ignore_eos": True}
    for prompt in prompts[:3]:
        wanted = list(model.generate(prompt, method="vanilla", **settings).token_ids)
        changed = [*wanted[:20], 7, 7, 7, *wanted[24:]]
        for prediction, least in ((wanted, 48), (wanted[5:30], 20), (changed, 40), ([9] * 30, 0), ([], 0)):
            for method in ("lookup", "eagle+lookup", "eagle"):
                result = model.generate(prompt, prediction=prediction, method=method, **settings)
                assert list(result.token_ids) == wanted
                usage = result.usage
                assert usage.prediction_accepted >= least
                assert usage.prediction_accepted + usage.prediction_rejected == len(prediction)
        helped = model.generate(prompt, prediction=wanted, method="lookup", **settings)
        assert helped.usage.target_passes < 24


def test_wrong_predictions(model_of: Callable[..., EagleModel]) -> None:
    model = model_of("eagle1", "int8")
    for prediction in ([256], [-1], [1.5], 3):
        with pytest.raises(RequestError, match="prediction"):
            model.generate([5, 6], prediction=prediction)  # type: ignore[arg-type]
