"""A tie is a gap that rounding explains; anything wider is a fault."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest

from eagle_calib.replay import forced_logits
from eagle_runtime import EagleModel
from eagle_runtime.sampling.noise import exponential_noise
from eagle_tools.ties import NEAR, first_difference, is_tie

PROMPT = [5, 6, 7]
SEED = 3


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_only_a_gap_of_rounding_is_a_tie(
    model_of: Callable[..., EagleModel], temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second best token in place of the best, where the two are closest and where they are farthest apart."""
    model = model_of("eagle1")
    tokens = model.generate(PROMPT, max_new_tokens=24, method="vanilla", temperature=temperature, seed=SEED).token_ids
    logits = forced_logits(model, PROMPT, tokens).astype(np.float64)
    dice = np.stack([exponential_noise(SEED, len(PROMPT) + at, logits.shape[1]) for at in range(len(tokens))])
    scores = logits - temperature * np.log(dice)
    assert scores.argmax(-1).tolist() == list(tokens)
    gaps = (np.diff(np.sort(scores, axis=-1)[:, -2:])[:, 0] / np.abs(logits).max(-1)).tolist()
    for at in (gaps.index(min(gaps)), gaps.index(max(gaps))):
        other = (*tokens[:at], int(np.argsort(scores[at])[-2]), *tokens[at + 1 :])
        for near, tie in ((1e-5, False), (gaps[at] * 0.99, False), (gaps[at] * 1.01, True)):
            monkeypatch.setitem(NEAR, "float32", near)
            assert is_tie(model, PROMPT, tokens, other, temperature=temperature, seed=SEED) is tie
            assert is_tie(model, PROMPT, other, tokens, temperature=temperature, seed=SEED) is tie


def test_an_answer_cut_short_is_no_tie(model_of: Callable[..., EagleModel]) -> None:
    assert not is_tie(model_of("eagle1"), PROMPT, (1, 2), (1, 2, 3))
    assert first_difference((1, 2), (1, 2, 3)) == 2 and first_difference((1, 2), (3, 2)) == 0
