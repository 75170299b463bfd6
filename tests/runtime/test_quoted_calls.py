"""Calls with bare names and strings between marks: what may be written follows the schema, and is read as it was."""

from __future__ import annotations

import itertools
import json
import re
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from transformers import AutoTokenizer

from conftest import GOLDEN
from eagle_runtime import ConstraintError
from eagle_runtime.text.answer_form import AnswerForm, chat_prompt
from eagle_runtime.text.call_formats import format_named
from eagle_runtime.text.tokenizer import Text
from eagle_runtime.text.tools import ToolUse
from format_model import Model, form_with, names_drawn, one

ROW = format_named("gemma4")
MODELS = {special: Model(ROW, special) for special in (False, True)}
NODE = {
    "type": "object",
    "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}},
    "required": ["n"],
}
PROPERTIES: dict[str, Any] = {
    "any": {},
    "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$"},
    "day": {"type": "string", "format": "date"},
    "exact": {"type": "boolean"},
    "Kind": {"enum": ["a", "b c", 3, None, ["x", {"y": "z"}]]},
    "map": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "names": {"type": "array", "items": {"type": "string", "minLength": 1, "maxLength": 9}, "maxItems": 3},
    "node": {"$ref": "#/$defs/node"},
    "pair": {"type": "array", "prefixItems": [{"type": "string"}, {"type": "number"}], "minItems": 2, "maxItems": 2},
    "rate": {"type": "number"},
    "text": {"type": "string"},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["text"], "$defs": {"node": NODE}}
ARGUMENTS: list[dict[str, Any]] = [
    {"text": "Ulm"},
    {
        "any": [{"a": [1, "2", {}]}, None, -1.5e-07, []],
        "code": "AB/12",
        "exact": True,
        "Kind": ["x", {"y": "z"}],
        "map": {"x": ["1", "{"], "y": []},
        "maybe": None,
        "names": ["a,b", "]}", '"'],
        "node": {"n": 1, "next": {"n": 2, "next": {"n": -30}}},
        "pair": ["x", 2.5],
        "rate": -2.5e-3,
        "text": 'Zürich "West" \\ \t\n{a:1}',
    },
    {"any": "5", "day": "2026-02-28", "exact": False, "Kind": "b c", "maybe": "null", "text": "<|\"<|'|> |> 门🚪 \n"},
    {"any": {"x y": True, "z": "true"}, "text": ""},
]


def form_of(schema: Mapping[str, Any] = SCHEMA, choice: str = "required", **more: Any) -> AnswerForm:
    return form_with(ROW, schema, choice, **more)


def accepts(schema: Mapping[str, Any], *values: Any, **more: Any) -> list[bool]:
    """Which values argument `a` may have."""
    form = form_of(schema, **more)
    return [MODELS[True].accepts(form, ROW.written([("f", {"a": value})])) for value in values]


@pytest.fixture(scope="module")
def tokenizers(tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, Text]:
    """transformers' and ours, with the published template."""
    folder = tmp_path_factory.mktemp("gemma4")
    shutil.copyfile(GOLDEN / "byte_tokenizer.json", folder / "tokenizer.json")
    template = Path(__file__).parents[1] / "data" / "chat_templates" / "gemma4_v5.jinja"
    shutil.copyfile(template, folder / "chat_template.jinja")
    (folder / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>"}')
    return AutoTokenizer.from_pretrained(folder), Text(folder)


@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["one", "nested", "more", "empty"])
def test_prompts_with_calls(arguments: dict[str, Any], tokenizers: tuple[Any, Text]) -> None:
    """Calls stand in prompts as answers write them, with results and reasoning as transformers writes them."""
    theirs, text = tokenizers

    def called(as_text: bool) -> list[dict[str, Any]]:
        given = ((name, json.dumps(one) if as_text else one) for name, one in (("f", arguments), ("f2", {})))
        return [{"id": f"c{number}", "type": "function", "function": {"name": name, "arguments": one}}
                for number, (name, one) in enumerate(given)]  # fmt: skip

    results = [{"role": "tool", "tool_call_id": f"c{number}", "content": f'{{"r": {number}}}'} for number in (1, 0)]
    asked: dict[str, Any] = {"role": "user", "content": "Plan it."}
    answer = {"role": "assistant", "content": "", "reasoning_content": "Two calls.", "tool_calls": called(False)}
    tools = [{"type": "function", "function": {"name": name, "description": "", "parameters": schema}}
             for name, schema in (("f", SCHEMA), ("f2", {}))]  # fmt: skip
    for thinks, more in itertools.product((False, True), ([], results, [*results, asked])):
        wanted = theirs.apply_chat_template(
            [asked, answer, *more], tools=tools, tokenize=False, add_generation_prompt=True, enable_thinking=thinks
        )
        chat = [asked, {**answer, "tool_calls": called(True)}, *more]
        prompt = chat_prompt(text, chat, ToolUse.of(tools), template_kwargs={"enable_thinking": thinks})
        assert prompt.text == wanted and ROW.written([("f", arguments), ("f2", {})]) in wanted
        assert prompt.form.thinks and prompt.form.thinking == (thinks and more == results)
        assert prompt.form.format.name == "gemma4"


@pytest.mark.parametrize("special", [False, True], ids=["text", "special tokens"])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["one", "nested", "more", "empty"])
def test_what_is_written_is_read(arguments: dict[str, Any], special: bool) -> None:
    """Arguments that follow the schema may be written, and are read as they were; of a call that is cut anywhere what
    was read begins the JSON text of the whole, and is not kept."""
    assert Draft202012Validator(SCHEMA).is_valid(arguments)
    form, model = form_of(), MODELS[special]
    written, whole = ROW.written([("f", arguments), ("f2", {})]), json.dumps(arguments, ensure_ascii=False)
    assert model.accepts(form, written)
    reader, parts = model.read(form, written)
    first, second = reader.calls
    assert (first.name, first.arguments, second.name, second.arguments) == ("f", whole, "f2", "{}")
    assert "".join(part.text for part in parts if part.kind == "arguments" and part.index == 0) == whole
    written = ROW.written([("f", arguments)])
    for end in range(len(written)):
        if special and re.search(r"<(\|(\"\|?|[a-z_]*)?|[a-z_]*\|?)?$", written[:end]):  # within a token
            continue
        reader, _ = model.read(form, written[:end])
        for call in reader.calls:
            assert call.name == "f" and whole.startswith(call.arguments), written[:end]
        done = bool(reader.calls) and reader.calls[0].arguments == whole
        assert ("tool_calls" in reader.kept_message) == done and "<|tool_call>".startswith(reader.content)
    reader, _ = model.read(form_of(choice="auto"), f"I look.\n{written}<|tool_response>")
    assert reader.content == "I look." and json.loads(reader.calls[0].arguments) == arguments
    text = ROW.written([("f", {"text": "four words of text"})])
    assert len(model.read(form, text)[1]) > 10  # a string comes as it is written


def test_reasoning_before_calls() -> None:
    """Where the answer begins it, and where the prompt has."""
    one_call = ROW.written([("f", {"text": "a"})])
    for special, choice in itertools.product((False, True), ("auto", "required")):
        model, use = MODELS[special], form_of(choice=choice).use
        form, begun = AnswerForm(ROW, use, thinks=True), AnswerForm(ROW, use, thinks=True, thinking=True)
        for thought in ("Two < three.\n\nSo.", ""):
            answer = f"<|channel>thought\n{thought}\n<channel|>{one_call}"
            assert model.accepts(form, answer) and model.accepts(begun, answer.removeprefix("<|channel>thought\n"))
            assert not model.accepts(form, answer.replace("<channel|>", ""))
            for reader, _ in (model.read(form, answer), model.read(begun, answer.removeprefix("<|channel>thought\n"))):
                assert (reader.reasoning, reader.content, len(reader.calls)) == (thought, "", 1)
        assert model.accepts(form, "<|channel>thought\n<channel|>No.") == (choice == "auto")


VALUES: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "string", "maxLength": 3}, ["", "abc", "a\nb"], ["abcd", 1]),
    ({"type": "string", "pattern": "^(a|c)$"}, ["a", "c"], ["b", "ac"]),
    ({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256"]),
    ({"enum": ["", "x", 1, [], {"b": ["c"]}]}, ["", "x", 1, [], {"b": ["c"]}], ["y", 2, "1", ["x"], {}]),
    ({"type": ["string", "integer"], "maxLength": 2}, ["ab", 12345, "5"], ["abc", 1.5]),
    ({"type": "integer", "minimum": 2, "maximum": 9, "nullable": False}, [2, 9], [1, 10, "2", True]),
    ({"type": "boolean"}, [True, False], [None, "true", 1]),
    ({"type": "array"}, [[], [1, "x", [None]], [{"b": 1}]], ["x", {}]),
    ({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}, [[], [1, 2]], [[3], [1, 1, 1], ["1"]]),
    ({"type": "array", "items": {"$ref": "#/$defs/n"}}, [[1, 2]], [[3]]),
    ({"type": "object"}, [{}, {"b": [1], "c": {"d": ""}}], [[], "x"]),
    (one({"type": "string"}), [{"a": "x"}], [{}, {"a": 1}, {"a": "x", "b": 1}]),
    ({"type": "array", "items": one({"type": "array", "items": one({"type": "null"})})},
     [[{"a": []}, {"a": [{"a": None}]}]], [[{"a": [{"a": 1}]}], [{"a": None}]]),
    ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "array", "items": {"type": "null"}}]}, ["a", [None]],
     ["ab", [1]]),
    ({"type": "object", "properties": {"b": {}, "c": False}}, [{}, {"b": {"x": 1}}], [{"c": 1}]),
    ({"type": "array", "items": False}, [[]], [[1]]),
    ({"properties": {"b": {"type": "string"}}, "additionalProperties": {"type": "integer"}, "type": "object"},
     [{"b": "x", "b2": 1}, {"Zürich": 1}], [{"b": 1}, {"b2": "x"}]),
]  # fmt: skip


@pytest.mark.parametrize("row", VALUES, ids=lambda row: json.dumps(row[0]))
def test_values_follow_their_schema(row: tuple[Any, list[Any], list[Any]]) -> None:
    schema, good, wrong = row
    whole = one(schema, **{"$defs": {"n": {"enum": [1, 2]}}})
    assert accepts(whole, *good) == [True] * len(good)
    assert accepts(whole, *wrong) == [False] * len(wrong)


@pytest.mark.parametrize("more", [False, {"type": "integer"}], ids=["closed", "open"])
def test_which_members_may_stand(more: Any) -> None:
    """All choices of four members and two others, whichever of the four are required."""
    names, others = ("a", "B", "c", "c2"), ("x", "y-1")
    properties = {name: {"type": "integer"} for name in ("c", "a", "c2", "B")}
    for size in range(len(names) + 1):
        for required in itertools.combinations(names, size):
            schema = {
                "type": "object",
                "properties": properties,
                "required": required[::-1],
                "additionalProperties": more,
            }
            form = form_of(one(json.loads(json.dumps(schema))))
            for chosen in itertools.product((False, True), repeat=6):
                given = dict.fromkeys(itertools.compress((*names, *others), chosen), 1)
                fits = set(required) <= set(given) and (more is not False or not any(chosen[4:]))
                assert MODELS[True].accepts(form, ROW.written([("f", {"a": given})])) == fits, (required, given)


def test_no_name_stands_twice() -> None:
    """Of those that the schema names."""
    form = form_of({"properties": {"b": {}}, "additionalProperties": {"type": "integer"}, "type": "object"})
    written = ROW.written([("f", {"b": 1, "c": 2})])
    for name, fits in (("d", True), ("b", False), ("b2", True)):
        assert MODELS[True].accepts(form, written.replace(",c", f",{name}")) == fits


def test_lengths_of_lists() -> None:
    """As jsonschema counts them, with first items of their own and without."""
    lists = [list(items) for size in range(5) for items in itertools.product((1, "x"), repeat=size)]
    for first, items, least, most in itertools.product(
        (None, [{"type": "integer"}], [{"type": "string"}, False]),
        ({"type": "integer"}, False),
        (0, 1, 3),
        (None, 0, 2, 3),
    ):
        schema = {"type": "array", "items": items, "minItems": least}
        schema |= ({} if most is None else {"maxItems": most}) | ({} if first is None else {"prefixItems": first})
        fits = [Draft202012Validator(schema).is_valid(value) for value in lists]
        if any(fits):
            assert accepts(one(schema), *lists) == fits, schema
        else:
            with pytest.raises(ConstraintError, match="no value can be given for 'a'"):
                accepts(one(schema), [])


def test_names_and_spaces_that_models_write_otherwise() -> None:
    """White space between signs counts as none, and what is no JSON is text."""
    text = '<|tool_call>call:f{ b c : [ 1 , <|"|> x <|"|> ] ,\nd: yes, e: {f: NaN } }<tool_call|>'
    reader, _ = MODELS[True].read(form_of({}), text)
    assert json.loads(reader.calls[0].arguments) == {"b c": [1, " x "], "d": "yes", "e": {"f": "NaN"}}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (one({"type": "string", "not": {"const": "b"}}), "of tool 'f' have not, which calls in the format gemma4"),
        (one({"type": "array", "uniqueItems": True}), "have uniqueItems, which calls"),
        (one({"type": "array", "minItems": "1"}), "have minItems, which calls"),
        (one({"type": "array", "items": {"type": "object", "minProperties": 2}}), "have minProperties, which calls"),
        (one({}, anyOf=[{"required": ["b"]}, {}]), "have anyOf, which calls"),
        (one({"type": "object", "properties": {"b:c": {}}}), "have the property 'b:c', which calls"),
        (one({"type": "integer", "minimum": 2, "maximum": 1}), "of tool 'f' cannot be followed"),
        (one(one(False)), "no value can be given for 'a', which is required"),
        (one({"type": "array", "items": False, "minItems": 1}), "no value can be given for 'a'"),
        (one({"enum": []}), "no value can be given for 'a'"),
    ],
)
def test_schemas_that_cannot_be_followed(schema: Any, says: str) -> None:
    for more in ({"choice": "required"}, {"choice": "auto", "strict": True}):
        with pytest.raises(ConstraintError, match=says):
            MODELS[True].accepts(form_of(schema, **more), "x")


def test_schemas_that_are_followed_in_part() -> None:
    """What cannot be followed is passed over where nothing was promised."""
    for schema, value in (({"type": "array", "uniqueItems": True}, [1]), ({"type": "object", "maxProperties": 3}, {})):
        assert accepts(one(schema), value, choice="auto") == [True]
    deep: dict[str, Any] = {}
    for _ in range(99):
        deep = one(deep)
    with pytest.raises(ConstraintError, match="more than 64 levels deep; make them flatter"):
        accepts(deep, 1)


@pytest.mark.parametrize("special", [False, True], ids=["text", "special tokens"])
def test_whatever_may_be_written_follows_the_schema(special: bool) -> None:
    """Answers drawn at random from what the grammar allows, read and compared with the schema."""
    names = names_drawn(MODELS[special], ROW, SCHEMA, ('<|"|>', "]", "}"), 'ab1 -.,:{}[]"\\\n<|/')
    assert len(names) > 8
