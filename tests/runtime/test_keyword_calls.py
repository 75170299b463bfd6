"""Calls with arguments as Python's keywords: what may be written follows the schema, and is read as it was."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from eagle_runtime import ConstraintError
from eagle_runtime.text.answer_form import AnswerForm
from eagle_runtime.text.call_formats import format_named
from format_model import Model, form_with, names_drawn, one

ROW = format_named("lfm2")
MODELS = {special: Model(ROW, special) for special in (False, True)}
PROPERTIES: dict[str, Any] = {
    "any": {},
    "code": {"type": "string", "pattern": "^[A-Z]{2}/[0-9]+$"},
    "day": {"type": "string", "format": "date"},
    "exact": {"type": "boolean"},
    "kind": {"enum": ["a", "it's", 3, None, True, ["x", {"y": "z"}]]},
    "map": {"type": "object", "additionalProperties": {"type": "array", "items": {"type": "string"}}},
    "maybe": {"anyOf": [{"type": "string"}, {"type": "null"}]},
    "names": {"type": "array", "items": {"type": "string", "maxLength": 9}, "maxItems": 3},
    "node": {"$ref": "#/$defs/node"},
    "rate": {"type": "number"},
    "short": {"type": "string", "maxLength": 4},
    "text": {"type": "string"},
}
NODE = {"type": "object", "properties": {"n": {"type": "integer"}, "next": {"$ref": "#/$defs/node"}}, "required": ["n"]}
SCHEMA = {"type": "object", "properties": PROPERTIES, "required": ["text"], "$defs": {"node": NODE}}
ARGUMENTS: list[dict[str, Any]] = [
    {"text": "Ulm"},
    {
        "any": [{"a": [1, "2'", {}]}, None, -1.5e-07, []],
        "exact": True,
        "kind": "it's",
        "map": {"x": ["1", "{"], "y": []},
        "maybe": None,
        "names": ["a,b", "]}", '")'],
        "node": {"n": 1, "next": {"n": 2}},
        "rate": -0.0025,
        "text": "Zürich 'West' \"East\" \\ \n\r(a=1), \\n",
    },
    {"any": "5", "exact": False, "kind": ["x", {"y": "z"}], "maybe": "None", "text": "门🚪"},
    {"any": False, "kind": None, "maybe": "", "rate": 7, "text": ""},
]


def form_of(schema: Mapping[str, Any] = SCHEMA, choice: str = "required", **more: Any) -> AnswerForm:
    return form_with(ROW, schema, choice, **more)


def written(text: str) -> str:
    """An answer with one call, of which this is the text of the arguments."""
    return ROW.written([("f", {})]).replace("()", f"({text})")


@pytest.mark.parametrize("special", [False, True], ids=["text", "special tokens"])
@pytest.mark.parametrize("arguments", ARGUMENTS, ids=["one", "nested", "more", "empty"])
def test_what_is_written_is_read(arguments: dict[str, Any], special: bool) -> None:
    """Arguments that follow the schema may be written, and are read as they were; of a call that is cut anywhere what
    was read begins the JSON text of the whole, and is not kept."""
    assert Draft202012Validator(SCHEMA).is_valid(arguments)
    form, model = form_of(), MODELS[special]
    answer, whole = ROW.written([("f", arguments), ("f2", {})]), json.dumps(arguments, ensure_ascii=False)
    assert model.accepts(form, answer)
    reader, parts = model.read(form, answer)
    first, second = reader.calls
    assert (first.name, json.loads(first.arguments), second.name, second.arguments) == ("f", arguments, "f2", "{}")
    assert "".join(part.text for part in parts if part.kind == "arguments" and part.index == 0) == first.arguments
    answer = ROW.written([("f", arguments)])
    for end in range(answer.index("(") + 1, len(answer) - len(ROW.call[2] + ROW.end)):
        reader, _ = model.read(form, answer[:end])
        (call,) = reader.calls
        assert call.name == "f" and "tool_calls" not in reader.kept_message
        assert whole.startswith(call.arguments), answer[:end]
    reader, _ = model.read(form_of(choice="auto"), f"I look.\n{answer}")
    assert reader.content == "I look." and json.loads(reader.calls[0].arguments) == arguments
    text = ROW.written([("f", {"text": "four words of text"})])
    assert len(model.read(form, text)[1]) > 10  # a string comes as it is written


VALUES: list[tuple[Any, list[str], list[str]]] = [
    ({"type": "string"}, ["'it\\'s'", "'\\n \"x\" \\\\'", "''"], ["'it's'", "'a\nb'", "5", "'\\d'", "x"]),
    ({"type": "string", "maxLength": 3}, ['"abc"', '""'], ['"abcd"', "'ab'"]),
    ({"type": "string", "pattern": "^(a|c)$"}, ['"a"'], ['"b"', "'a'"]),
    ({"type": "string", "format": "ipv4"}, ['"10.0.0.255"'], ['"10.0.0.256"']),
    ({"enum": ["", "it's", 1, True, [], None]}, ["''", "'it\\'s'", "1", "True", "[]", "None"], ["'y'", "2", "False"]),
    ({"enum": [1, 0]}, ["1", "0"], ["True", "False", "None"]),
    ({"type": ["string", "integer"]}, ["'5'", "5"], ["1.5", "None"]),
    ({"type": "integer", "minimum": 2, "maximum": 9}, ["2", "9"], ["1", "10", "True"]),
    ({"type": "boolean"}, ["True", "False"], ["None", "true", "1", "'True'"]),
    ({"const": False}, ["False"], ["True"]),
    ({"type": ["null", "number"]}, ["None", "-1.5"], ["null", "False"]),
    ({"type": "array", "items": {"$ref": "#/$defs/n"}}, ["[1, 2]", "[]"], ["[3]", "None"]),
    ({"type": "object"}, ["{}", '{"b": [true, null]}'], ["[]", "{b: 1}", "{'b': 1}"]),
    ({}, ["'x'", "None", "True", "1", '[{"b": "c"}]'], ["x"]),
]


@pytest.mark.parametrize("row", VALUES, ids=lambda row: json.dumps(row[0]))
def test_values_follow_their_schema(row: tuple[Any, list[str], list[str]]) -> None:
    schema, good, wrong = row
    form = form_of(one(schema, **{"$defs": {"n": {"enum": [1, 2]}}}))
    assert [MODELS[True].accepts(form, written(f"a={text}")) for text in good] == [True] * len(good)
    assert [MODELS[True].accepts(form, written(f"a={text}")) for text in wrong] == [False] * len(wrong)


def test_which_arguments_may_stand() -> None:
    number = {"type": "integer"}
    schema = {"properties": {"a": number, "b": number, "c": number}, "required": ["b"], "additionalProperties": number}
    good = ["b=1", "a=1, b=1", "b=1, c=1", "a=1, b=1, c=1, d=1, e_2=1", "b=1, d=1"]
    wrong = ["", "a=1", "b=1,c=1", "b=1, a=1", "b=1, b=1", "b=1, 2d=1", "b=1, ", "b = 1"]
    form = form_of({"type": "object", **schema})
    assert [MODELS[True].accepts(form, written(text)) for text in good] == [True] * len(good)
    assert [MODELS[True].accepts(form, written(text)) for text in wrong] == [False] * len(wrong)


def test_spaces_and_quotes_that_models_write_otherwise() -> None:
    reader, _ = MODELS[True].read(form_of({}), written('a = "x\\ty" ,\n b=[1, "]"],c= \'\\d\\t\', d =nan'))
    assert json.loads(reader.calls[0].arguments) == {"a ": "x\ty", "b": [1, "]"], "c": "\\d\t", "d ": "nan"}


@pytest.mark.parametrize(
    ("schema", "says"),
    [
        (one({"type": "string", "not": {"const": "b"}}), "of tool 'f' have not, which calls in the format lfm2"),
        (one({}, anyOf=[{"required": ["b"]}, {}]), "have anyOf, which calls"),
        ({"type": "object", "properties": {"b-c": {}}}, "have the property 'b-c', which calls"),
        (one(False), "no value can be given for 'a', which is required"),
        (one({"enum": []}), "no value can be given for 'a'"),
    ],
)
def test_schemas_that_cannot_be_followed(schema: Any, says: str) -> None:
    for more in ({"choice": "required"}, {"choice": "auto", "strict": True}):
        with pytest.raises(ConstraintError, match=says):
            MODELS[True].accepts(form_of(schema, **more), "x")


@pytest.mark.parametrize("special", [False, True], ids=["text", "special tokens"])
def test_whatever_may_be_written_follows_the_schema(special: bool) -> None:
    """Answers drawn at random from what the grammar allows, read and compared with the schema."""
    names = names_drawn(MODELS[special], ROW, SCHEMA, ("'", '"', "]", "}", ")"), "ab1 -.,:{}[]\"'\\(=/")
    assert len(names) > 8
