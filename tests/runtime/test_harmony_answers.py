"""Answers in OpenAI's harmony format from a model: with drafts as without, in conversations, shown to users."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_runtime import Constraint, EagleModel, ToolUse
from eagle_runtime.app.conversation import Conversation
from eagle_runtime.app.result import Result
from eagle_runtime.commands import cli
from eagle_runtime.commands.chat_screen import DIM, PLAIN, Interrupt, Screen, shown
from eagle_runtime.commands.chat_talk import Talk
from eagle_runtime.core.decoding_state import common_prefix
from harmony_bundle import BIAS, TOOLS, harmony_bundle, marker
from terminal import Terminal

SCHEMA = Constraint.json_schema(
    {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"], "additionalProperties": False}
)
ASKED: dict[str, Any] = {"temperature": 1.0, "logit_bias": BIAS, "max_new_tokens": 160}
DRAFTS: list[dict[str, Any]] = [{"method": "eagle+lookup"}, {"tree": "dynamic"}, {"method": "lookup"}]


@pytest.fixture(scope="module")
def bundle(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    return harmony_bundle(bundle_of("eagle1", "int8"), tmp_path_factory.mktemp("harmony") / "pair")


@pytest.fixture(scope="module")
def model(bundle: Path) -> Iterator[EagleModel]:
    with EagleModel.load(bundle, threads=1) as loaded:
        yield loaded


def answered(model: EagleModel, **settings: Any) -> Result:
    """An answer, whose pieces have the parts of its message."""
    with model.conversation() as chat:
        pieces = list(chat.send("Weather?", **{**ASKED, **settings}))
    result, parts = pieces[-1].result, [part for piece in pieces for part in piece.parts]
    assert result is not None and result.message is not None
    content, reasoning = ("".join(p.text for p in parts if p.kind == kind) for kind in ("content", "reasoning"))
    assert content == (result.message["content"] or "") == result.text == "".join(piece.text for piece in pieces)
    assert reasoning == result.message.get("reasoning_content", "")
    return result


def seed_of(model: EagleModel, *fields: str, **settings: Any) -> int:
    """A seed whose answer has all fields of a message, and ends by itself."""
    for seed in range(80):
        result = answered(model, seed=seed, **settings)
        if all((result.message or {}).get(name) for name in fields) and result.finish_reason != "length":
            return seed
    raise AssertionError(f"no answer has {fields}")


@pytest.mark.parametrize("choice", ["auto", "required", "none"])
def test_drafts_change_no_answer(choice: str, model: EagleModel) -> None:
    for seed in range(3):
        asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": choice, "seed": seed}
        plain = answered(model, method="vanilla", **asked)
        for drafts in DRAFTS:
            again = answered(model, **drafts, **asked)
            assert (again.token_ids, again.text, again.finish_reason) == (
                plain.token_ids, plain.text, plain.finish_reason,
            )  # fmt: skip


def test_calls_draft_themselves(model: EagleModel) -> None:
    """A head's words, the name, keys and quotes take no forward passes of their own."""
    result = answered(model, tools=TOOLS, tool_choice="required", seed=seed_of(model, "tool_calls", tools=TOOLS))
    assert result.finish_reason == "tool_calls" and result.message is not None and result.text == ""
    (call,) = result.message["tool_calls"]
    assert call["function"]["name"] == "weather" and set(json.loads(call["function"]["arguments"])) == {"place", "days"}
    assert result.token_ids[-1] == marker("<|call|>") == result.stop.value
    assert result.usage.forced_tokens > 40 and result.usage.target_passes < len(result.token_ids) / 3


def test_a_schema_is_of_the_content(model: EagleModel) -> None:
    seed = seed_of(model, "reasoning_content", constraint=SCHEMA)
    plain = answered(model, constraint=SCHEMA, seed=seed, method="vanilla")
    assert json.loads(plain.text or "") in ({"a": 1}, {"a": 2}) and plain.stop.kind == "constraint_end"
    for drafts in DRAFTS:
        assert answered(model, constraint=SCHEMA, seed=seed, **drafts).token_ids == plain.token_ids


def turn_of(chat: Conversation, text: str, **settings: Any) -> Result:
    """The answer to a message in a conversation."""
    result = list(chat.send(text, **{**ASKED, **settings}))[-1].result
    assert result is not None
    return result


def test_a_conversation_goes_on(model: EagleModel) -> None:
    """The template drops what was thought; what stands before that is not read again, and answers are those of a new
    text."""
    seed = seed_of(model, "reasoning_content", "content", tools=TOOLS)
    with model.conversation(tools=TOOLS) as chat:
        turn_of(chat, "Weather?", seed=seed)
        assert set(chat.messages[-1]) == {"role", "content", "reasoning_content"}
        before, messages = chat.token_ids, [*chat.messages, {"role": "user", "content": "And now?"}]
        second = turn_of(chat, "And now?", seed=1)
        prompt = model.chat_prompt(messages, ToolUse.of(TOOLS))
        ids = model.text.encode_rendered(prompt.text)
        assert list(chat.token_ids[: len(ids)]) == ids
        common = common_prefix(before, ids)
        assert second.usage.cached_tokens in (common, common - 1) and common > 400
        assert second.usage.prefilled_tokens < 200
        again = model.generate(ids, form=prompt.form, method="vanilla", **{**ASKED, "seed": 1})
        assert again.token_ids == second.token_ids


def test_an_answer_without_reasoning_is_not_read_again(model: EagleModel) -> None:
    head = model.text.encode_rendered("<|channel|>final<|message|>")
    with model.conversation(tools=TOOLS) as chat:
        for seed in range(200):
            result = turn_of(chat, "Weather?", seed=seed, max_new_tokens=60)
            if list(result.token_ids[: len(head)]) == head:
                break
            chat.rollback(to=0)
        else:
            raise AssertionError("no answer begins with the final channel")
        before = chat.token_ids
        usage = turn_of(chat, "And now?", seed=1).usage
        assert chat.token_ids[: len(before)] == before and usage.cached_tokens >= len(before) - 1


def test_an_answer_that_was_cut_in_its_head(model: EagleModel) -> None:
    """Nothing was said, and the next prompt is that of a new text."""
    with model.conversation() as chat:
        bias = {"logit_bias": {marker("<|channel|>"): 100.0}}
        assert turn_of(chat, "Hi", max_new_tokens=1, constraint=SCHEMA, **bias).text == ""
        assert chat.messages[-1] == {"role": "assistant", "content": ""}
        messages = [*chat.messages, {"role": "user", "content": "Now?"}]
        turn_of(chat, "Now?", max_new_tokens=1)
        ids = model.text.encode_rendered(model.chat_prompt(messages).text)
        assert list(chat.token_ids[: len(ids)]) == ids


def test_calls_and_results_in_a_conversation(model: EagleModel, tmp_path: Path) -> None:
    with model.conversation(tools=TOOLS) as chat:
        seed = seed_of(model, "reasoning_content", "tool_calls", tools=TOOLS, tool_choice="required")
        turn_of(chat, "Weather?", seed=seed, tool_choice="required")
        message = chat.messages[-1]
        assert message["content"] is None and message["reasoning_content"]
        (call,) = message["tool_calls"]
        list(chat.send_results({call["id"]: {"rain": True}}, **{**ASKED, "max_new_tokens": 3}))
        said = "".join(model.text.token_texts(chat.token_ids))
        assert f"<|channel|>analysis<|message|>{message['reasoning_content']}<|end|><|start|>assistant to=" in said
        assert 'functions.weather to=assistant<|channel|>commentary<|message|>"{\\"rain\\": true}"<|end|>' in said
        chat.save(tmp_path / "chat")
    with model.load_conversation(tmp_path / "chat") as loaded:
        assert loaded.kv_rows > 400 and loaded.messages[1] == message


def test_messages_without_a_conversation(model: EagleModel, bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """`generate`, a batch and eagle-run show the content alone."""
    messages = [{"role": "user", "content": "Hi"}]
    settings: dict[str, Any] = {**ASKED, "constraint": SCHEMA, "max_new_tokens": 400}
    seed = next(n for n in range(80) if (model.generate(messages, seed=n, **settings).message or {}).get(
        "reasoning_content"))  # fmt: skip
    result = model.generate(messages, seed=seed, **settings)
    assert result.text in ('{"a": 1}', '{"a": 2}') and result.message is not None
    pieces = [piece for _, piece in model.batch([messages], seed=seed, **settings)]
    assert "".join(piece.text for piece in pieces) == result.text
    bias = {marker("<|end|>"): 8.0}
    plain = model.generate(messages, seed=2, temperature=1.0, max_new_tokens=60, logit_bias=bias)
    arguments = [str(bundle), "--message", "Hi", "--temperature", "1", "--seed", "2", "--max-new-tokens", "60"]
    assert cli.main([*arguments, "--threads", "1", "--logit-bias", f"{marker('<|end|>')}=8"]) == 0
    assert plain.text and capsys.readouterr().out.startswith(plain.text) and "<|" not in plain.text


def chat_lines(seed: int) -> list[str]:
    """What is typed so that eagle-chat draws an answer with a seed."""
    asked = {**ASKED, "seed": seed, "logit_bias": {str(token): value for token, value in BIAS.items()}}
    return [*(f"/set {name} {json.dumps(value)}" for name, value in asked.items()), "Weather?"]


def test_chats_show_reasoning_apart(
    model: EagleModel, bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Dim at a terminal, and not at all without one."""
    seed = seed_of(model, "reasoning_content", "content", tools=TOOLS)
    message = answered(model, tools=TOOLS, seed=seed).message
    assert message is not None
    talk = Talk(model, Screen(), Interrupt(), {}, TOOLS)
    for line in chat_lines(seed):
        talk.take(line)
    assert talk.messages[-1] == message and capsys.readouterr().out == shown(message["content"]).rstrip("\n") + "\n"
    if sys.platform == "win32":  # which has no pseudo-terminals
        return
    (tmp_path / "tools.json").write_text(json.dumps(TOOLS))
    command = [sys.executable, "-m", "eagle_runtime.commands.chat", bundle, "--threads", "1"]
    variables = {name: value for name, value in os.environ.items() if name != "NO_COLOR"}
    variables |= {"PYTHONPATH": os.pathsep.join(sys.path), "TERM": "xterm", "PYTHONIOENCODING": "utf-8"}
    terminal = Terminal([*command, "--tools", tmp_path / "tools.json"], variables)
    try:
        for line in chat_lines(seed):
            terminal.until("> ")
            terminal.type(f"{line}\n")
        said = terminal.until("tokens/s").replace("\r\n", "\n")
    finally:
        terminal.close()
    dim, plain = "", said
    for piece in said.split(DIM)[1:-1]:  # the last one is the line of figures
        dim += piece.split(PLAIN)[0]
        plain = piece.split(PLAIN)[1]
    assert dim == shown(message["reasoning_content"])
    assert plain.strip("\n") == shown(message["content"]).strip("\n")


def test_a_worker_tells_of_the_parts(model: EagleModel, bundle: Path) -> None:
    asked: dict[str, Any] = {"tools": TOOLS, "tool_choice": "required"}
    seed = seed_of(model, "reasoning_content", "tool_calls", **asked)
    wanted = answered(model, seed=seed, **asked)
    bias = {str(token): value for token, value in BIAS.items()}
    settings = {**asked, "temperature": 1.0, "seed": seed, "max_new_tokens": 160, "logit_bias": bias}
    order = {"id": 1, "op": "generate", "messages": [{"role": "user", "content": "Weather?"}], **settings}
    command = [sys.executable, "-m", "eagle_runtime.commands.cli", "--worker", str(bundle), "--threads", "1"]
    variables = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    events: list[dict[str, Any]] = []
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=variables) as worker:
        assert worker.stdin is not None and worker.stdout is not None
        worker.stdin.write(json.dumps(order) + "\n")
        worker.stdin.flush()
        while not events or events[-1]["event"] not in ("done", "error"):
            events.append(json.loads(worker.stdout.readline()))
        worker.stdin.close()
    result, pieces = events[-1]["result"], [event for event in events if event["event"] == "piece"]
    assert tuple(result["token_ids"]) == wanted.token_ids and result["text"] == wanted.text == ""
    parts = [part for piece in pieces for part in piece.get("parts", ())]
    reasoning = "".join(part["text"] for part in parts if part["kind"] == "reasoning")
    assert wanted.message is not None and reasoning == wanted.message["reasoning_content"]
    assert [part["text"] for part in parts if part["kind"] == "call"] == ["weather"]
