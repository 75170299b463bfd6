"""Keywords of a schema that say nothing are left out, at every depth, and none that says something is."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from eagle_runtime import Constraint, ConstraintError
from eagle_runtime.sampling.schemas import argument_schema, effective
from eagle_runtime.text.call_formats import format_named
from eagle_runtime.text.tools import ToolUse
from format_model import Model

MODEL = Model(format_named("hermes"), False)
# Each says nothing where it stands alone, and llguidance refuses most of them.
IDLE: list[dict[str, Any]] = [
    {"uniqueItems": False}, {"dependentRequired": {}}, {"dependentRequired": {"a": []}}, {"dependentSchemas": {}},
    {"dependentSchemas": {"not": True}}, {"dependencies": {"if": {}}}, {"minContains": 0}, {"maxContains": 2},
    {"propertyNames": {"type": "string"}}, {"propertyNames": {}}, {"propertyNames": True}, {"if": {"type": "null"}},
    {"then": {"not": {}}}, {"else": False}, {"if": {}, "then": {}, "else": {}}, {"if": False, "then": True},
    {"not": False}, {"unevaluatedItems": True}, {"unevaluatedProperties": {}}, {"$recursiveAnchor": False},
    {"format": "password"}, {"format": "binary"}, {"format": "byte"}, {"format": "int32"}, {"format": "phone"},
    {"$schema": "https://example.com/schema"}, {"$schema": "http://json-schema.org/draft-07/schema#"},
    {"$schema": "https://json-schema.org/draft/2020-12/schema"}, {"contentMediaType": "text/html"},
    {"contentEncoding": "base64"}, {"minProperties": 0}, {"minItems": 0}, {"minLength": 0}, {"$comment": "none"},
    {"title": "T", "default": {"uniqueItems": 1}, "examples": [{"not": 1}]}, {"additionalItems": {"not": False}},
    {"readOnly": True}, {"deprecated": False}, {"allOf": []}, {"required": []},
]  # fmt: skip
# Keywords that restrict, of which some say nothing of another type or beside another keyword.
RESTRICTING: list[dict[str, Any]] = [
    {"uniqueItems": True}, {"dependentRequired": {"a": ["b"]}}, {"dependentSchemas": {"a": {"required": ["b"]}}},
    {"dependentSchemas": {"a": False}}, {"contains": {"type": "integer"}}, {"contains": {}, "minContains": 2},
    {"contains": {"type": "null"}, "minContains": 0, "maxContains": 1}, {"propertyNames": {"maxLength": 1}},
    {"propertyNames": {"type": "integer"}}, {"propertyNames": False},
    {"if": {"type": "integer"}, "then": {"minimum": 2}}, {"if": {"required": ["a"]}, "else": {"required": ["b"]}},
    {"not": {"type": "string"}}, {"not": {}}, {"not": True}, {"unevaluatedProperties": False},
    {"unevaluatedItems": {"type": "integer"}}, {"minProperties": 1}, {"maxProperties": 1}, {"minProperties": True},
    {"maxProperties": 2, "properties": {"a": {}, "not": {}}, "additionalProperties": False},
    {"minProperties": 1, "required": ["a"]}, {"minProperties": 2, "required": ["a", "a"]},
    {"type": ["array", "string"]}, {"type": "object"}, {"enum": [1, "a", []]}, {"const": {"not": False}},
    {"items": {"not": {"type": "null"}}}, {"properties": {"if": False}},
    {"prefixItems": [{"uniqueItems": True}], "items": False},
]  # fmt: skip
VALUES: list[Any] = [
    None, True, 1, 2, 1.5, "", "a", "b", [], [1], [1, 1], [None, None], ["a", 2], [[1, 1]], {}, {"a": 1}, {"b": None},
    {"a": 1, "b": 2}, {"not": "x"}, {"if": 1}, {"uniqueItems": [1, 1]}, {"a": {"a": 1}}, {"a": [1, 1], "not": 1},
    {"not": False}, {"a": 1, "b": 2, "uniqueItems": None},
]  # fmt: skip
BRANCHES = ("if", "then", "else")
NAMES = ("a", "b", "not", "uniqueItems", "if")


def schema_of(draw: random.Random, depth: int = 0) -> dict[str, Any]:
    """A schema that llguidance takes."""
    kind = draw.choice(["integer", "string", "null", "boolean", *(["array", "object", "anyOf"] if depth < 3 else [])])
    if kind == "anyOf":
        return {"anyOf": [schema_of(draw, depth + 1) for _ in range(2)]}
    if kind == "array":
        return {"type": kind, "items": schema_of(draw, depth + 1), "maxItems": draw.randrange(1, 4)}
    if kind == "object":
        names = draw.sample(NAMES, draw.randrange(4))
        required = [name for name in names if draw.random() < 0.5]
        properties = {name: schema_of(draw, depth + 1) for name in names}
        return {"type": kind, "properties": properties, "required": required, "additionalProperties": False}
    return {"type": kind}


def noisy(schema: Any, draw: random.Random) -> Any:
    """The schema with keywords that say nothing in it, at every depth."""
    made = dict(schema)
    if "items" in made:
        made["items"] = noisy(made["items"], draw)
    if "anyOf" in made:
        made["anyOf"] = [noisy(part, draw) for part in made["anyOf"]]
    if "properties" in made:
        made["properties"] = {name: noisy(part, draw) for name, part in made["properties"].items()}
    for more in draw.sample(IDLE, 3):
        if not _with_branches(more) & _with_branches(made):
            made |= more
    return made


def _with_branches(keywords: Mapping[str, Any]) -> set[str]:
    """The keywords, with those that belong together."""
    return {name for key in keywords for name in (BRANCHES if key in BRANCHES else (key,))}


def follows(schema: Any, value: Any) -> bool:
    return bool(Draft202012Validator(schema).is_valid(value))


def accepted(constraint: Constraint, value: Any) -> bool:
    matcher = MODEL.grammars.matcher(constraint)
    text = json.dumps(value)
    for token in [*MODEL.tokenizer.encode(text, add_special_tokens=False).ids, MODEL.eos]:
        if matcher.finished or not matcher.mask()[token]:
            return matcher.finished and token == MODEL.eos
        matcher.consume(token)
    return True


@pytest.mark.parametrize("keywords", IDLE, ids=json.dumps)
def test_keywords_that_say_nothing(keywords: dict[str, Any]) -> None:
    for base in ({}, {"type": "object"}, {"type": "array"}, {"type": "string"}):
        schema = {**base, **keywords}
        for value in VALUES:
            assert follows(schema, value) == follows(base, value) == follows(effective(schema), value)
        assert accepted(Constraint.json_schema(schema), "a") == follows(base, "a")


def test_grammars_accept_the_same() -> None:
    draw = random.Random(1)
    both = 0
    for _ in range(150):
        schema = schema_of(draw)
        more = noisy(schema, draw)
        assert effective(effective(more)) == effective(more)
        plain, loud = Constraint.json_schema(schema), Constraint.json_schema(more)
        for value in draw.sample(VALUES, 6):
            assert accepted(plain, value) == accepted(loud, value), (more, value)
            both += accepted(plain, value)
    assert both > 30


def test_what_restricts_is_kept() -> None:
    """Values that schemas of any keywords accept, by jsonschema, are the same."""
    draw = random.Random(2)
    changed = 0

    def any_schema(depth: int = 0) -> dict[str, Any]:
        made: dict[str, Any] = {}
        for more in draw.sample([*IDLE, *RESTRICTING, *RESTRICTING], draw.randrange(1, 5)):
            made |= more
        if depth < 2 and draw.random() < 0.5:
            name = draw.choice(["items", "not", "contains", "if", "then", "additionalProperties", "propertyNames"])
            made[name] = any_schema(depth + 1)
        if depth < 2 and draw.random() < 0.3:
            made[draw.choice(["properties", "dependentSchemas"])] = {
                name: any_schema(depth + 1) for name in draw.sample(NAMES, 2)
            }
        return made

    for _ in range(1500):
        schema = any_schema()
        made = effective(schema)
        changed += made != schema
        for value in draw.sample(VALUES, 6):
            assert follows(schema, value) == follows(made, value), (schema, made, value)
    assert changed > 500


@pytest.mark.parametrize(
    "schema",
    [
        {"type": "array", "uniqueItems": True}, {"dependentRequired": {"a": ["b"]}},
        {"propertyNames": {"maxLength": 1}}, {"contains": {"type": "null"}}, {"if": {}, "then": {"type": "null"}},
        {"type": "string", "format": "regex"}, {"properties": {"a": {"not": {}}}, "required": ["a"]},
        {"not": {"not": False}},
    ],
    ids=json.dumps,
)  # fmt: skip
def test_what_says_something_is_refused(schema: Mapping[str, Any]) -> None:
    with pytest.raises(ConstraintError):
        accepted(Constraint.json_schema(schema), [1])


@pytest.mark.parametrize("value", [2**53 + 1, -(2**53) - 1, 2**63, -(2**63), 2**64, 10**30])
def test_integers_that_are_rounded_are_refused(value: int) -> None:
    """llguidance reads numbers as doubles, and limits integers to 64 bits."""
    for schema in (
        {"const": value}, {"enum": ["a", {"b": [value]}]}, {"type": "array", "items": {"const": [value]}},
        {"type": "integer", "maximum" if value < 0 else "minimum": value},
    ):  # fmt: skip
        with pytest.raises(ConstraintError, match=f"{value}, but grammars hold integers up to"):
            Constraint.json_schema(schema)


def test_bounds_of_64_bits() -> None:
    """As schemas made of types in Go, Java and Rust have them; those of numbers in JavaScript are exact."""
    for least, most in ((-(2**63), 2**63 - 1), (0, 2**64 - 1), (-(2**53) + 1, 2**53 - 1)):
        constraint = Constraint.json_schema({"type": "integer", "minimum": least, "maximum": most})
        for value in (least - 1, -1, 0, 10**15, 2**53 - 1, most + 1):
            assert accepted(constraint, value) == (least <= value <= most), (least, most, value)


def test_null_is_a_keyword_that_is_not_there() -> None:
    """As Go writes lists that are empty."""
    names = ("required", "enum", "anyOf", "items", "type", "$ref", "maximum", "additionalProperties", "properties")
    assert effective(dict.fromkeys(names)) == {} == effective({"items": {"required": None}})["items"]
    assert effective({"const": None}) == {"const": None}


@pytest.mark.parametrize(
    "parameters",
    [
        {"type": "object", "properties": None, "required": None},
        {"type": "object", "properties": []},
        {"type": "string"},
    ],
    ids=json.dumps,
)
def test_arguments_are_an_object(parameters: dict[str, Any]) -> None:
    """Whatever the schema says: PHP writes an empty object as a list."""
    use = ToolUse.of([{"name": "f", "parameters": parameters}], "required")
    assert use is not None
    made = Constraint.json_schema(argument_schema(use.tools[0], must_follow=False))
    assert accepted(made, {}) and not accepted(made, "{}") and not accepted(made, {"a": 1})


def test_names_that_are_keywords() -> None:
    """Properties may be named as keywords are, and values may hold them."""
    schema = {
        "type": "object",
        "properties": {"not": {"type": "boolean"}, "uniqueItems": {"const": {"uniqueItems": False}}, "format": True},
        "required": ["not", "uniqueItems"],
        "additionalProperties": False,
    }
    assert effective(schema) == schema
    constraint = Constraint.json_schema(schema)
    assert accepted(constraint, {"not": False, "uniqueItems": {"uniqueItems": False}})
    assert not accepted(constraint, {"not": False}) and not accepted(constraint, {"uniqueItems": False})
    tool = {
        "name": "f",
        "parameters": {**schema, "$defs": {"not": {"not": False, "type": "array", "uniqueItems": False}}},
    }
    use = ToolUse.of([tool], "required")
    assert use is not None
    made = argument_schema(use.tools[0], must_follow=True)
    assert made["properties"] == schema["properties"] and made["$defs"] == {"not": {"type": "array"}}
