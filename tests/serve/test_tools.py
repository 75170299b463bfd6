"""Calls of tools over HTTP: OpenAI's client, whole and streamed, new and old fields, and equal to plain decoding."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from openai import OpenAI

from eagle_runtime import EagleModel, ToolUse
from eagle_serve import Options
from eagle_serve.server import serving
from raw_http import post, request

PLACE = {"type": "string", "maxLength": 6}
WEATHER: dict[str, Any] = {
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"place": PLACE, "days": {"enum": [1, 3, 7]}, "exact": {"type": "boolean"}},
        "required": ["place", "days", "exact"],
    },
}
CLOCK: dict[str, Any] = {"name": "clock", "strict": True}
TOOLS: list[Any] = [{"type": "function", "function": WEATHER}, {"type": "function", "function": CLOCK}]
MESSAGES: list[Any] = [{"role": "user", "content": "Weather?"}]
NAMED: dict[str, Any] = {"type": "function", "function": {"name": "weather"}}
ALLOWED: dict[str, Any] = {"type": "allowed_tools", "allowed_tools": {"mode": "required", "tools": TOOLS[1:]}}
SETTINGS: dict[str, Any] = {"temperature": 0.9, "seed": 5, "max_tokens": 200}


@pytest.fixture
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def plain(model: EagleModel, choice: Any, parallel: bool = False) -> dict[str, Any]:
    """The message of the same request without drafts, its calls without ids."""
    prompt = model.chat_prompt(MESSAGES, ToolUse.of(TOOLS, choice, parallel))
    result = model.generate(prompt, method="vanilla", temperature=0.9, seed=5, max_new_tokens=200)
    assert result.message is not None
    return {**result.message, "tool_calls": [call["function"] for call in result.message["tool_calls"]]}


@pytest.mark.parametrize("choice", ["required", NAMED, ALLOWED], ids=["required", "named", "allowed"])
def test_a_call(choice: Any, client: OpenAI, served_model: EagleModel) -> None:
    asked: Any = {"tools": TOOLS, "tool_choice": choice, "parallel_tool_calls": False, **SETTINGS}
    answer = client.chat.completions.create(model="any", messages=MESSAGES, **asked)
    (one,) = answer.choices
    assert one.finish_reason == "tool_calls" and one.message.content is None and one.message.tool_calls
    (call,) = one.message.tool_calls
    assert call.type == "function" and call.id
    wanted = plain(served_model, choice)
    assert [call.function.model_dump()] == wanted["tool_calls"]
    assert call.function.name == ("clock" if choice == ALLOWED else "weather") or choice == "required"
    if call.function.name == "weather":
        given = json.loads(call.function.arguments)
        assert list(given) == ["place", "days", "exact"] and given["days"] in (1, 3, 7)
    # Streamed: the id and the name come first, then the arguments in pieces.
    chunks = list(client.chat.completions.create(model="any", messages=MESSAGES, stream=True, **asked))
    deltas = [delta for chunk in chunks for choice in chunk.choices for delta in choice.delta.tool_calls or ()]
    first, *rest = deltas
    assert first.id and first.type == "function" and first.function is not None
    assert (first.function.name, first.function.arguments) == (call.function.name, "")
    assert all(delta.index == 0 and delta.id is None and delta.function is not None for delta in rest)
    assert "".join(delta.function.arguments or "" for delta in rest if delta.function) == call.function.arguments
    assert len(rest) > 1 or call.function.name == "clock"
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "tool_calls"
    assert not any(choice.delta.content for chunk in chunks for choice in chunk.choices)


def test_text_where_tools_may_be_called(client: OpenAI, served_model: EagleModel) -> None:
    """With "auto" this model, which knows nothing of tools, writes text, and that of decoding without drafts."""
    answer = client.chat.completions.create(model="any", messages=MESSAGES, tools=TOOLS, temperature=0, max_tokens=30)
    assert answer.choices[0].message.tool_calls is None
    prompt = served_model.chat_prompt(MESSAGES, ToolUse.of(TOOLS))
    wanted = served_model.generate(prompt, method="vanilla", temperature=0, max_new_tokens=30)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (wanted.text, wanted.finish_reason)
    none = client.chat.completions.create(
        model="any", messages=MESSAGES, tools=TOOLS, tool_choice="none", temperature=0, max_tokens=30
    )
    plain = client.chat.completions.create(model="any", messages=MESSAGES, temperature=0, max_tokens=30)
    assert none.choices[0].message.content == plain.choices[0].message.content


def test_results_are_sent_back(address: str, served_model: EagleModel) -> None:
    """What clients send after a call: the answer with its calls and no content, and a message for each result."""
    call = {"id": "call_1", "type": "function", "function": {"name": "clock", "arguments": "{}"}}
    old = {"role": "assistant", "content": None, "function_call": {"name": "clock", "arguments": "{}"}}
    pairs: list[list[dict[str, Any]]] = [
        [{"role": "assistant", "content": None, "tool_calls": [call]},
         {"role": "tool", "tool_call_id": "call_1", "content": "12:00"}],
        [old, {"role": "function", "name": "clock", "content": "12:00"}],
    ]  # fmt: skip
    counts = [post(address, "/v1/count_tokens", {"messages": [*MESSAGES, *pair]}).data["ids"] for pair in pairs]
    assert counts[0] == counts[1]
    stream = served_model.text.stream([])
    text = "" if stream is None else stream.feed(counts[0])
    assert text.startswith('u: Weather?\na: <tool_call>\n{"name": "clock", "arguments": {}}\n</tool_call>\n')
    assert text.endswith("u: <tool_response>\n12:00\n</tool_response>\na: ")
    asked = {"messages": [*MESSAGES, *pairs[0]], "tools": TOOLS, "max_tokens": 4}
    assert post(address, "/v1/chat/completions", asked).status == 200


def test_functions_of_the_older_api(client: OpenAI, served_model: EagleModel) -> None:
    asked: Any = {"functions": [WEATHER], "function_call": {"name": "weather"}, **SETTINGS}
    answer = client.chat.completions.create(model="any", messages=MESSAGES, **asked)
    assert answer.choices[0].finish_reason == "function_call"
    called = answer.choices[0].message.function_call
    assert called is not None and called.name == "weather" and answer.choices[0].message.tool_calls is None
    assert set(json.loads(called.arguments)) == {"place", "days", "exact"}
    chunks = list(client.chat.completions.create(model="any", messages=MESSAGES, stream=True, **asked))
    pieces = [choice.delta.function_call for chunk in chunks for choice in chunk.choices if choice.delta.function_call]
    assert pieces[0].name == "weather" and "".join(piece.arguments or "" for piece in pieces) == called.arguments
    assert [choice.finish_reason for chunk in chunks for choice in chunk.choices][-1] == "function_call"


def test_a_call_that_max_tokens_cuts(client: OpenAI) -> None:
    asked: Any = {"tools": TOOLS, "tool_choice": NAMED, **SETTINGS, "max_tokens": 60}
    answer = client.chat.completions.create(model="any", messages=MESSAGES, **asked)
    assert answer.choices[0].finish_reason == "length" and answer.choices[0].message.tool_calls
    assert answer.choices[0].message.tool_calls[0].function.arguments.startswith('{"place": "')


def test_json_beside_tools(client: OpenAI) -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
    form: Any = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}
    asked: Any = {"tools": TOOLS, "response_format": form, **SETTINGS}
    message = client.chat.completions.create(model="any", messages=MESSAGES, **asked).choices[0].message
    assert message.tool_calls or json.loads(message.content or "") in ({"a": 1}, {"a": 2})


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"tools": [{"type": "web_search"}]}, "tools[0].type", "invalid_value"),
        ({"tools": TOOLS, "tool_choice": "any"}, "tool_choice", "invalid_value"),
        ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
        ({"tools": TOOLS, "functions": [CLOCK]}, "tools", "invalid_value"),
        ({"tools": TOOLS, "parallel_tool_calls": "no"}, "parallel_tool_calls", "invalid_value"),
        ({"tools": TOOLS, "eagle": {"constraint": {"regex": "a"}}}, "eagle.constraint", "invalid_value"),
        ({"tools": TOOLS, "min_tokens": 4}, "min_tokens", "invalid_value"),
        ({"tools": [{"type": "function", "function": {"name": "f", "strict": True, "parameters": {
            "type": "object", "properties": {"a": {"not": {"type": "string"}}}}}}]}, "tools", "invalid_schema"),
        ({"messages": [*MESSAGES, {"role": "assistant", "tool_calls": [
            {"function": {"name": "f", "arguments": "{"}}]}]}, "messages", "invalid_value"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_what_is_refused(fields: dict[str, Any], param: str, code: str, address: str) -> None:
    reply = post(address, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **fields})
    assert (reply.status, reply.data["error"]["param"], reply.data["error"]["code"]) == (400, param, code)
    if code == "invalid_schema":
        said = "the parameters of tool 'f' cannot be followed (its keyword not has no grammar); correct them"
        assert reply.data["error"]["message"] == said


@pytest.mark.parametrize("levels", [63, 64, 100, 500, 900, 10_000])
def test_levels_of_arguments_and_schemas(levels: int, address: str) -> None:
    deep = "[" * levels + "]" * levels
    call = {"id": "x", "type": "function", "function": {"name": "clock", "arguments": '{"a": ' + deep + "}"}}
    sent = [{"role": "assistant", "content": "", "tool_calls": [call]}, *MESSAGES]
    answer = post(address, "/v1/chat/completions", {"messages": sent, "max_tokens": 1})
    assert answer.status == (200 if levels < 64 else 400), answer
    wanted = json.dumps({"messages": MESSAGES, "tools": TOOLS}).replace('"exact"', f'"a": {deep}, "exact"', 1).encode()
    assert request(address, "POST", "/v1/chat/completions", body=wanted).code == "invalid_json"
    assert post(address, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 1}).status == 200


def test_keywords_that_say_nothing_are_taken(address: str) -> None:
    idle = {"uniqueItems": False, "dependentRequired": {}, "format": "password", "propertyNames": {"type": "string"}}
    schema = {"type": "object", "properties": {"a": {"type": "string", "maxLength": 3, **idle}}, **idle}
    tool = {"type": "function", "function": {"name": "f", "strict": True, "parameters": schema}}
    for fields in (
        {"tools": [tool], "tool_choice": "required"},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "n", "schema": schema}}},
        {"eagle": {"constraint": {"json_schema": schema}}},
    ):
        reply = post(address, "/v1/chat/completions", {"messages": MESSAGES, "max_tokens": 4, **fields})
        assert reply.status == 200, reply.data


def test_tools_of_completions(address: str) -> None:
    for fields in ({"tools": TOOLS}, {"tool_choice": "required"}, {"functions": [CLOCK]}):
        reply = post(address, "/v1/completions", {"prompt": "x", "max_tokens": 4, **fields})
        assert reply.data["error"]["param"] == next(iter(fields)), reply.data


def test_another_format(served_model: EagleModel, served_bundle: Path) -> None:
    with serving(served_model, served_bundle, Options(tool_format="llama")) as where:
        asked = {"messages": MESSAGES, "tools": TOOLS, "tool_choice": NAMED, "eagle": {"trace": True}}
        reply = post(where, "/v1/chat/completions", asked)
        assert reply.data["choices"][0]["message"]["tool_calls"][0]["function"]["name"] == "weather"
        written = "".join(token["text"] for token in reply.data["eagle"]["tokens"])
        assert '{"name": "weather", "parameters": {"place": "' in written
