"""Scoring a text: the rows that reading it token by token would give, and distances as their definitions say."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from eagle_calib.scoring import divergence, log_softmax
from eagle_runtime import EagleModel, RequestError
from eagle_runtime.core.target import SCORE_CHUNK
from insides import bundle_in

TEXT = np.random.default_rng(3).integers(3, 256, 2 * SCORE_CHUNK + 9).tolist()


def test_rows_are_those_after_every_beginning_of_the_text(model_of: Callable[..., EagleModel]) -> None:
    model = model_of("eagle3")
    pieces = [piece.copy() for piece in model.score(TEXT)]
    assert [len(piece) for piece in pieces] == [SCORE_CHUNK, SCORE_CHUNK, 9]
    rows = np.concatenate(pieces)
    for end in (0, 5, SCORE_CHUNK - 1, SCORE_CHUNK, len(TEXT) - 1):
        logits, _ = bundle_in(model).target.prefill(TEXT[: end + 1])
        np.testing.assert_allclose(rows[end], logits, atol=1e-4)


@pytest.mark.parametrize("first", [1, SCORE_CHUNK - 1, SCORE_CHUNK, SCORE_CHUNK + 1, len(TEXT) - 1, len(TEXT)])
def test_rows_before_the_first_are_left_out(model_of: Callable[..., EagleModel], first: int) -> None:
    model = model_of("eagle3")
    whole = np.concatenate([piece.copy() for piece in model.score(TEXT)])
    rest = [piece.copy() for piece in model.score(TEXT, first)]
    assert sum(map(len, rest)) == len(TEXT) - first
    assert all(len(piece) for piece in rest)
    np.testing.assert_allclose(np.concatenate([whole[:first], *rest]), whole, atol=1e-4)


def test_a_model_serves_one_reader_at_a_time(model_of: Callable[..., EagleModel]) -> None:
    model = model_of("eagle3")
    stream, reading = model.stream([5, 6], max_new_tokens=9), model.score(TEXT)
    next(stream)
    next(reading)
    with pytest.raises(RequestError, match="another generation"):
        next(stream)
    model.generate([5, 6], max_new_tokens=2)
    with pytest.raises(RequestError, match="another generation"):
        next(reading)


@pytest.mark.parametrize("tokens", [[], [256], [-1], [5] * 2048])
def test_what_cannot_be_read_is_refused(model_of: Callable[..., EagleModel], tokens: list[int]) -> None:
    with pytest.raises(RequestError):
        next(model_of("eagle3").score(tokens))


def test_distances_by_hand() -> None:
    half = np.log(np.array([[0.5, 0.25, 0.25], [0.2, 0.2, 0.6]], np.float32))
    other = np.log(np.array([[0.25, 0.25, 0.5], [0.2, 0.2, 0.6]], np.float32))
    np.testing.assert_allclose(log_softmax(half + np.float32(7)), half, atol=1e-6)
    np.testing.assert_allclose(divergence(log_softmax(half), log_softmax(other)), [0.25 * np.log(2), 0], atol=1e-6)


def test_distances_of_far_logits_stay_finite() -> None:
    ruled_out = log_softmax(np.array([[0, -np.inf, 0]], np.float32))
    assert divergence(ruled_out, log_softmax(np.array([[0, 0, 0]], np.float32))) == pytest.approx(np.log(1.5))
    wide = log_softmax(np.array([[3e38, -3e38]], np.float32))
    assert divergence(wide, wide).tolist() == [0.0]
