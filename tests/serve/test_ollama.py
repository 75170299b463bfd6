"""Ollama's API: answers are those of OpenAI's fields that a request stands for, in Ollama's words."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raw_http import post, request

CHAT, GENERATE, CHATS = "/api/chat", "/api/generate", "/v1/chat/completions"
USER = {"role": "user", "content": "Why?"}
OPTIONS: dict[str, Any] = {"temperature": 0.8, "top_k": 40, "repeat_penalty": 1.1, "seed": 3, "num_predict": 20}
FIELDS: dict[str, Any] = {**OPTIONS, "max_tokens": 20}
SCHEMA: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"enum": [1, 2]}, "b": {"type": "boolean"}},
    "required": ["a", "b"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "weather", "parameters": SCHEMA}}
# The only tool is called: a grammar that allows nothing but its call.
CALLS = {"tools": [TOOL], "tool_choice": "required", "parallel_tool_calls": False}


def lines(address: str, path: str, body: dict[str, Any]) -> list[dict[str, Any]]:
    """The lines of a stream."""
    answer = post(address, path, body)
    assert answer.status == 200 and answer.headers["content-type"] == "application/x-ndjson", answer.body
    return [json.loads(line) for line in answer.body.splitlines()]


def whole(address: str, path: str, **body: Any) -> dict[str, Any]:
    answer = post(address, path, {"model": "pair:latest", "stream": False, **body})
    assert answer.status == 200, answer.body
    return dict(answer.data)


def openai(address: str, **fields: Any) -> dict[str, Any]:
    """The message of the chat in OpenAI's fields."""
    return dict(post(address, CHATS, {**FIELDS, **fields}).data["choices"][0]["message"])


def test_chat_and_generate_are_the_chat_of_openai(address: str) -> None:
    wanted = openai(address, messages=[{"role": "system", "content": "s"}, USER])["content"]
    said = whole(address, CHAT, messages=[{"role": "system", "content": "s"}, USER], options=OPTIONS)
    assert said["message"] == {"role": "assistant", "content": wanted}
    assert (said["model"], said["done"], said["done_reason"]) == ("pair:latest", True, "length")
    assert said["eval_count"] == 20 and said["prompt_eval_count"] > 5 and said["eval_duration"] > 1000
    assert said["total_duration"] >= said["eval_duration"] + said["prompt_eval_duration"]
    generated = whole(address, GENERATE, prompt="Why?", system="s", options=OPTIONS)
    assert generated["response"] == wanted and "message" not in generated
    raw = whole(address, GENERATE, prompt="Why?", raw=True, options=OPTIONS)["response"]
    assert raw == post(address, "/v1/completions", {**FIELDS, "prompt": "Why?"}).data["choices"][0]["text"]
    # Streams are the default.
    streamed = lines(address, CHAT, {"messages": [{"role": "system", "content": "s"}, USER], "options": OPTIONS})
    assert "".join(line["message"]["content"] for line in streamed) == wanted and len(streamed) > 3
    assert [line["done"] for line in streamed] == [False] * (len(streamed) - 1) + [True]
    assert streamed[-1]["done_reason"] == "length"
    streamed = lines(address, GENERATE, {"prompt": "Why?", "system": "s", "options": OPTIONS})
    assert "".join(line["response"] for line in streamed) == wanted


def test_form_and_log_probabilities(address: str) -> None:
    said = whole(address, CHAT, messages=[USER], format=SCHEMA, options={"temperature": 0})
    assert sorted(json.loads(said["message"]["content"])) == ["a", "b"] and said["done_reason"] == "stop"
    said = whole(address, GENERATE, prompt="x", logprobs=True, top_logprobs=2, options={"num_predict": 3})
    assert [len(one["top_logprobs"]) for one in said["logprobs"]] == [2, 2, 2]
    streamed = lines(address, GENERATE, {"prompt": "x", "logprobs": True, "options": {"num_predict": 3, "seed": 1}})
    assert sum(len(line.get("logprobs", ())) for line in streamed) == 3


def test_calls_of_tools_come_whole_and_go_back(address: str) -> None:
    body = {"messages": [USER], **CALLS, "options": {"seed": 5, "num_predict": 100}}
    message = whole(address, CHAT, **body)["message"]
    (call,) = message["tool_calls"]
    assert call["function"]["name"] == "weather" and sorted(call["function"]["arguments"]) == ["a", "b"]
    streamed = lines(address, CHAT, body)
    (streamed_call,) = [call for line in streamed for call in line["message"].get("tool_calls", ())]
    assert streamed_call["function"] == call["function"] == {**call["function"], "index": 0}
    cut = whole(address, CHAT, **{**body, "options": {"seed": 5, "num_predict": 12}})
    assert "tool_calls" not in cut["message"] and cut["done_reason"] == "length"
    # Ollama's calls need no ids; the result belongs to the call of its name.
    said = {
        "role": "assistant",
        "content": "",
        "tool_calls": [{"function": {"name": "weather", "arguments": {"a": 1}}}],
    }
    back = [USER, said, {"role": "tool", "tool_name": "weather", "content": "rain"}]
    function = {"name": "weather", "arguments": '{"a": 1}'}
    answer = {"role": "assistant", "content": "", "tool_calls": [{"id": "c", "type": "function", "function": function}]}
    result = {"role": "tool", "tool_call_id": "c", "content": "rain"}
    wanted = openai(address, messages=[USER, answer, result])["content"]
    assert whole(address, CHAT, messages=back, options=OPTIONS)["message"]["content"] == wanted


def test_thinking(address: str, thinking_address: str) -> None:
    asked: dict[str, Any] = {"messages": [USER], "eagle": {"constraint": {"regex": "ab</think>cd"}}}
    said = whole(thinking_address, CHAT, **asked)["message"]
    assert (said["thinking"], said["content"]) == ("ab", "cd")
    streamed = [line["message"] for line in lines(thinking_address, CHAT, {**asked, "think": True})]
    assert "".join(line.get("thinking", "") for line in streamed) == "ab"
    assert "".join(line["content"] for line in streamed) == "cd"
    plain = {"messages": [USER], "eagle": {"constraint": {"regex": "cd"}}, "think": False}
    assert "thinking" not in whole(thinking_address, CHAT, **plain)["message"]
    assert post(address, CHAT, {"messages": [USER], "think": True}).status == 400
    assert whole(address, CHAT, messages=[USER], think=False, options={"num_predict": 1})["done"]


def test_what_is_told_of_the_model(address: str) -> None:
    (model,) = request(address, "GET", "/api/tags").data["models"]
    assert model["name"] == model["model"] == "pair:latest" and model["size"] > 10_000 and len(model["digest"]) == 64
    (loaded,) = request(address, "GET", "/api/ps").data["models"]
    assert loaded["context_length"] > 100 and {**loaded, **model} == loaded
    shown = post(address, "/api/show", {"model": "pair:latest"}).data
    assert shown["capabilities"] == ["completion", "tools"] and "messages" in shown["template"]
    assert shown["model_info"]["eagle.context_length"] == loaded["context_length"]
    assert request(address, "GET", "/api/version").data["version"].count(".") == 2
    assert whole(address, CHAT, messages=[])["done_reason"] == "load"
    assert whole(address, GENERATE, keep_alive=0)["done_reason"] == "unload"


@pytest.mark.parametrize(
    ("path", "fields", "word"),
    [
        (CHAT, {"messages": [{**USER, "images": ["aGk="]}]}, "messages[0].images"),
        (CHAT, {"options": {"temperature": -1}}, "temperature"),
        (CHAT, {"options": {"mirostat": 2}}, "mirostat"),
        (CHAT, {"options": {"tfs_z": 0.5}}, "tfs_z"),
        (CHAT, {"format": "xml"}, "format"),
        (CHAT, {"format": {"type": 3}}, "format"),
        (CHAT, {"options": {"num_predict": 0}}, "options.num_predict"),
        (GENERATE, {"suffix": "x"}, "suffix"),
        (GENERATE, {"template": "x"}, "template"),
        (GENERATE, {"context": [1]}, "context"),
        (GENERATE, {"images": ["aGk="]}, "images"),
        (GENERATE, {"prompt": "refuse this"}, "no thanks"),
        ("/api/embed", {"input": "x"}, "embeddings"),
        ("/api/pull", {}, "eagle-export"),
    ],
    ids=str,
)
def test_what_is_refused(address: str, path: str, fields: dict[str, Any], word: str) -> None:
    own = {"messages": [USER]} if path == CHAT else {"prompt": "x"}
    answer = post(address, path, {"model": "pair", "stream": False, **own, **fields})
    assert answer.status in (400, 404) and word in answer.data["error"], answer.body


def test_options_that_ask_nothing_are_accepted(address: str) -> None:
    """What Ollama's clients send by default, and options of the machine."""
    options = {
        "num_ctx": 4096, "num_gpu": 1, "num_thread": 4, "num_batch": 512, "num_keep": 5, "use_mmap": True,
        "mirostat": 0, "mirostat_tau": 5.0, "mirostat_eta": 0.1, "tfs_z": 1.0, "typical_p": 1.0,
        "penalize_newline": False,
        "repeat_penalty": 1.0, "repeat_last_n": 64, "top_k": 40, "top_p": 0.9, "min_p": 0.0, "num_predict": 4,
        "presence_penalty": 0.0, "frequency_penalty": 0.0, "stop": [], "low_vram": False,
    }  # fmt: skip
    body = {
        "messages": [USER], "keep_alive": "5m", "format": "", "tools": [], "truncate": True, "options": options,
    }  # fmt: skip
    answer = post(address, CHAT, {**body, "stream": False})
    assert answer.status == 200 and "x-eagle-ignored" not in answer.headers, (answer.body, answer.headers)
