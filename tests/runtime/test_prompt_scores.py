"""How likely a model finds the tokens of a prompt: the setting prompt_logprobs."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from eagle_runtime import EagleModel, RequestError

SHORT: dict[str, Any] = {"max_new_tokens": 6, "ignore_eos": True, "temperature": 0}


@pytest.fixture(params=["fp32", "int8"])
def model(request: pytest.FixtureRequest, model_of: Callable[..., EagleModel]) -> EagleModel:
    return model_of("eagle1", request.param)


def check(model: EagleModel, prompt: list[int], result: Any, count: int) -> None:
    """Whether a result tells of its prompt what the model's logits say."""
    rows = np.concatenate([piece.copy() for piece in model.score(prompt)]).astype(np.float64)
    assert [token.id for token in result.prompt] == prompt
    assert result.prompt[0].logprob is None and result.prompt[0].top == ()
    for row, token in zip(rows, result.prompt[1:], strict=False):
        logs = row - row.max() - np.log(np.exp(row - row.max()).sum())
        assert token.logprob == pytest.approx(logs[token.id], abs=1e-4)
        assert [value for _, value in token.top] == pytest.approx(np.sort(logs)[::-1][:count], abs=1e-4)


@pytest.mark.parametrize("length", [1, 2, 64, 65, 150])
def test_a_prompt_of_any_length_is_told_token_by_token(model: EagleModel, length: int) -> None:
    prompt = np.random.default_rng(length).integers(0, 256, length).tolist()
    result = model.generate(prompt, prompt_logprobs=3, **SHORT)
    check(model, prompt, result, 3)
    plain = model.generate(prompt, **SHORT)
    assert plain.token_ids == result.token_ids and plain.prompt == ()


def test_what_a_conversation_knows_is_read_again(model: EagleModel, prompts: list[list[int]]) -> None:
    with model.conversation() as chat:
        list(chat.complete(prompts[0], **SHORT))
        turn = chat.complete([*prompts[0], *prompts[1]], prompt_logprobs=0, **SHORT)
        list(turn)
    assert turn.result is not None and turn.result.usage.cached_tokens == 0
    check(model, [*prompts[0], *prompts[1]], turn.result, 0)


def test_texts_of_a_batch_each_have_their_own(model: EagleModel, prompts: list[list[int]]) -> None:
    """Also where they begin alike, so that one would copy the other's rows."""
    asked = [prompts[0], [*prompts[0], 7, 8], prompts[1]]
    requests = [{"prompt": prompt, "prompt_logprobs": 1} for prompt in asked]
    ended = {number: piece.result for number, piece in model.batch(requests, **SHORT) if piece.result is not None}
    for number, prompt in enumerate(asked):
        check(model, prompt, ended[number], 1)


@pytest.mark.parametrize("method", ["recycling", "eagle", "lookup", "vanilla"])
def test_drafts_are_the_same_with_and_without(method: str, model: EagleModel, prompts: list[list[int]]) -> None:
    result = model.generate(prompts[2], method=method, prompt_logprobs=2, **SHORT)
    assert result.token_ids == model.generate(prompts[2], method=method, **SHORT).token_ids
    check(model, prompts[2], result, 2)


def test_tokens_have_the_prompts_text(text_bundle: Path) -> None:
    with EagleModel.load(text_bundle) as model:
        text = "def f(x):\n    return x"
        result = model.generate(text, prompt_logprobs=0, **SHORT)
        assert "".join(token.text for token in result.prompt) == text


@pytest.mark.parametrize("value", [-1, 21, 1.5, True])
def test_other_values_are_refused(value: Any, model: EagleModel) -> None:
    with pytest.raises(RequestError, match="prompt_logprobs"):
        model.generate([5, 6], prompt_logprobs=value)
