"""Chat templates: what transformers makes of them, and one clear error for those that fail or would never end."""

from __future__ import annotations

import dataclasses
import enum
import json
import shutil
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoTokenizer

import hostile_templates
from eagle_runtime.base.errors import BundleError, TemplateError
from eagle_runtime.text.chat_template import LENGTH
from eagle_runtime.text.tokenizer import Text
from hostile_templates import HOSTILE, text_of
from systems import posix_only

CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be brief.\n"},
    {"role": "user", "content": "Was heißt “Tür”?\u2028"},
    {"role": "assistant", "content": "door"},
    {"role": "user", "content": "  thanks  "},
]
LISTS: list[dict[str, Any]] = [{"role": "user", "content": [{"type": "text", "text": "hi"}, {"type": "image"}]}]
NOTHING: list[dict[str, Any]] = [
    {"role": "assistant", "content": None, "tool_calls": [{"name": "f", "args": {"x": 1}}]}
]

# Of the kinds in use: ChatML, Llama-3, Mistral, and one that looks at everything a message may hold.
IN_USE = {
    "chatml": "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + "
    "'<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}",
    "llama3": "{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{- bos_token }}"
    "{%- if messages[0]['role'] == 'system' %}{%- set system = messages[0]['content']|trim %}"
    "{%- set messages = messages[1:] %}{%- else %}{%- set system = '' %}{%- endif %}"
    "{%- if tools is not none %}{{- 'Tools!' }}{%- endif %}{{- system }}{%- for m in messages %}"
    "{{- '<|h|>' + m['role'] + '<|/h|>\n\n' + m['content'] | trim + '<|eot|>' }}{%- endfor %}",
    "mistral": "{% set loop_messages = messages %}{% for message in loop_messages %}"
    "{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == "
    "'assistant' %}{% generation %}{{ ' ' + message['content'] ~ eos_token }}{% endgeneration %}{% endif %}"
    "{% if loop.last %}.{% else %}{{ loop.index0 % 2 }}/{{ loop.length }}{% endif %}{% endfor %}",
    "everything": "{% macro part(p) %}{% if p.type == 'text' %}{{ p.text }}{% else %}<{{ p.type }}>{% endif %}"
    "{% endmacro %}{% set ns = namespace(count=0, said='') %}{% for m in messages %}{% set ns.count = ns.count + 1 %}"
    "{% if m.content is string %}{% set ns.said = ns.said ~ m.content.strip().replace('\n', ' ').split(' ')[-1] %}"
    "{{ m.content | replace('a', 'o') | upper | indent(2) }}{% elif m.content is none %}{{ m.tool_calls | tojson }}"
    "{% for call in m.tool_calls %}{% for k, v in call.args.items() %}{{ k }}={{ v * 3 }};{{ '-' * 4 }}{% endfor %}"
    "{% endfor %}{% else %}{% for p in m.content %}{{ part(p) }}{% endfor %}{% endif %}{% endfor %}"
    "{{ messages | map(attribute='role') | unique | list | join(', ') }}{{ messages | selectattr('role', 'equalto', "
    "'user') | list | length }}{{ ns.count }}{{ ns.said }}{{ '%s-%s' | format('a', 1) }}{{ '{} {x}'.format(1, x=2) }}"
    "{{ messages | length > 2 and 'many' or 'few' }}{{ [1, 2] + [3] }}{{ {'a': 1} | tojson(indent=2) }}{{ 7 // 2 }}"
    "{{ documents is none }}{{ messages | groupby('role') | first | first }}{{ range(3) | list }}{{ nowhere }}"
    "{% for m in messages if m.role == 'user' %}{{ loop.index }}{% if loop.index == 1 %}{% continue %}{% endif %}"
    "{% break %}{% else %}nobody{% endfor %}{% filter trim %}  x  {% endfilter %}"
    "{% set block %}y{% endset %}{{ block }}",
    "large numbers": "{% macro m(n) %}{{ n }}{% endmacro %}{{ m(1731801600) }}{{ namespace(n=100000).n }}"
    "{{ nowhere | default(100000) }}{{ {'a': 1}.get('b', 100000) }}{{ [100000].index(100000) }}"
    "{{ [100000] | select('equalto', 100000) | list }}{{ 100000 | replace(1, 2) }}",
}

WRONG = {
    "{{ raise_exception('no system message') }}": "refuses the messages: no system message",
    "{{ messages[0].content.strip() }}": "refuses the messages: 'list object' has no attribute 'strip'",
    "{{ messages[1].content.strip() }}": "refuses the messages: 'dict object' has no attribute 'content'",
    "{{ messages[0].content + 'x' }}": "fails on the messages (TypeError: ",
    "{{ 1 / 0 }}": "fails on the messages (ZeroDivisionError: ",
    "{% for m in messages %}": "is not a template that can be read (line 1: Unexpected end of template",
    "{{ messages | nosuch }}": "is not a template that can be read (line 1: No filter named 'nosuch'",
    "{% for m in 5 %}{% endfor %}": "fails on the messages (TypeError: 'int' object is not iterable",
    "{{ messages[1].tool_calls[5].name.x }}": "refuses the messages: ",
}


@pytest.fixture
def folder(tmp_path: Path, golden: Path) -> Path:
    """A bundle's text files: a tokenizer and the names of its special tokens."""
    shutil.copyfile(golden / "byte_tokenizer.json", tmp_path / "tokenizer.json")
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": "<pad>",
        "eos_token": {"__type": "AddedToken", "content": "</s>"},
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    return tmp_path


@pytest.mark.parametrize("messages", [CHAT, LISTS, NOTHING], ids=["chat", "lists", "none"])
@pytest.mark.parametrize("name", IN_USE)
def test_prompts_are_those_of_transformers(name: str, messages: list[dict[str, Any]], folder: Path) -> None:
    text = text_of(folder, IN_USE[name])
    theirs = AutoTokenizer.from_pretrained(folder)
    try:
        wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:
        assert name != "everything"
        with pytest.raises(TemplateError, match=r"chat_template\.jinja"):
            text.render(messages)
        return
    assert text.render(messages) == wanted
    ids = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert text.encode(messages) == ids


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_would_never_end(name: str, folder: Path) -> None:
    text = text_of(folder, HOSTILE[name])
    with pytest.raises(TemplateError) as refused:
        text.render(CHAT)
    message = str(refused.value)
    assert message.startswith(str(folder / "chat_template.jinja")) and len(message) < 500 and "\n" not in message


@posix_only
def test_hostile_templates_take_little_memory() -> None:
    """In a process of their own, whose peak memory is theirs."""
    run = subprocess.run([sys.executable, hostile_templates.__file__], capture_output=True, text=True, check=True)
    figures = json.loads(run.stdout)
    assert figures.keys() == HOSTILE.keys() and all(refused for refused, *_ in figures.values())
    peak, seconds = max(megabytes for *_, megabytes in figures.values()), max(row[1] for row in figures.values())
    print(f"{len(figures)} templates: at most {seconds} s and {peak} MB")
    assert 0 < peak <= 300


def test_limits_hold_for_each_prompt(folder: Path) -> None:
    """A template is compiled once, and what one prompt used up another does not miss, in any thread."""
    text = text_of(
        folder, "{% for i in range(turns) %}{% for m in messages %}{{ m.content * 999 }}{% endfor %}{% endfor %}"
    )
    compiled = set()

    def rendered(turns: int) -> str:
        prompt = text.render(CHAT, template_kwargs={"turns": turns})
        compiled.add(id(text._compiled))
        return prompt

    wanted = rendered(9)
    for _ in range(3):
        with pytest.raises(TemplateError, match="was stopped"):
            rendered(99_999)
        assert rendered(9) == wanted
    with ThreadPoolExecutor(8) as pool:
        assert set(pool.map(rendered, [9] * 200)) == {wanted}
    assert len(compiled) == 1


class Kind(str, enum.Enum):  # noqa: UP042
    """As users' own classes are."""

    TEXT = "text"


@dataclasses.dataclass
class Part:
    text: str
    type: Kind = Kind.TEXT


def test_messages_are_rebuilt_of_plain_types(folder: Path) -> None:
    message = {
        "role": Kind.TEXT,
        "content": [Part("a"), {"text": np.str_("b"), "n": np.int64(3), "is": np.bool_(False), "of": object()}],
        "pair": ({"x": float("inf")}, np.float32(0.5)),
    }
    template = "{{ messages }}{{ messages | tojson }}{{ tools }}{{ documents }}{{ effort }}"
    text = text_of(folder, template)
    tools = [{"kind": Kind.TEXT}]
    kwargs = {"documents": [{"title": Kind.TEXT}], "effort": Kind.TEXT}
    theirs = AutoTokenizer.from_pretrained(folder)
    wanted = theirs.apply_chat_template([message], tools, tokenize=False, add_generation_prompt=True, **kwargs)
    assert text.render([message], tools=tools, template_kwargs=kwargs) == wanted


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ({"messages": []}, "there is no chat message"),
        ({"messages": ["hi"]}, "message 0 is 'hi', but must be a dict"),
        ({"tools": {"name": "f"}}, "tools are {'name': 'f'}, but must be a list of dicts"),
        ({"tools": [len]}, "tools are .*, but must be a list of dicts"),
        ({"template_kwargs": {"tools": []}}, "template_kwargs may not hold 'tools'"),
        ({"template_kwargs": {1: 2}}, "template_kwargs are {1: 2}, but must be a dict"),
        ({"template_kwargs": {"documents": ["x"]}}, "documents are ['x'], but must be a list of dicts"),
        ({"messages": [*CHAT, {"role": "assistant"}], "continue_final": True}, "has no text to continue"),
        ({"messages": [{"role": "assistant", "content": [{"type": "image"}]}], "continue_final": True}, "has no text"),
        ({"messages": [{"role": "assistant", "content": [{"text": 5}]}], "continue_final": True}, "has no text"),
    ],
)
def test_what_cannot_be_rendered(arguments: dict[str, Any], says: str, folder: Path) -> None:
    text = text_of(folder, "{% for m in messages %}{{ m.content }}{% endfor %}")
    with pytest.raises(TemplateError, match=says.replace("[", r"\[")):
        text.render(**{"messages": CHAT, **arguments})


@pytest.mark.parametrize("template", ["{{ messages[-1].role }}", "{{ messages[0].content }}", "{{ 'content'[:3] }}"])
def test_a_template_without_the_text_to_continue(template: str, folder: Path) -> None:
    with pytest.raises(TemplateError, match="the final message cannot be continued, since the template"):
        text_of(folder, template).render([*CHAT, {"role": "assistant", "content": "So"}], continue_final=True)


@pytest.mark.parametrize("template", WRONG)
def test_a_template_that_fails(template: str, folder: Path) -> None:
    with pytest.raises(TemplateError) as refused:
        text_of(folder, template).render([*LISTS, *NOTHING])
    assert str(refused.value).startswith(f"{folder / 'chat_template.jinja'} {WRONG[template]}")


def test_a_long_conversation_is_well_within_the_bounds(folder: Path) -> None:
    """A hundred times what a template makes of a usual one."""
    text = text_of(folder, IN_USE["everything"])
    prompt = text.render([{"role": ("user", "assistant")[i % 2], "content": "word " * 200} for i in range(1000)])
    assert 10**6 < len(prompt) < LENGTH


def test_messages_that_hold_themselves(folder: Path) -> None:
    message: dict[str, Any] = {"role": "user"}
    message["content"] = [message]
    with pytest.raises(TemplateError, match="message 0 holds lists or dicts in each other without end"):
        text_of(folder, "{{ messages | tojson }}").render([message])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not readable JSON"),
        ("[1]", "does not hold a JSON object"),
        ("[" * 100_000, "is not readable JSON"),
        (b"\xff\xfe", "is not readable JSON"),
    ],
)
def test_a_broken_tokenizer_config(content: str | bytes, says: str, folder: Path) -> None:
    raw = content.encode() if isinstance(content, str) else content
    (folder / "tokenizer_config.json").write_bytes(raw)
    text = text_of(folder, IN_USE["llama3"])
    with pytest.raises(BundleError, match=rf"tokenizer_config\.json {says}"):
        text.render(CHAT)


def test_a_template_in_another_encoding(folder: Path) -> None:
    (folder / "chat_template.jinja").write_bytes("é".encode("latin-1"))
    text = Text(folder)
    with pytest.raises(BundleError, match=r"chat_template\.jinja cannot be read as UTF-8"):
        text.render(CHAT)
