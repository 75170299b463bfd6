"""Calls whose arguments stand between tags: what may be written follows the schema, and what is read has its types."""

from __future__ import annotations

import itertools
import json
import random
import re
from collections.abc import Mapping
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from eagle_runtime import ConstraintError
from eagle_runtime.sampling.tagged_grammar import FORMATS, whole_pattern
from eagle_runtime.text.answer_form import AnswerForm
from eagle_runtime.text.call_formats import format_named, recognised
from eagle_runtime.text.tagged_values import Looked, split
from format_model import Model, form_with, one

NAMES = ("qwen3-coder", "glm4_5", "glm4_7")
MODELS = {name: Model(format_named(name), special) for name, special in zip(NAMES, (False, True, False), strict=True)}
NODE = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
PROPERTIES: dict[str, Any] = {
    "text": {"type": "string"},
    "kind": {"enum": ["a", "b c", 3, None]},
    "days": {"type": "integer", "minimum": 1, "maximum": 30},
    "rate": {"type": "number"},
    "exact": {"type": "boolean"},
    "names": {"type": "array", "items": {"type": "string"}},
    "node": {"$ref": "#/$defs/node"},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$"},
    "short": {"type": "string", "minLength": 2, "maxLength": 5},
    "day": {"type": "string", "format": "date"},
    "any": {},
    "flag": {"const": "on"},
}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["text"], "$defs": {"node": NODE}}
TEXTS = (
    "", "Ulm", 'Zürich "West" \\ \t', "  two\n lines \n", "</parameter", "</arg_value", "<parameter=text>\nx", "{}",
    "5", "门🚪", "</arg_value\n>", "\n", "True", "null",
)  # fmt: skip


def form_of(name: str, schema: Mapping[str, Any] = SCHEMA, choice: str = "required", **more: Any) -> AnswerForm:
    return form_with(format_named(name), schema, choice, **more)


def accepts(name: str, schema: Mapping[str, Any], *values: Any, choice: str = "required") -> list[bool]:
    """Which values argument `a` may have."""
    form = form_of(name, schema, choice)
    return [MODELS[name].accepts(form, form.format.written([("f", {"a": value})])) for value in values]


ARGUMENTS: list[dict[str, Any]] = [
    {"text": "Ulm"},
    {
        "text": "Ulm",
        "kind": "b c",
        "days": 7,
        "rate": -2.5e-3,
        "exact": True,
        "names": ['a"', "b"],
        "node": {"n": 1},
    },
    {"text": "a < b </x>", "kind": 3, "maybe": None, "code": "AB/12", "short": "a\nb"},
    {"text": "x", "kind": None, "maybe": "none", "day": "2026-02-28", "any": {"x": [1, "2"]}, "flag": "on"},
    *({"text": text, "any": "some"} for text in TEXTS),
]


@pytest.mark.parametrize("name", NAMES)
def test_what_is_written_is_read(name: str) -> None:
    """Arguments that follow the schema may be written, and are read as they were, in pieces of one JSON text."""
    form, model = form_of(name), MODELS[name]
    for arguments in ARGUMENTS:
        written = form.format.written([("f", arguments), ("f2", {})])
        assert model.accepts(form, written), arguments
        reader, parts = model.read(form, written)
        first, second = reader.calls
        assert (first.name, json.loads(first.arguments)) == ("f", arguments) and second.arguments == "{}"
        assert first.arguments == json.dumps(arguments, ensure_ascii=False)
        assert "".join(part.text for part in parts if part.kind == "arguments" and part.index == 0) == first.arguments
        assert Draft202012Validator(SCHEMA).is_valid(json.loads(first.arguments)) and reader.content == ""
    pieces = [part.text for part in model.read(form, form.format.written([("f", {"text": "four words of text"})]))[1]]
    assert len(pieces) > 10  # a string comes as it is written


@pytest.mark.parametrize("name", NAMES)
def test_a_call_that_is_cut_anywhere(name: str) -> None:
    """What was read of it begins the JSON text of the whole, and is not kept."""
    form, model = form_of(name), MODELS[name]
    arguments = {"text": 'a\n"b"', "kind": "a", "days": 12, "names": ["x"], "maybe": "so", "any": {"y": 1}}
    written, whole = form.format.written([("f", arguments)]), json.dumps(arguments, ensure_ascii=False)
    for end in range(len(written)):
        if model.specials and re.search(r"</?[a-z_]*$", written[:end]):  # within a token
            continue
        reader, _ = model.read(form, written[:end])
        for call in reader.calls:
            assert call.name == "f" and whole.startswith(call.arguments), written[:end]
        done = bool(reader.calls) and reader.calls[0].arguments == whole
        assert ("tool_calls" in reader.kept_message) == done and "<tool_call>".startswith(reader.content.strip("\n"))
    reader, _ = model.read(form_of(name, choice="auto"), f"I look.\n{written}")
    assert reader.content == "I look." and json.loads(reader.calls[0].arguments) == arguments


VALUES: list[tuple[Any, list[Any], list[Any]]] = [
    ({"type": "string", "maxLength": 3}, ["", "abc", "a\nb"], ["abcd"]),
    ({"type": "string", "minLength": 2}, ["ab", "ab" * 40], ["a", ""]),
    ({"type": "string", "pattern": "b"}, ["b", "abc", "\nb\n"], ["a", ""]),
    ({"type": "string", "pattern": "^a|c$"}, [], []),
    ({"type": "string", "pattern": "^(a|c)$", "maxLength": 1}, ["a", "c"], ["b", "ac"]),
    ({"type": "string", "enum": ["ab", "abc", "b"], "minLength": 2}, ["ab", "abc"], ["b", "abcd"]),
    ({"type": "string", "enum": ["ab", "abc", "b", ""], "pattern": "^a"}, ["ab", "abc"], ["b", "a", ""]),
    ({"type": "string", "enum": ["ab/1", "x"], "pattern": "/", "minLength": 2}, ["ab/1"], ["x", "/"]),
    ({"enum": ["", "x"]}, ["", "x"], ["y"]),
    ({"type": "string", "format": "ipv4"}, ["10.0.0.255"], ["10.0.0.256", "10"]),
    ({"type": "string", "format": "password"}, ["anything"], []),
    ({"type": ["string", "null"], "enum": ["a", None]}, ["a", None], ["b", "nul"]),
    ({"type": ["string", "integer"], "maxLength": 2}, ["ab", 12345], ["abc", 1.5]),
    ({"type": "integer", "minimum": 2, "maximum": 9}, [2, 9], [1, 10, "x", True]),
    ({"type": "boolean"}, [True, False], [None, "yes", 1]),
    ({"type": "array", "items": {"enum": [1, 2]}, "maxItems": 2}, [[], [1, 2]], [[3], [1, 1, 1], "x"]),
    ({"type": "object", "properties": {"b": {"type": "string"}}, "required": ["b"]}, [{"b": "x"}], [{}, {"c": 1}]),
    ({"anyOf": [{"type": "string", "maxLength": 1}, {"type": "array", "items": {"type": "null"}}]}, ["a", [None]],
     ["ab", [1]]),
    ({"allOf": [{"$ref": "#/$defs/n"}], "description": "as pydantic has it"}, [1, 2], [3, "x"]),
]  # fmt: skip


@pytest.mark.parametrize("schema", [row[0] for row in VALUES], ids=json.dumps)
@pytest.mark.parametrize("name", NAMES[:2])
def test_values_follow_their_schema(name: str, schema: Any) -> None:
    good, wrong = next(row[1:] for row in VALUES if row[0] is schema)
    whole = one(schema, **{"$defs": {"n": {"enum": [1, 2]}}})
    if schema.get("pattern") == "^a|c$":  # whose anchors are those of its alternatives
        with pytest.raises(ConstraintError, match="parameters of tool 'f' have pattern, which calls in the format"):
            accepts(name, whole, "a")
        assert accepts(name, whole, "a", "b", choice="auto") == [True, True]
        return
    assert accepts(name, whole, *good) == [True] * len(good)
    assert accepts(name, whole, *wrong) == [False] * len(wrong)
    form = form_of(name, whole)
    for value in good:
        reader, _ = MODELS[name].read(form, form.format.written([("f", {"a": value})]))
        assert json.loads(reader.calls[0].arguments) == {"a": value}


@pytest.mark.parametrize("name", NAMES)
def test_values_are_not_matched_with_backtracking(name: str) -> None:
    """Which would not end for these, and nothing else would run meanwhile."""
    assert accepts(name, one({"enum": ["a" * 60 + "!", "b"], "pattern": "^((a+)+|b)$"}), "b") == [True]


@pytest.mark.parametrize("name", NAMES)
def test_names_of_values(name: str) -> None:
    form, model = form_of(name), MODELS[name]
    for arguments in ({}, {"days": 1}, {"text": "a", "text2": "b"}, {"days": 1, "text": "a"}):
        assert not model.accepts(form, form.format.written([("f", arguments)]))
    assert not model.accepts(form, form.format.written([("f2", {"text": "a"})]))
    form = form_of(name, {"type": "object", "additionalProperties": {"type": "integer"}, "required": ["x"]})
    for arguments, fits in (({"x": 1, "y": 2}, True), ({"x": "a"}, False), ({"y": 1}, False)):
        assert model.accepts(form, form.format.written([("f", arguments)])) == fits
    tags, twice = form.format.tagged, form.format.written([("f", {"x": 1, "y": 2})])
    assert tags is not None
    for other, fits in (("x2", True), ("x", False)):  # the last is given already
        assert model.accepts(form, twice.replace(f"{tags.before}y", f"{tags.before}{other}")) == fits
    reader, _ = model.read(form, form.format.written([("f", {"x": 1, "y": 2})]))
    assert json.loads(reader.calls[0].arguments) == {"x": 1, "y": 2}


def test_texts_that_models_write_otherwise() -> None:
    """Python's names of values are read as JSON's, and what is no JSON as text."""
    form, model = form_of("qwen3-coder"), MODELS["qwen3-coder"]
    text = "<tool_call>\n<function=f>\n" + "".join(
        f"<parameter={name}>\n{value}\n</parameter>\n"
        for name, value in (("exact", "True"), ("maybe", "None"), ("days", "some"), ("text", "True"), ("x", "NaN"))
    )
    reader, _ = model.read(form, f"{text}</function>\n</tool_call>")
    said = {"exact": True, "maybe": None, "days": "some", "text": "True", "x": "NaN"}
    assert json.loads(reader.calls[0].arguments) == said


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (one({"type": "string", "not": {"const": "b"}}), "of tool 'f' have not, which calls in the format glm4_5"),
        (one({}, anyOf=[{"required": ["b"]}, {}]), "have anyOf, which calls in the format glm4_5 cannot follow"),
        (one({"type": "string", "format": "regex"}), "have format 'regex', which calls"),
        (one({"type": "string", "pattern": "(?=a)"}), r"of tool 'f' cannot be followed \(regex: look-around"),
        (one({"enum": ["a"], "pattern": "(" * 300 + ")" * 300}), r"of tool 'f' cannot be followed \(regex: exceed"),
        (one({"type": "array", "uniqueItems": True}), r"cannot be followed \(its keyword uniqueItems has no grammar"),
        (one({"type": "string", "maxLength": "1}"}), "have maxLength, which calls"),
        (one({"type": "string", "minLength": -1}), "have a length below 0, which calls"),
        (one({"enum": []}), "no value can be given for 'a', which is required"),
        (one(False), "no value can be given for 'a'"),
    ],
)
def test_schemas_that_cannot_be_followed(schema: Any, says: str) -> None:
    for more in ({"choice": "required"}, {"choice": "auto", "strict": True}):
        with pytest.raises(ConstraintError, match=says):
            MODELS["glm4_5"].accepts(form_of("glm4_5", schema, **more), "x")


def test_patterns_of_whole_texts() -> None:
    """Those of whole texts accept what `re` finds."""
    texts = ["".join(letters) for size in range(4) for letters in itertools.product("ab/|", repeat=size)]
    for pattern in ("a", "^a", "a$", "^a/b$", r"a\/b", "^(a|b)+$", r"a\$", r"^\|", "[|^]a", r"a\\$", "a|b"):
        whole = whole_pattern(pattern)
        assert whole is not None
        for text in texts:
            assert bool(re.fullmatch(whole, text)) == bool(re.search(pattern, text)), (pattern, text)
    assert whole_pattern("^a|b") is None
    assert re.fullmatch(FORMATS["date-time"], "2026-02-28T10:00:00.5+01:00")
    assert re.fullmatch(FORMATS["email"], "a.b+c@d-e.org") and not re.fullmatch(FORMATS["email"], "a@b@c")


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("'<tool_call>\\n' + (tool_call | tojson) + '</tool_call>' tool_calls arguments", "hermes"),
        ("'<tool_call>\\n' }}{{ '{\"name\": \"' tool_calls arguments", "hermes"),
        ("<tool_call>{name: arguments}</tool_call> tool_calls <invoke>", "exaone4"),
        ("<tool_call>{name: arguments}</tool_call> '<tool_call>\\n{name' tool_calls", "hermes"),
        (
            "'<tool_call>' }}\n    {{- {'name': call.name, 'arguments': call.arguments} | tojson }} tool_calls",
            "exaone4",
        ),
        ("<tool_call><invoke name='arguments'> tool_calls", "generic"),
        ("<tool_call>\\n<function=NAME>\\n<parameter=K> tool_calls arguments", "qwen3-coder"),
        ("<tool_call>N\\n<arg_key>k</arg_key>\\n<arg_value>v</arg_value> tool_calls arguments", "glm4_5"),
    ],
)
def test_forms_after_one_tag(template: str, name: str) -> None:
    """<tool_call> alone says nothing of what follows it."""
    assert recognised(template).name == name


def test_references() -> None:
    """They may go to definitions, to other arguments and to all of them, and what nobody refers to is not repeated."""
    words = {"type": "array", "items": {"type": "string"}, "maxItems": 2}
    others = {"b": "#", "c": "#/properties/a", "d": "#/$defs/n"}
    properties = {"a": words, **{key: {"type": "array", "items": {"$ref": name}} for key, name in others.items()}}
    schema = {"type": "object", "properties": properties, "$defs": {"n": NODE, "big": {"enum": ["x" * 20_000]}}}
    for name in NAMES:
        form, model = form_of(name, schema), MODELS[name]
        for arguments, fits in (
            ({"a": ["x"], "b": [{"a": ["y"]}, {"b": [{}]}], "c": [["z"]], "d": [{"n": 1}]}, True),
            ({"b": [{"a": 1}]}, False), ({"c": [["x", "y", "z"]]}, False), ({"d": [{"n": "x"}]}, False),
        ):  # fmt: skip
            assert model.accepts(form, form.format.written([("f", arguments)])) == fits, arguments


def test_alternatives_without_end() -> None:
    """A few hundred are looked at, however many there are."""
    deep = {f"n{n}": {"anyOf": [{"$ref": f"#/$defs/n{n + 1}"}] * 2} for n in range(40)}
    for last in ({"type": "null"}, {"$ref": "#/$defs/n0"}):
        schema = one({"$ref": "#/$defs/n0"}, **{"$defs": {**deep, "n40": last}})
        with pytest.raises(ConstraintError):
            accepts("glm4_7", schema, None)
    no_definitions: list[dict[str, Any]] = [{"$defs": []}, {"definitions": "x"}]
    for wrong in no_definitions:
        assert accepts("glm4_7", one({"type": "integer"}, **wrong), 1) == [True]


def test_closing_tags_within_json() -> None:
    """In a string of a list they are text; where a value might be any text the first one ends it."""
    model, schema = MODELS["glm4_7"], one({"type": "array", "items": {"type": "string"}})
    form, value = form_of("glm4_7", schema), ["</arg_value>", '"</arg_value>\\', "x"]
    written = form.format.written([("f", {"a": value})])
    assert model.accepts(form, written)
    assert json.loads(model.read(form, written)[0].calls[0].arguments) == {"a": value}
    mixed = form_of("glm4_7", one({"anyOf": [{"type": "string", "maxLength": 9}, schema["properties"]["a"]]}))
    assert not model.accepts(mixed, written)
    short = form.format.written([("f", {"a": '["a'})])
    assert model.accepts(mixed, short) and json.loads(model.read(mixed, short)[0].calls[0].arguments) == {"a": '["a'}


def test_the_end_of_a_value_is_looked_for_once() -> None:
    """Whatever pieces it comes in, no character is looked at much more than once."""
    form = split({"type": "array", "items": {"type": "string"}}, {})
    value = json.dumps(["a</v>", '"\\', "\\", "</v>"] * 50)
    for size in (1, 2, 3, 7, 1000):
        text, looked, place = "", Looked(), -1
        for start in range(0, len(value) + 4, size):
            text = (value + "</v>")[: start + size]
            place, looked = form.end_of(text, "</v>", looked)
            assert place >= 0 or looked.place >= len(text) - 4
        assert place == len(value)


@pytest.mark.parametrize("name", NAMES)
def test_whatever_may_be_written_follows_the_schema(name: str) -> None:
    """Answers drawn at random from what the grammar allows, read and compared with the schema."""
    model, draw, tags = MODELS[name], random.Random(3), format_named(name).tagged
    assert tags is not None
    close = model.tokenizer.encode(tags.close, add_special_tokens=False).ids
    plain = model.tokenizer.encode('ab1 -.,:{}[]"\\\n<>/', add_special_tokens=False).ids

    def pick(allowed: list[int]) -> list[int]:
        ending = [token for token in plain if token in allowed]
        chosen = draw.choice(ending or allowed)
        return close if len(ending) > 8 and draw.random() < 0.3 else [chosen]  # in a text: its end

    names: set[str] = set()
    for number in range(len(PROPERTIES)):
        required = [*PROPERTIES, *PROPERTIES][number % len(PROPERTIES) :][:3]
        schema = {**SCHEMA, "required": required}
        form = form_of(name, schema)
        for called, arguments in model.drawn_calls(form, pick):
            if called == "f":
                Draft202012Validator(schema).validate(arguments)
                names |= set(arguments)
    assert len(names) > 8
