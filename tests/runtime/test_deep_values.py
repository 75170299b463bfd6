"""Values nested more deeply than anybody writes: one sentence says so, nothing is lost, and the next call works."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from eagle_runtime import ConstraintError, ConversationFileError, EagleModel, RequestError, TemplateError
from eagle_runtime.app.conversation_file import pack, read
from eagle_runtime.base.arguments import MOST_DEPTH, is_deeper
from eagle_runtime.base.errors import BundleError
from eagle_runtime.base.files import parse_json
from eagle_runtime.commands import chat as eagle_chat
from eagle_runtime.commands import cli as eagle_run
from eagle_runtime.sampling.call_grammar import calls_constraint
from eagle_runtime.text.answer_form import AnswerForm
from eagle_runtime.text.call_formats import FORMATS
from eagle_runtime.text.tools import ToolUse

DEPTHS = (100, 300, 500, 900, 2_000, 100_000)
SHORT: Any = {"max_new_tokens": 4, "temperature": 0.0}


def deep(levels: int) -> Any:
    value: Any = 1
    for _ in range(levels):
        value = [value]
    return value


def deep_text(levels: int) -> str:
    return '{"a": ' + "[" * levels + "]" * levels + "}"


def schema(levels: int) -> dict[str, Any]:
    """Objects in each other, two levels of JSON for each of them."""
    inner: dict[str, Any] = {"type": "string"}
    for _ in range(levels // 2):
        inner = {"type": "object", "properties": {"a": inner}}
    return inner


def tool(parameters: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": parameters, **more}}


@pytest.fixture(scope="module")
def model(chatting: Path) -> Iterator[EagleModel]:
    with EagleModel.load(chatting, threads=1) as loaded:
        yield loaded


def test_levels_are_counted() -> None:
    assert not is_deeper(1) and not is_deeper(deep(MOST_DEPTH)) and is_deeper(deep(MOST_DEPTH + 1))
    assert not is_deeper([deep(2), {"a": (1, {})}], 4) and is_deeper([deep(2), {"a": ([], [{}])}], 4)
    both: list[Any] = []
    both += [both, both]
    assert is_deeper(both), "two ways to itself at each level"


@pytest.mark.parametrize("levels", DEPTHS)
def test_tools(levels: int) -> None:
    for given in (tool(schema(levels)), tool({"enum": [deep(levels)]}), tool({}, description=deep(levels))):
        with pytest.raises(ConstraintError, match=r"^tools\[1\] has values more than 64 levels deep"):
            ToolUse.of([tool({}) | {"function": {"name": "g"}}, given])


def test_the_deepest_tools_are_followed() -> None:
    """In every format, from a stack as deep as an application's."""
    use = ToolUse.of([tool(schema(MOST_DEPTH - 4))], "required")

    def after(frames: int) -> None:
        if frames:
            return after(frames - 1)
        for form in FORMATS:
            if form.channels is None:
                assert calls_constraint(AnswerForm(form, use), {}, None).source
        return None

    after(300)


@pytest.mark.parametrize("levels", DEPTHS)
def test_a_conversation_stays_as_it_was(model: EagleModel, levels: int) -> None:
    call: dict[str, Any] = {"id": "x", "type": "function", "function": {"name": "f", "arguments": {"a": deep(levels)}}}
    with model.conversation() as chat:
        with pytest.raises(RequestError, match="64 levels deep"):
            chat.send("hi", tools=[tool(schema(levels))])
        with pytest.raises(TemplateError, match=r"template_kwargs holds lists or dicts .* more than 64"):
            model.conversation(template_kwargs={"a": deep(levels)}).send("hi")
        for arguments in (call["function"]["arguments"], deep_text(levels)):
            given = {**call, "function": {"name": "f", "arguments": arguments}}
            with pytest.raises(RequestError, match=r"messages\[0\]\.tool_calls\[0\]\.function\.arguments"):
                chat.send({"role": "assistant", "content": "", "tool_calls": [given]})
        with pytest.raises(TemplateError, match=r"message 0 holds lists or dicts .* more than 64"):
            chat.send({"role": "user", "content": deep(levels)})
        assert chat.messages == []
        list(chat.send("hi", **SHORT))
        assert len(chat.messages) == 2


def test_results_of_calls(model: EagleModel) -> None:
    call: dict[str, Any] = {"id": "x", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    before: list[dict[str, Any]] = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
    ]
    with model.conversation(before) as chat:
        for result in (deep(100_000), {1, 2}):
            with pytest.raises(RequestError, match="a result is not JSON"):
                chat.send_results({"x": result})
        assert chat.messages == before


def test_tools_that_are_not_json(model: EagleModel) -> None:
    with pytest.raises(RequestError, match=r"tools\[0\] is not JSON \(Object of type set"):
        ToolUse.of([tool({"enum": {1, 2}})])
    call: dict[str, Any] = {"id": "x", "function": {"name": "f", "arguments": {"a": {1, 2}}}}
    with pytest.raises(RequestError, match=r"messages\[0\].tool_calls are not JSON"):
        model.conversation().send({"role": "assistant", "content": "", "tool_calls": [call]})


@pytest.mark.parametrize("levels", DEPTHS)
def test_json_in_files(levels: int, chatting: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(BundleError, match=r"^x is not readable JSON .*; y$"):
        parse_json(deep_text(levels), "x", BundleError, "y")
    messages, tools = tmp_path / "messages.json", tmp_path / "tools.json"
    messages.write_text(f'[{{"role": "user", "content": {deep_text(levels)}}}]')
    tools.write_text(f'[{{"name": "f", "parameters": {deep_text(levels)}}}]')
    assert eagle_run.main([str(chatting), "--backend", "cpu", "--messages", str(messages)]) == 2
    assert eagle_chat.main([str(chatting), "--backend", "cpu", "--tools", str(tools)]) == 2
    said = capsys.readouterr().err.splitlines()
    assert [line.partition(": ")[0] for line in said if "loading" not in line] == ["eagle-run", "eagle-chat"], said


def test_a_conversation_in_a_file(model: EagleModel, tmp_path: Path) -> None:
    path = tmp_path / "chat"
    model.conversation([{"role": "user", "content": "hi"}]).save(path)
    saved, ids, rows = read(path, 1 << 20)
    for levels in DEPTHS[-2:]:
        path.write_bytes(pack(dataclasses.replace(saved, messages="[" * levels + "]" * levels), ids, rows))
        with pytest.raises(ConversationFileError, match="holds messages that are not valid"):
            model.load_conversation(path)
