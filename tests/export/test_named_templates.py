"""Chat templates with names: the one for chats with tools goes into the bundle, and is the one that such chats get."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from eagle_export.reading.families.target import open_target
from eagle_export.reading.texts import read_texts, text_of
from eagle_runtime.text.answer_form import chat_prompt
from eagle_runtime.text.tools import ToolUse
from export_workplace import make_target

PLAIN, TOOLS = "plain: {{ messages[0].content }}", "{{ tools[0].function.name }}: {{ messages[0].content }}"
DEFAULT, TOOL_USE = {"name": "default", "template": PLAIN}, {"name": "tool_use", "template": TOOLS}
CHAT = [{"role": "user", "content": "Hi"}]


def texts(folder: Path, stored: Any) -> dict[str, bytes]:
    """The texts of a checkpoint whose config has these templates."""
    target = make_target(folder / "target")
    (target / "tokenizer_config.json").write_text(json.dumps({"chat_template": stored}))
    return read_texts(open_target(target))


@pytest.mark.parametrize(
    ("stored", "default", "tool_use"),
    [
        (PLAIN, PLAIN, None),
        ([DEFAULT, TOOL_USE], PLAIN, TOOLS),
        ([TOOL_USE, {"name": "rag", "template": "x"}], None, TOOLS),
        ([{"name": "chat", "template": PLAIN}], PLAIN, None),
        ([], None, None),
        (None, None, None),
    ],
)
def test_templates_of_a_config(stored: Any, default: str | None, tool_use: str | None, tmp_path: Path) -> None:
    read = texts(tmp_path, stored)
    found = [read.get(name) for name in ("chat_template.jinja", "chat_template.tool_use.jinja")]
    assert [None if text is None else text.decode() for text in found] == [default, tool_use]


@pytest.mark.parametrize(("stored", "default"), [(None, "of the processor"), (PLAIN, PLAIN)])
def test_a_template_of_a_processor(stored: Any, default: str, tmp_path: Path) -> None:
    """As checkpoints that read images have one, beside a tokenizer without."""
    texts(tmp_path, stored)
    (tmp_path / "target" / "chat_template.json").write_text(json.dumps({"chat_template": "of the processor"}))
    read = read_texts(open_target(tmp_path / "target"))
    assert read["chat_template.jinja"].decode() == default and "chat_template.json" not in read


def test_a_chat_with_tools_gets_their_template(tmp_path: Path) -> None:
    target = make_target(tmp_path / "target")
    (target / "chat_template.jinja").write_text(PLAIN)
    (target / "additional_chat_templates").mkdir()
    (target / "additional_chat_templates" / "tool_use.jinja").write_text(TOOLS)
    checkpoint = open_target(target)
    text = text_of(checkpoint, read_texts(checkpoint))
    use = ToolUse.of([{"type": "function", "function": {"name": "clock"}}])
    assert text.render(CHAT) == chat_prompt(text, CHAT).text == "plain: Hi"
    assert text.render(CHAT, tools=[{"function": {"name": "clock"}}]) == "clock: Hi"
    assert chat_prompt(text, CHAT, use, tool_format="hermes").text == "clock: Hi"
