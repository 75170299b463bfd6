"""OpenAI's Responses API: its client, what requests mean, and answers equal to those of the chats they stand for."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from openai import OpenAI

from eagle_serve.errors import ApiError
from eagle_serve.responses import read
from raw_http import post, request

PATH = "/v1/responses"
WEATHER: dict[str, Any] = {
    "type": "function",
    "name": "weather",
    "parameters": {
        "type": "object",
        "properties": {"place": {"type": "string", "maxLength": 6}, "days": {"enum": [1, 3]}},
        "required": ["place", "days"],
    },
    "strict": True,
}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
SAMPLED: dict[str, Any] = {"temperature": 0.8, "top_p": 0.9, "max_output_tokens": 20, "extra_body": {"seed": 3}}


@pytest.fixture
def client(address: str) -> Iterator[OpenAI]:
    with OpenAI(base_url=f"{address}/v1", api_key="none", max_retries=0) as made:
        yield made


def chat(address: str, **fields: Any) -> dict[str, Any]:
    """The chat completion of the same request."""
    answer = post(address, "/v1/chat/completions", {"temperature": 0.8, "top_p": 0.9, "seed": 3, **fields})
    assert answer.status == 200, answer.body
    return dict(answer.data)


def test_an_answer_is_that_of_the_chat(client: OpenAI, address: str) -> None:
    said = client.responses.create(model="any", instructions="Be brief.", input="Why?", **SAMPLED)
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Why?"}]
    wanted = chat(address, messages=messages, max_tokens=20)
    assert said.output_text == wanted["choices"][0]["message"]["content"]
    assert said.status == "incomplete" and said.incomplete_details is not None
    assert said.incomplete_details.reason == "max_output_tokens"
    assert said.usage is not None and said.usage.total_tokens == wanted["usage"]["total_tokens"]
    assert said.usage.output_tokens == 20 and said.usage.output_tokens_details.reasoning_tokens == 0
    assert (said.temperature, said.top_p, said.instructions) == (0.8, 0.9, "Be brief.")
    # Its items go back as they came, and so do messages without a type.
    later: Any = [{"role": "user", "content": "Why?"}, *said.output, {"role": "user", "content": "And then?"}]
    again = client.responses.create(model="any", instructions="Be brief.", input=later, **SAMPLED)
    messages += [{"role": "assistant", "content": said.output_text}, {"role": "user", "content": "And then?"}]
    assert again.output_text == chat(address, messages=messages, max_tokens=20)["choices"][0]["message"]["content"]


def test_a_stream_tells_of_the_same_response(client: OpenAI) -> None:
    asked: Any = {"model": "any", "input": "Why?", "top_logprobs": 2, **SAMPLED}
    whole = client.responses.create(**asked)
    events = list(client.responses.create(**asked, stream=True))
    kinds = [event.type for event in events]
    assert kinds[:4] == [
        "response.created", "response.in_progress", "response.output_item.added", "response.content_part.added",
    ]  # fmt: skip
    assert kinds[-4:] == [
        "response.output_text.done", "response.content_part.done", "response.output_item.done", "response.incomplete",
    ]  # fmt: skip
    assert set(kinds[4:-4]) == {"response.output_text.delta"} and len(kinds) > 10
    assert [event.sequence_number for event in events] == list(range(len(events)))
    assert "".join(event.delta for event in events if event.type == "response.output_text.delta") == whole.output_text
    last: Any = events[-1]
    (item,), (wanted,) = last.response.output, whole.output
    assert item.content == wanted.content and item.status == "incomplete"
    logprobs = item.content[0].logprobs
    assert len(logprobs) == 20 and all(len(one.top_logprobs) == 2 for one in logprobs)


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "weather"}], ids=["required", "named"])
def test_functions(client: OpenAI, address: str, choice: Any) -> None:
    asked: Any = {"model": "any", "tools": [WEATHER], "tool_choice": choice, "parallel_tool_calls": False, **SAMPLED}
    asked |= {"input": "Rain?", "max_output_tokens": 100}
    said = client.responses.create(**asked)
    (call,) = said.output
    assert call.type == "function_call" and call.name == "weather" and said.status == "completed"
    assert sorted(json.loads(call.arguments)) == ["days", "place"]
    events = list(client.responses.create(**asked, stream=True))
    added: Any = next(event for event in events if event.type == "response.output_item.added")
    assert (added.item.name, added.item.arguments, added.item.status) == ("weather", "", "in_progress")
    deltas = [event.delta for event in events if event.type == "response.function_call_arguments.delta"]
    assert "".join(deltas) == call.arguments and len(deltas) > 1
    assert [event.type for event in events][-3:] == [
        "response.function_call_arguments.done", "response.output_item.done", "response.completed",
    ]  # fmt: skip
    # The call goes back with its result.
    result: Any = {"type": "function_call_output", "call_id": call.call_id, "output": "rain"}
    items: Any = [{"role": "user", "content": "Rain?"}, call, result]
    asked = {"model": "any", "input": items, "tools": [WEATHER], "tool_choice": "none", **SAMPLED}
    later = client.responses.create(**asked)
    function = {"name": call.name, "arguments": call.arguments}
    messages = [
        items[0],
        {"role": "assistant", "tool_calls": [{"id": call.call_id, "type": "function", "function": function}]},
        {"role": "tool", "tool_call_id": call.call_id, "content": "rain"},
    ]
    assert later.output_text == chat(address, messages=messages, max_tokens=20)["choices"][0]["message"]["content"]


def test_the_form_of_an_answer(client: OpenAI) -> None:
    form: Any = {"format": {"type": "json_schema", "name": "x", "schema": SCHEMA, "strict": True}}
    said = client.responses.create(model="any", input="Say.", text=form, temperature=0)
    assert sorted(json.loads(said.output_text)) == ["a", "b"] and said.status == "completed"
    with client.responses.stream(model="any", input="Say.", text=form, temperature=0) as stream:
        assert stream.get_final_response().output_text == said.output_text


def test_reasoning_is_an_item(thinking_address: str) -> None:
    body = {
        "input": "x",
        "eagle": {"constraint": {"regex": "ab</think>cd"}},
        "include": ["reasoning.encrypted_content"],
    }
    with OpenAI(base_url=f"{thinking_address}/v1", api_key="none", max_retries=0) as client:
        said = client.responses.create(input="x", model="any", extra_body=body)
        assert [item.type for item in said.output] == ["reasoning", "message"] and said.output_text == "cd"
        assert [part.text for part in said.output[0].content] == ["ab"]  # type: ignore[union-attr]
        assert said.usage is not None and said.usage.output_tokens_details.reasoning_tokens == 2
        events = list(client.responses.create(input="x", model="any", extra_body=body, stream=True))
        kinds = list(dict.fromkeys(event.type for event in events))
        assert kinds[2:8] == [
            "response.output_item.added", "response.content_part.added", "response.reasoning_text.delta",
            "response.reasoning_text.done", "response.content_part.done", "response.output_item.done",
        ]  # fmt: skip
        assert kinds[8:] == ["response.output_text.delta", "response.output_text.done", "response.completed"]
        items: Any = [*said.output, {"role": "user", "content": "more"}]
        assert client.responses.create(model="any", input=items, max_output_tokens=1).status == "incomplete"


def test_every_token_of_a_message_has_its_probability(thinking_address: str) -> None:
    """White space too, which the reader holds back until more comes."""
    body = {
        "input": "x",
        "eagle": {"constraint": {"regex": r"a</think>b\.\n\nc d"}, "method": None, "trace": None},
        "include": ["message.output_text.logprobs"],
    }
    for stream in (False, True):
        answer = post(thinking_address, PATH, {**body, "stream": stream})
        if stream:
            *_, last = (block for block in answer.body.decode().split("\n\n") if "data: " in block)
            response = json.loads(last.partition("data: ")[2])["response"]
        else:
            response = answer.data
        content = response["output"][1]["content"][0]
        assert content["text"] == "b.\n\nc d"
        assert "".join(one["token"] for one in content["logprobs"]).removeprefix("</think>") == content["text"]


def messages_of(*items: dict[str, Any], **fields: Any) -> Any:
    """The messages that items stand for."""
    return read({"input": list(items), **fields}, None).fields["messages"]  # type: ignore[arg-type]


def test_items_of_one_answer_are_one_message() -> None:
    def call(name: str) -> dict[str, Any]:
        return {"type": "function_call", "call_id": name, "name": name, "arguments": "{}", "id": "fc", "status": "x"}

    def called(name: str) -> dict[str, Any]:
        return {"id": name, "type": "function", "function": {"name": name, "arguments": "{}"}}

    assert messages_of({"type": None, "role": "user", "content": "q"}) == [{"role": "user", "content": "q"}]
    thought = {"type": "reasoning", "summary": [], "content": [{"type": "reasoning_text", "text": "t"}]}
    said = {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "s"}]}
    result = {"type": "function_call_output", "call_id": "f", "output": [{"type": "input_text", "text": "r"}]}
    assert messages_of(thought, said, call("f"), call("g"), result, said, said, thought, call("h")) == [
        {"content": "s", "role": "assistant", "reasoning_content": "t", "tool_calls": [called("f"), called("g")]},
        {"role": "tool", "tool_call_id": "f", "content": "r"},
        {"role": "assistant", "content": "s"},
        {"role": "assistant", "content": "s"},
        {"content": None, "role": "assistant", "reasoning_content": "t", "tool_calls": [called("h")]},
    ]
    user = {"role": "user", "content": "q"}
    assert messages_of(thought, user, thought, thought) == [  # answers that ended within their reasoning
        (cut := {"role": "assistant", "content": "", "reasoning_content": "t"}), user, cut, cut
    ]  # fmt: skip
    assert messages_of({"role": "developer", "content": "d"}, instructions="i") == [
        {"role": "system", "content": "i"},
        {"role": "developer", "content": "d"},
    ]


@pytest.mark.parametrize(
    ("fields", "code", "param"),
    [
        ({"previous_response_id": "resp_1"}, "previous_response_not_found", "previous_response_id"),
        ({"conversation": "conv_1"}, "unsupported_parameter", "conversation"),
        ({"background": True}, "unsupported_parameter", "background"),
        ({"prompt": {"id": "p"}}, "unsupported_parameter", "prompt"),
        ({"truncation": "auto"}, "unsupported_parameter", "truncation"),
        ({"include": ["everything"]}, "invalid_value", "include[0]"),
        ({"input": []}, "invalid_value", "input"),
        ({"input": [{"type": "item_reference", "id": "msg_1"}]}, "unsupported_parameter", "input[0]"),
        ({"input": [{"type": "computer_call"}]}, "unsupported_parameter", "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "data:"}]}]},
            "unsupported_parameter",
            "input[0].content[0]",
        ),
        ({"max_output_tokens": 0}, "invalid_value", "max_output_tokens"),
        ({"text": {"format": {"type": "grammar"}}}, "invalid_value", "text.format.type"),
    ],
    ids=str,
)
def test_what_is_refused(fields: dict[str, Any], code: str, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        read({"input": "x", **fields}, None)  # type: ignore[arg-type]
    assert (caught.value.code, caught.value.param) == (code, param)


def test_what_asks_nothing_is_accepted(address: str) -> None:
    neutral: dict[str, Any] = {
        "store": True, "background": False, "truncation": "disabled", "metadata": {"a": "b"}, "user": "u",
        "service_tier": "auto", "prompt_cache_key": "k", "safety_identifier": "s", "previous_response_id": None,
        "include": ["reasoning.encrypted_content"], "reasoning": {"effort": "low", "summary": "auto"},
        "text": {"verbosity": "low"}, "max_tool_calls": 3, "parallel_tool_calls": True, "tools": [],
        "stream_options": {"include_obfuscation": False}, "top_logprobs": 0, "tool_choice": "auto",
    }  # fmt: skip
    answer = post(address, PATH, {"input": "x", "max_output_tokens": 3, **neutral})
    assert answer.status == 200, answer.body
    assert answer.data["store"] is False and answer.data["metadata"] == {"a": "b"}


def test_errors_name_the_fields_of_this_api(address: str, client: OpenAI) -> None:
    tool = {"type": "web_search"}
    bad: dict[str, tuple[dict[str, Any], str]] = {
        "tools[0].type": ({"tools": [tool]}, "invalid_value"),
        "input": ({"input": "refuse this"}, "template_error"),
        "text.format.schema": (
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": {"type": 3}}}},
            "invalid_schema",
        ),
        "temperature": ({"temperature": "hot"}, "invalid_type"),
    }
    for param, (fields, code) in bad.items():
        answer = post(address, PATH, {"input": "x", **fields})
        assert (answer.status, answer.code, answer.data["error"]["param"]) == (400, code, param), answer.body
    with pytest.raises(openai.NotFoundError):
        client.responses.retrieve("resp_1")
    assert request(address, "GET", PATH).status == 405
