"""Requests as front ends send them, read off their public sources, and how a front end's chat is served."""

from __future__ import annotations

import json
from typing import Any

import pytest

from raw_http import events, post

CHATS, COMPLETIONS = "/v1/chat/completions", "/v1/completions"
SYSTEM = {"role": "system", "content": "Answer in one line."}
QUESTION = {"role": "user", "content": "Why is the sky blue?"}
QWEN_STOPS = [
    "<|endoftext|>", "<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>", "<|fim_pad|>", "<|repo_name|>",
    "<|file_sep|>", "<|im_start|>", "<|im_end|>", "/src/", "#- coding: utf-8", "```",
]  # fmt: skip

# Name -> endpoint, body, fields that are reported as ignored.
RECORDED: dict[str, tuple[str, dict[str, Any], set[str]]] = {
    # Open WebUI: backend/open_webui/routers/openai.py drops "metadata" and passes the rest of its form on; the form has
    # the model's parameters (utils/payload.py), and "stream_options" where the model is marked for usage.
    "open-webui-chat": (
        CHATS,
        {"stream": True, "model": "pair", "messages": [SYSTEM, QUESTION], "temperature": 0.7, "top_p": 0.9,
         "max_tokens": 32, "frequency_penalty": 0.1, "seed": 42, "stop": ["END"],
         "stream_options": {"include_usage": True}},
        set(),
    ),
    # Open WebUI: backend/open_webui/routers/tasks.py, generate_title; an older release left "metadata" in.
    "open-webui-title": (
        CHATS,
        {"model": "pair", "messages": [{"role": "user", "content": "### Task:\nGenerate a concise title\n" * 3}],
         "stream": False, "max_completion_tokens": 1000, "metadata": {"task": "title_generation", "chat_id": None}},
        {"metadata"},
    ),
    # Open WebUI: generate_chat_tags of the same file.
    "open-webui-tags": (
        CHATS,
        {"model": "pair", "messages": [{"role": "user", "content": "### Task:\nGenerate 1-3 broad tags\n"}],
         "stream": False},
        set(),
    ),
    # Continue: core/llm/openaiTypeConverters.ts, toChatBody; an empty answer is sent as " ".
    "continue-chat": (
        CHATS,
        {"messages": [SYSTEM, QUESTION, {"role": "assistant", "content": " "}, {"role": "user", "content": "Say more"}],
         "model": "pair", "max_tokens": 24, "stream": True},
        set(),
    ),
    # Continue, with a prediction for an edit: toChatBody passes it on.
    "continue-edit": (
        CHATS,
        {"messages": [QUESTION], "model": "pair", "max_tokens": 24, "temperature": 0, "stream": True,
         "prediction": {"type": "content", "content": "def f(a):\n    return a\n"}},
        set(),
    ),
    # Continue: core/autocomplete, the template of Qwen's coder with getStopTokens.ts, through _legacystreamComplete.
    "continue-autocomplete": (
        COMPLETIONS,
        {"model": "pair", "max_tokens": 24, "temperature": 0.01, "stream": True, "stop": QWEN_STOPS,
         "prompt": "<|fim_prefix|>def add(a, b):\n    <|fim_suffix|>\n<|fim_middle|>"},
        set(),
    ),
    # LM Studio's documentation: REST API, chat completions; -1 means as many tokens as there is room for.
    "lm-studio-rest": (
        CHATS,
        {"model": "granite-3.0-2b-instruct", "messages": [SYSTEM, QUESTION], "temperature": 0.7, "max_tokens": -1,
         "stream": False},
        set(),
    ),
    # LM Studio's documentation: speculative decoding and idle time to live.
    "lm-studio-draft-model": (
        CHATS,
        {"model": "deepseek-r1-distill-qwen-7b", "draft_model": "deepseek-r1-distill-qwen-0.5b", "ttl": 300,
         "messages": [QUESTION], "max_tokens": 8},
        {"draft_model", "ttl"},
    ),
    # LM Studio's list of supported payload parameters, all of them.
    "lm-studio-parameters": (
        CHATS,
        {"model": "pair", "top_p": 0.95, "top_k": 40, "messages": [QUESTION], "temperature": 0.2, "max_tokens": 8,
         "stream": True, "stop": "\n\n", "presence_penalty": 0, "frequency_penalty": 0, "logit_bias": {},
         "repeat_penalty": 1.1, "seed": -1},
        set(),
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", RECORDED)
def test_recorded_requests_are_answered(address: str, name: str) -> None:
    path, body, ignored = RECORDED[name]
    answer = post(address, path, body)
    assert answer.status == 200, answer.body
    listed = answer.headers.get("x-eagle-ignored")
    assert (set(listed.split(", ")) if listed else set()) == ignored
    if not body.get("stream"):
        assert answer.data["choices"][0]["finish_reason"] in ("stop", "length")
        return
    said = [event for event in events(answer.body) if not str(event).startswith(":")]
    assert said.pop() == "[DONE]"
    reasons = [choice["finish_reason"] for event in said for choice in event["choices"]]
    assert reasons[-1] in ("stop", "length") and set(reasons[:-1]) <= {None}


def test_lines_of_a_stream_are_what_simple_readers_expect(address: str) -> None:
    """One line of JSON after "data: ", one empty line after each event, "\\n" as line end."""
    body = {"messages": [QUESTION], "stream": True, "max_tokens": 9, "temperature": 0}
    blocks = post(address, CHATS, body).body.decode("ascii").split("\n\n")
    assert blocks.pop() == ""
    for block in blocks:
        assert "\n" not in block and "\r" not in block
        assert block.startswith((": ", "data: {", "data: [DONE]"))
        if block.startswith("data: {"):
            assert json.loads(block[6:])["object"] == "chat.completion.chunk"
