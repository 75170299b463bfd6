"""Several answers to one request: `n`, and several prompts."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from eagle_runtime import EagleModel
from eagle_serve import Options
from eagle_serve.server import serving
from raw_http import events, post
from serve.clients import COMPLETIONS, idle, metric, read_until, started, until

CHATS = "/v1/chat/completions"
MESSAGES = [{"role": "user", "content": "Why is the sky blue? " * 4}]
SETTINGS: dict[str, Any] = {"max_tokens": 12, "temperature": 1.2, "ignore_eos": True}


@pytest.fixture(scope="module")
def several(served_model: EagleModel, served_bundle: Path) -> Iterator[str]:
    """A server of which three requests decode at once."""
    with serving(served_model, served_bundle, Options(parallel=3)) as where:
        yield where


def texts(answer: Any) -> list[str]:
    """The answer's texts by the index of their choice."""
    choices = sorted(answer["choices"], key=lambda choice: choice["index"])
    assert [choice["index"] for choice in choices] == list(range(len(choices)))
    return [choice["message"]["content"] if "message" in choice else choice["text"] for choice in choices]


def test_a_choice_is_what_a_request_with_its_seed_gets_alone(several: str) -> None:
    asked = {"messages": MESSAGES, **SETTINGS, "seed": 2**64 - 2}
    alone = [post(several, CHATS, {**asked, "seed": seed}).data for seed in (2**64 - 2, 2**64 - 1, 0, 1)]
    together = post(several, CHATS, {**asked, "n": 4}).data
    assert texts(together) == [texts(one)[0] for one in alone] and len(set(texts(together))) > 1
    usage = together["usage"]
    assert usage["prompt_tokens"] == alone[0]["usage"]["prompt_tokens"] and usage["completion_tokens"] == 4 * 12
    assert usage["total_tokens"] == usage["prompt_tokens"] + 48 and "timings" not in together
    assert [choice["eagle"]["seed"] for choice in together["choices"]] == [2**64 - 2, 2**64 - 1, 0, 1]


def test_the_prompt_of_choices_is_read_once(served_model: EagleModel, served_bundle: Path) -> None:
    with serving(served_model, served_bundle, Options(parallel=3)) as where:
        answer = post(where, CHATS, {"messages": MESSAGES, **SETTINGS, "n": 4}).data
        read = answer["usage"]["prompt_tokens"]
        assert sorted(choice["timings"]["prompt_n"] for choice in answer["choices"]) == [1, 1, 1, read]


@pytest.mark.parametrize("prompts", [["def f(", "class A:", "a = "], [[7, 8, 9], [9, 8, 7]]], ids=["texts", "ids"])
def test_each_of_several_prompts_is_answered(several: str, prompts: list[Any]) -> None:
    asked = {**SETTINGS, "seed": 5, "logprobs": 2}
    alone = [post(several, COMPLETIONS, {**asked, "prompt": one, "n": 2}).data for one in prompts]
    together = post(several, COMPLETIONS, {**asked, "prompt": prompts, "n": 2}).data
    assert texts(together) == [text for one in alone for text in texts(one)]
    choices = [choice for one in alone for choice in one["choices"]]
    assert [choice["logprobs"] for choice in together["choices"]] == [choice["logprobs"] for choice in choices]
    assert together["usage"]["prompt_tokens"] == sum(one["usage"]["prompt_tokens"] for one in alone)


@pytest.mark.parametrize("path", [CHATS, COMPLETIONS])
def test_a_stream_has_all_choices(several: str, path: str) -> None:
    prompt = {"messages": MESSAGES} if path == CHATS else {"prompt": ["def f(", "class A:"]}
    asked = {**prompt, **SETTINGS, "seed": 3, "n": 2}
    whole = post(several, path, asked).data
    *chunks, done = events(
        post(several, path, {**asked, "stream": True, "stream_options": {"include_usage": True}}).body
    )
    assert done == "[DONE]"
    usage: dict[str, Any] = {}
    found = [""] * len(whole["choices"])
    ended: list[int] = []
    for chunk in chunks:
        assert chunk["id"] == chunks[0]["id"]
        for choice in chunk["choices"]:
            assert choice["index"] not in ended
            found[choice["index"]] += choice["delta"].get("content", "") if path == CHATS else choice["text"]
            if choice["finish_reason"] is not None:
                ended.append(choice["index"])
        usage = chunk["usage"] or usage
    assert found == texts(whole) and sorted(ended) == list(range(len(found)))
    counted = ("prompt_tokens", "completion_tokens", "total_tokens")
    assert [usage[name] for name in counted] == [whole["usage"][name] for name in counted]


def test_choices_of_a_schema_are_objects_of_it(several: str, served_model: EagleModel, served_bundle: Path) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer", "maximum": 99}}, "required": ["a"]}
    form = {"type": "json_schema", "json_schema": {"name": "x", "schema": {**schema, "additionalProperties": False}}}
    client = OpenAI(base_url=f"{several}/v1", api_key="none")
    messages: Any = MESSAGES
    found = client.chat.completions.create(
        model="any",
        messages=messages,
        n=3,
        max_tokens=60,
        seed=1,
        response_format=form,  # type: ignore[call-overload]
    )
    assert [set(json.loads(choice.message.content)) for choice in found.choices] == [{"a"}] * 3


def test_a_client_that_leaves_ends_all_its_choices(several: str) -> None:
    cancelled = metric(several, "cancelled_total")
    body = {"prompt": "ab", "max_tokens": 1900, "temperature": 0, "ignore_eos": True, "stream": True, "n": 5}
    with started(several, body) as link:
        read_until(link, b"data: {")
    until(lambda: idle(several) and metric(several, "cancelled_total") == cancelled + 1)


def test_more_answers_than_may_wait_are_refused_at_once(served_model: EagleModel, served_bundle: Path) -> None:
    with serving(served_model, served_bundle, Options(parallel=1, queue=2)) as where:
        for body, name in (({"prompt": "a", "n": 4}, "n"), ({"prompt": ["a"] * 4}, "prompt")):
            answer = post(where, COMPLETIONS, {**body, "max_tokens": 1})
            assert answer.status == 400 and answer.data["error"]["param"] == name
        assert len(post(where, COMPLETIONS, {"prompt": "a", "n": 3, "max_tokens": 1}).data["choices"]) == 3


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/completion", {"prompt": ["a", "b"]}, "prompt"), ("/completion", {"prompt": "a", "n": 2}, "n"),
    ],
)  # fmt: skip
def test_an_api_of_one_answer_refuses_several(several: str, path: str, body: dict[str, Any], param: str) -> None:
    answer = post(several, path, body)
    assert answer.status == 400 and answer.data["error"]["param"] == param


def test_tokens_of_several_prompts_are_counted(several: str, served_model: EagleModel) -> None:
    counted = post(several, "/v1/count_tokens", {"prompt": ["ab", "c"]}).data
    assert counted["ids"] == [served_model.text.encode(text) for text in ("ab", "c")] and counted["count"] == 3
