"""Answers in OpenAI's harmony format over HTTP: each API splits reasoning, content and calls, whole and streamed."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from eagle_runtime import EagleModel
from eagle_serve import Options
from eagle_serve.server import serving
from harmony_bundle import BIAS, TOOLS, WEATHER, harmony_bundle
from raw_http import post

USER = {"role": "user", "content": "Weather?"}
SCHEMA = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
FORM = {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}
BIASED = {str(token): value for token, value in BIAS.items()}
ASKED: dict[str, Any] = {"temperature": 1.0, "logit_bias": BIASED, "max_tokens": 160}
CHAT = "/v1/chat/completions"


@pytest.fixture(scope="module")
def address(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    bundle = harmony_bundle(bundle_of("eagle1", "int8"), tmp_path_factory.mktemp("served") / "harmony")
    with EagleModel.load(bundle, threads=1) as model, serving(model, bundle) as where:
        yield where


def message_with(address: str, *fields: str, **asked: Any) -> tuple[int, dict[str, Any]]:
    """A seed whose answer ends by itself and has all fields, and its message."""
    for seed in range(80):
        reply = post(address, CHAT, {"messages": [USER], "seed": seed, **ASKED, **asked})
        assert reply.status == 200, reply.data
        (choice,) = reply.data["choices"]
        if choice["finish_reason"] != "length" and all(choice["message"].get(name) for name in fields):
            return seed, choice["message"]
    raise AssertionError(f"no answer has {fields}")


def functions(message: dict[str, Any]) -> list[dict[str, Any]]:
    return [call["function"] for call in message.get("tool_calls", ())]


CASES: list[tuple[tuple[str, ...], dict[str, Any]]] = [
    (("reasoning_content", "content"), {"tools": TOOLS}),
    (("reasoning_content", "tool_calls"), {"tools": TOOLS, "tool_choice": "required"}),
    (("reasoning_content", "content"), {"response_format": FORM}),
]


@pytest.mark.parametrize(("fields", "asked"), CASES, ids=["text", "call", "schema"])
def test_chat_completions(fields: tuple[str, ...], asked: dict[str, Any], address: str) -> None:
    seed, message = message_with(address, *fields, **asked)
    assert "<|" not in json.dumps(message, ensure_ascii=False)
    if "response_format" in asked:
        assert json.loads(message["content"]) in ({"a": 1}, {"a": 2})
    for call in functions(message):
        assert call["name"] == "weather" and json.loads(call["arguments"])["days"] in (1, 3)
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        given: Any = {"messages": [USER], "seed": seed, **ASKED, **asked}
        chunks = list(client.chat.completions.create(model="any", stream=True, **given))
    deltas = [choice.delta.model_dump(exclude_none=True) for chunk in chunks for choice in chunk.choices]
    for name in ("reasoning_content", "content"):
        assert "".join(delta.get(name, "") for delta in deltas) == (message.get(name) or "")
    called = [call["function"] for delta in deltas for call in delta.get("tool_calls", ())]
    assert "".join(one.get("name") or "" for one in called) == "".join(one["name"] for one in functions(message))
    assert "".join(one["arguments"] for one in called) == "".join(one["arguments"] for one in functions(message))
    ended = [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1]
    assert ended == ("tool_calls" if functions(message) else "stop")


def test_a_call_and_its_result_are_sent_back(address: str) -> None:
    """With a preamble too, which the template has no place for beside reasoning."""
    _, message = message_with(address, "reasoning_content", "tool_calls", tools=TOOLS, tool_choice="required")
    call = message["tool_calls"][0]
    chat = [USER, {**message, "content": "I look."}, {"role": "tool", "tool_call_id": call["id"], "content": "rain"}]
    reply = post(address, CHAT, {"messages": chat, "tools": TOOLS, **ASKED, "max_tokens": 4})
    assert reply.status == 200, reply.data


def test_responses(address: str) -> None:
    seed, message = message_with(address, "reasoning_content", "tool_calls", tools=TOOLS, tool_choice="required")
    tools = [{"type": "function", **WEATHER}]
    body = {
        "input": "Weather?", "tools": tools, "tool_choice": "required", "seed": seed, "max_output_tokens": 160,
        "temperature": 1.0, "logit_bias": BIASED,
    }  # fmt: skip
    output = post(address, "/v1/responses", body).data["output"]
    assert [item["type"] for item in output][:1] == ["reasoning"] and output[-1]["type"] == "function_call"
    assert output[0]["content"][0]["text"] == message["reasoning_content"]
    assert {name: output[-1][name] for name in ("name", "arguments")} == functions(message)[0]
    asked = {"temperature": 1.0, "logit_bias": BIASED, "seed": seed}
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as client:
        stream: Any = client.responses.create(
            model="any", input="Weather?", tools=tools, tool_choice="required", stream=True, max_output_tokens=160,  # type: ignore[call-overload]
            extra_body=asked,
        )  # fmt: skip
        events = list(stream)
    said = "".join(event.delta for event in events if event.type == "response.reasoning_text.delta")
    arguments = "".join(event.delta for event in events if event.type == "response.function_call_arguments.delta")
    assert said == message["reasoning_content"] and arguments == functions(message)[0]["arguments"]


def test_ollama(address: str) -> None:
    assert post(address, "/api/show", {"model": "harmony"}).data["capabilities"] == ["completion", "tools", "thinking"]
    seed, message = message_with(address, "reasoning_content", "tool_calls", tools=TOOLS, tool_choice="required")
    options = {"seed": seed, "num_predict": 160, "temperature": 1.0}
    body = {"messages": [USER], "tools": TOOLS, "options": options, "tool_choice": "required", "logit_bias": BIASED}
    said = post(address, "/api/chat", {**body, "stream": False}).data["message"]
    assert said["thinking"] == message["reasoning_content"]
    assert said["tool_calls"][0]["function"]["arguments"] == json.loads(functions(message)[0]["arguments"])
    content = post(address, "/api/chat", body).body
    lines = [json.loads(line)["message"] for line in content.splitlines()]
    assert "".join(line.get("thinking", "") for line in lines) == message["reasoning_content"]
    (call,) = [call for line in lines for call in line.get("tool_calls", ())]
    assert call["function"]["name"] == "weather"


@pytest.mark.parametrize(
    ("path", "fields"),
    [
        (CHAT, {"reasoning_effort": "high", "max_tokens": 1}),
        ("/v1/responses", {"reasoning": {"effort": "high"}, "max_output_tokens": 1}),
        ("/api/chat", {"think": "high", "options": {"num_predict": 1}, "stream": False}),
    ],
)
def test_effort_reaches_the_prompt(path: str, fields: dict[str, Any], address: str) -> None:
    """The template says "Reasoning: high", two letters less than "medium"."""
    text = {"input": "Weather?"} if path == "/v1/responses" else {"messages": [USER]}

    def prompt_tokens(**more: Any) -> int:
        data = post(address, path, {**fields, **text, **more}).data
        usage = data.get("usage", {})
        return int(data.get("prompt_eval_count") or usage.get("prompt_tokens") or usage["input_tokens"])

    usual = {"reasoning_effort": None, "reasoning": None, "think": None}
    assert prompt_tokens() == prompt_tokens(**{name: None for name in usual if name in fields}) - 2


def test_another_format_is_refused(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    bundle = harmony_bundle(bundle_of("eagle1", "int8"), tmp_path / "pair")
    with EagleModel.load(bundle, threads=1) as model, serving(model, bundle, Options(tool_format="hermes")) as where:
        reply = post(where, CHAT, {"messages": [USER], "max_tokens": 1})
        assert reply.status == 400 and "this model writes harmony alone" in reply.data["error"]["message"]
