"""Chat templates: what transformers makes of them, and one clear error for those that fail or would never end."""

from __future__ import annotations

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from eagle_runtime.errors import BundleError, RequestError
from eagle_runtime.text.meter import SECONDS, TEXT_CHARS
from eagle_runtime.text.tokenizer import Text

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
}

# Each would take for ever, all memory, or more than a prompt may.
HOSTILE = {  # R stands for many turns
    "loops": "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    "loops that write": "{% for a in range(99999) %}{% for b in range(99999) %}{{ a }}{% endfor %}{% endfor %}",
    "a macro that calls itself": "{% macro m(n) %}{{ m(n) }}{% endmacro %}{{ m(1) }}",
    "a macro that calls itself twice": "{% macro m(n) %}{% if n %}{{ m(n-1) }}{{ m(n-1) }}{% endif %}{% endmacro %}"
    "{{ m(60) }}",
    "a recursive loop": "{% for x in [1,2] recursive %}{% if loop.depth < 50 %}{{ loop([1,2]) }}{% endif %}"
    "{% endfor %}",
    "a block in itself": "{% block a %}{{ self.a() }}{{ self.a() }}{% endblock %}",
    "text times a number": "{{ 'x' * 10000000000 }}",
    "a list times a number": "{{ [0] * 10000000000 }}",
    "a power": "{{ 2 ** 100000000000 }}",
    "powers": "{% set ns = namespace(x=2) %}{% for i in R %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "doubling with ~": "{% set ns = namespace(x='x') %}{% for i in R %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "doubling with +": "{% set ns = namespace(x='x') %}{% for i in R %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "doubling by a block": "{% set ns = namespace(x='x') %}{% for i in R %}{% set ns.x %}{{ ns.x }}{{ ns.x }}"
    "{% endset %}{% endfor %}",
    "doubling a list": "{% set ns = namespace(x=[1]) %}{% for i in R %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "a list of lists": "{% set ns = namespace(x=[1]) %}{% for i in R %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}"
    "{{ ns.x }}",
    "a dict of dicts": "{% set ns = namespace(x=1) %}{% for i in R %}{% set ns.x = {'a': ns.x, 'b': ns.x} %}"
    "{% endfor %}{{ ns.x | tojson }}",
    "a tuple of tuples": "{% set ns = namespace(x=1) %}{% for i in R %}{% set ns.x = (ns.x, ns.x) %}{% endfor %}"
    "{{ ns.x in {} }}",
    "namespaces in namespaces": "{% set a = namespace() %}{% set b = namespace(x=1) %}{% set b.a = a %}"
    "{% set a.b = b %}",
    "a width of a filter": "{{ 'x' | center(10000000000) }}",
    "a width of a method": "{{ 'x'.ljust(10000000000) }}",
    "tabs": "{{ '\t'.expandtabs(1000000000) }}",
    "a width of %": "{{ '%1000000000d' % 1 }}",
    "a width given to %": "{{ '%*d' | format(1000000000, 1) }}",
    "a width of format": "{{ '{:>1000000000}'.format(1) }}",
    "a width given to format": "{{ '{:{}}'.format(1, '1000000000') }}",
    "much text many times": "{{ ('%s' * 50000) % ('x' * 8000000) }}",
    "many lines of much": "{{ range(100000) | map('string') | map('center', 60000) | list | length }}",
    "replaced by much": "{{ ('a' * 5000000) | replace('a', 'b' * 5000000) }}",
    "replaced nothing by much": "{{ ('a' * 5000000).replace('', 'b' * 5000000) }}",
    "joined by much": "{{ ('x' * 5000000).join(range(100000) | map('string')) }}",
    "indented by much": "{{ ('a\n' * 2000000) | indent('x' * 1000000) }}",
    "JSON indented by much": "{{ range(100000) | list | tojson(indent=60000) }}",
    "bytes": "{{ (1).to_bytes(10000000000, 'big') }}",
    "lists added up": "{{ [[1]] | sum(start=[]) }}",
    "a range": "{{ range(10000000000) }}",
    "long text in a loop": "{% for i in range(99999) %}" + "y" * 60_000 + "{% endfor %}",
    "long text in a block": "{% set x %}{% for i in range(99999) %}" + "y" * 60_000 + "{% endfor %}{% endset %}",
    "long text in a macro": "{% macro m() %}{% for i in range(99999) %}" + "y" * 60_000 + "{% endfor %}{% endmacro %}"
    "{{ m() | length }}",
    "a filter that is slow": "{{ ('a' * 8000000) | wordwrap(1) }}",
    "brackets": "{{" + "(" * 50_000 + "1" + ")" * 50_000 + "}}",
    "statements in statements": "{% if 1 %}" * 5000 + "{% endif %}" * 5000,
    "a long sum": "{{ 1" + " + 1" * 30_000 + " }}",
    "too long itself": "x" * 300_000,
    "another template": "{% include 'x' %}",
    "Python's insides": "{{ ''.__class__.__mro__[1].__subclasses__() }}",
}

WRONG = {
    "{{ raise_exception('no system message') }}": "refuses the messages: no system message",
    "{{ messages[0].content.strip() }}": "refuses the messages: 'list object' has no attribute 'strip'",
    "{{ messages[1].content.strip() }}": "refuses the messages: 'dict object' has no attribute 'content'",
    "{{ messages[0].content + 'x' }}": "fails on the messages (TypeError: ",
    "{{ 1 / 0 }}": "fails on the messages (ZeroDivisionError: ",
    "{% for m in messages %}": "refuses the messages: ",
    "{{ messages | nosuch }}": "refuses the messages: No filter named 'nosuch'",
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


def text_of(folder: Path, template: str) -> Text:
    (folder / "chat_template.jinja").write_text(template, encoding="utf-8")
    return Text(folder)


@pytest.mark.parametrize("messages", [CHAT, LISTS, NOTHING], ids=["chat", "lists", "none"])
@pytest.mark.parametrize("name", IN_USE)
def test_prompts_are_those_of_transformers(name: str, messages: list[dict[str, Any]], folder: Path) -> None:
    text = text_of(folder, IN_USE[name])
    theirs = AutoTokenizer.from_pretrained(folder)
    try:
        wanted = theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    except Exception:
        assert name != "everything"
        with pytest.raises(RequestError, match=r"chat_template\.jinja"):
            text.render(messages)
        return
    assert text.render(messages) == wanted
    ids = theirs.apply_chat_template(messages, tokenize=True, add_generation_prompt=True, return_dict=False)
    assert text.encode(messages) == ids


@pytest.mark.parametrize("name", HOSTILE)
def test_a_template_that_would_never_end(name: str, folder: Path) -> None:
    text = text_of(folder, HOSTILE[name].replace("in R %", "in range(99) %"))
    begun = time.thread_time()
    with pytest.raises(RequestError) as refused:
        text.render(CHAT)
    assert time.thread_time() - begun < 2 * SECONDS + 1
    message = str(refused.value)
    assert message.startswith(str(folder / "chat_template.jinja")) and len(message) < 500 and "\n" not in message


@pytest.mark.parametrize("template", WRONG)
def test_a_template_that_fails(template: str, folder: Path) -> None:
    with pytest.raises(RequestError) as refused:
        text_of(folder, template).render([*LISTS, *NOTHING])
    assert str(refused.value).startswith(f"{folder / 'chat_template.jinja'} {WRONG[template]}")


def test_a_long_conversation_is_well_within_the_bounds(folder: Path) -> None:
    """A hundred times what a template makes of a usual one."""
    text = text_of(folder, IN_USE["everything"])
    begun = time.thread_time()
    prompt = text.render([{"role": ("user", "assistant")[i % 2], "content": "word " * 200} for i in range(1000)])
    assert 10**6 < len(prompt) < TEXT_CHARS and time.thread_time() - begun < SECONDS


def test_messages_that_hold_themselves(folder: Path) -> None:
    message: dict[str, Any] = {"role": "user"}
    message["content"] = [message]
    with pytest.raises(RequestError, match="message 0 holds lists or dicts in each other without end"):
        text_of(folder, "{{ messages | tojson }}").render([message])


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("{", "is not readable JSON"),
        ("[1]", "holds no JSON object"),
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
