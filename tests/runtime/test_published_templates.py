"""Chat templates that models are published with: prompts equal those of transformers, to the byte."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eagle_runtime import TemplateError
from eagle_runtime.text.tokenizer import Text

TEMPLATES = sorted((Path(__file__).parents[1] / "data" / "chat_templates").glob("*.jinja"))
WEATHER: dict[str, Any] = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": 'The weather of a "place" today, in °C.',
        "parameters": {
            "type": "object",
            "properties": {
                "place": {"type": "string", "description": "Name <of> a town & land."},
                "days": {"type": "integer", "enum": [1, 3, 7]},
                "exact": {"type": ["boolean", "null"], "default": None},
            },
            "required": ["place"],
        },
    },
}
CLOCK: dict[str, Any] = {
    "type": "function",
    "function": {"name": "clock", "description": "The time.", "parameters": {}},
}


def system(content: Any) -> dict[str, Any]:
    return {"role": "system", "content": content}


def user(content: Any) -> dict[str, Any]:
    return {"role": "user", "content": content}


def assistant(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "assistant", "content": content, **more}


def call(name: str, id: str = "abc123def", **arguments: Any) -> dict[str, Any]:
    return {"id": id, "type": "function", "function": {"name": name, "arguments": arguments}}


def result(content: Any, **more: Any) -> dict[str, Any]:
    return {"role": "tool", "content": content, **more}


HI = user("Hi! ")
ASKED = [user("Weather in Zürich?"), assistant(None, tool_calls=[call("weather", place="Zürich", days=3)])]
ANSWERED = [*ASKED, result('{"celsius": -3.5}', tool_call_id="abc123def", name="weather")]
THOUGHT = assistant("4", reasoning_content="Two and two.\n\nSo four.")
MANY = [turn for number in range(12) for turn in (user(f"Question {number}?"), assistant(f"Answer {number}.\n"))]

# Name -> messages and the arguments of a render. continue_final stands for transformers' continue_final_message.
CHATS: dict[str, tuple[list[dict[str, Any]], dict[str, Any]]] = {
    "question": ([HI], {}),
    "system message": ([system("Be brief.\n"), HI], {}),
    "empty system message": ([system(""), HI], {}),
    "unicode": ([system("Ü\u2028\u0301"), user("“Tür” 🚪 \x7f<|im_end|> </s>\r\n\t"), assistant("門\u200d"), HI], {}),
    "several turns": ([system("Be brief."), *MANY, HI], {}),
    "no generation prompt": ([HI, assistant("Hello.")], {"add_generation_prompt": False}),
    "answer without content": ([HI, assistant(None), HI], {}),
    "empty answer": ([HI, assistant(""), HI], {}),
    "text parts": ([user([{"type": "text", "text": "a "}, {"type": "text", "text": "b"}])], {}),
    "tools": ([system("Help."), HI], {"tools": [WEATHER, CLOCK]}),
    "empty list of tools": ([HI], {"tools": []}),
    "tool call": (ASKED, {"tools": [WEATHER]}),
    "tool result": (ANSWERED, {"tools": [WEATHER]}),
    "answer after a tool result": ([*ANSWERED, assistant("It is -3.5 °C."), user("And now?")], {"tools": [WEATHER]}),
    "two calls": (
        [
            user("Both?"),
            assistant("", tool_calls=[call("weather", place="Ulm"), call("clock", "fed456abc", since=1731801600)]),
            result("1", tool_call_id="abc123def"),
            result([{"type": "text", "text": "12:00"}], tool_call_id="fed456abc"),
        ],
        {"tools": [WEATHER, CLOCK]},
    ),
    "reasoning": ([user("2 + 2?"), THOUGHT, user("Sure?")], {}),
    "reasoning in the text": ([user("2 + 2?"), assistant("<think>\nFour.\n</think>\n\n4"), user("Sure?")], {}),
    "reasoning turned off": ([user("2 + 2?")], {"template_kwargs": {"enable_thinking": False, "bos_token": "<B>"}}),
    "answer to continue": ([user("2 + 2?"), assistant("It is ")], {"continue_final": True}),
    "reasoned answer to continue": ([user("2 + 2?"), THOUGHT, user("And 3?"), THOUGHT], {"continue_final": True}),
    "parts to continue": ([HI, assistant([{"type": "text", "text": "Hel"}])], {"continue_final": True}),
    "question to continue": ([user("What is")], {"continue_final": True}),
    "two questions": ([HI, user("Hello?")], {}),
    "answer first": ([assistant("Hello."), HI], {}),
    "unknown role": ([{"role": "critic", "content": "No."}], {}),
    "documents": ([HI], {"template_kwargs": {"documents": [{"title": "T", "text": "t"}]}}),
}
assert len(TEMPLATES) >= 12 and len(CHATS) >= 20


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory, golden: Path) -> dict[str, tuple[Any, Text]]:
    """transformers' tokenizer and ours for each template; tokenizer_config.json has special tokens in every form."""
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<s>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
        "unk_token": None,
        "pad_token": "<pad>",
        "image_token": "<image>",  # no name that templates get
        "add_bos_token": True,
    }
    made = {}
    for template in TEMPLATES:
        folder = tmp_path_factory.mktemp(template.stem)
        shutil.copyfile(golden / "byte_tokenizer.json", folder / "tokenizer.json")
        shutil.copyfile(template, folder / "chat_template.jinja")
        (folder / "tokenizer_config.json").write_text(json.dumps(config))
        made[template.stem] = (AutoTokenizer.from_pretrained(folder), Text(folder))
    return made


def theirs(tokenizer: Any, messages: list[dict[str, Any]], arguments: dict[str, Any]) -> str | None:
    """Returns transformers' prompt; None if it refuses the chat."""
    given = dict(arguments)
    kwargs = given.pop("template_kwargs", {})
    continued = given.pop("continue_final", False)
    given.setdefault("add_generation_prompt", not continued)
    try:
        prompt: str = tokenizer.apply_chat_template(
            messages, tokenize=False, continue_final_message=continued, **given, **kwargs
        )
    except Exception:  # of a template, any
        return None
    return prompt


@pytest.mark.parametrize("template", [path.stem for path in TEMPLATES])
def test_prompts_are_those_of_transformers(template: str, sources: dict[str, tuple[Any, Text]]) -> None:
    tokenizer, text = sources[template]
    refused = []
    for name, (messages, arguments) in CHATS.items():
        wanted = theirs(tokenizer, messages, arguments)
        if wanted is None:
            refused.append(name)
            with pytest.raises(TemplateError):
                text.render(messages, **arguments)
        else:
            assert text.render(messages, **arguments) == wanted, name
    assert len(refused) <= len(CHATS) // 2
    print(
        f"{template}: {len(CHATS) - len(refused)} prompts equal, {len(refused)} refused by both: {', '.join(refused)}"
    )
