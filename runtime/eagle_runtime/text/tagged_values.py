"""Calls whose arguments are values between tags, each after its name, and not one JSON object.

    <tool_call>
    <function=weather>
    <parameter=place>
    Ulm
    </parameter>
    </function>
    </tool_call>

A value that is a string stands as it is, any other one as JSON; so what a text means follows from the tool's schema.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_runtime.base.arguments import json_value
from eagle_runtime.text.keyword_values import WORDS

OTHER_TYPES = ("null", "boolean", "integer", "number", "array", "object")  # than string
IN_STRING = re.compile(r'[^"\\]*(?:\\.[^"\\]*)*', re.DOTALL)  # of JSON, up to its end
NESTED = re.compile(r"\s*[\[{]")
MOST_STEPS = 32  # of references after each other that are followed
MOST_PARTS = 256  # of a value's alternatives that are looked at; chosen


@dataclass(frozen=True, slots=True)
class TaggedValues:
    """before: what stands before a value's name. middle: between name and value. close: after the value, which cannot
    hold it. gap: after that."""

    before: str
    middle: str
    close: str
    gap: str = ""

    def written(self, arguments: Mapping[str, Any]) -> str:
        """Returns the text of arguments."""
        return "".join(
            f"{self.before}{name}{self.middle}"
            f"{value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)}{self.close}{self.gap}"
            for name, value in arguments.items()
        )


@dataclass(frozen=True, slots=True)
class Looked:
    """The part of a value that lacks its closing tag. place: where it ends; quoted: whether that is in a string."""

    place: int = 0
    quoted: bool = False


@dataclass(frozen=True, slots=True)
class Split:
    """A schema as alternatives: what strings, and what other values, it accepts. Each schema of `others` says types,
    an enum, or both."""

    strings: tuple[Mapping[str, Any], ...] = ()
    others: tuple[Mapping[str, Any], ...] = ()

    def end_of(self, text: str, close: str, looked: Looked) -> tuple[int, Looked]:
        """Returns where a value's closing tag stands in the text from the value on, -1 where it has not come, and what
        was looked at. Within the strings of a list or an object it is text, unless the value could be any text too.
        looked: what the last call returned; at first Looked()."""
        if not (self.others and all("enum" in schema for schema in self.strings) and NESTED.match(text)):
            return text.find(close, looked.place), Looked(max(looked.place, len(text) - len(close) + 1))
        place, quoted = looked.place, looked.quoted
        while True:
            if quoted:
                rest = IN_STRING.match(text, place)
                assert rest is not None
                if not text.startswith('"', rest.end()):
                    return -1, Looked(rest.end(), quoted=True)
                place, quoted = rest.end() + 1, False
            quote = text.find('"', place)
            found = text.find(close, place, quote if quote >= 0 else len(text))
            if found >= 0 or quote < 0:
                return found, Looked(max(place, len(text) - len(close) + 1))
            place, quoted = quote + 1, True

    def text_of(self, value: str) -> str:
        """Returns the JSON text of the value that was written as `value`."""
        if not self.others:
            return json.dumps(value, ensure_ascii=False)
        text = value.strip()
        text = WORDS.get(text, text)  # as in Python, which some write
        try:
            read = json_value(text)
        except (ValueError, RecursionError):
            return json.dumps(value, ensure_ascii=False)
        if self.strings and not any(_fits(read, schema) for schema in self.others):
            return json.dumps(value, ensure_ascii=False)
        return text

    def begun_text_of(self, value: str) -> str:
        """Returns the beginning of the JSON text of a value of which `value` was written."""
        opened = {"[": "array", "{": "object"}.get(value.lstrip()[:1], "string")
        if not self.strings or any(opened in schema["type"] for schema in self.others):
            return value.strip()
        return self.text_of(value).removesuffix('"')


def schema_at(parameters: Mapping[str, Any], name: str) -> Any:
    """Returns the schema of an argument. parameters: the schema of all of them."""
    parameters = resolved(parameters, parameters)
    properties = parameters.get("properties")
    if isinstance(properties, Mapping) and name in properties:
        return properties[name]
    return parameters.get("additionalProperties", True)


def resolved(schema: Mapping[str, Any], root: Mapping[str, Any]) -> Mapping[str, Any]:
    """Returns a schema with what it refers to in place of the reference, where that stands in the same document."""
    for _ in range(MOST_STEPS):
        reference = schema.get("$ref")
        found = _found(reference, root) if isinstance(reference, str) else None
        if not isinstance(found, Mapping):
            return schema
        rest = {key: value for key, value in schema.items() if key != "$ref"}
        if any(key in rest and rest[key] != value for key, value in found.items()):
            return schema
        schema = {**found, **rest}
    return schema


def split(schema: Any, root: Mapping[str, Any]) -> Split:
    """Returns what strings and what other values a schema accepts. root: the schema in which it stands."""
    return _split(schema, root, iter(range(MOST_PARTS)))


def _split(schema: Any, root: Mapping[str, Any], parts_left: Iterator[int]) -> Split:
    if not isinstance(schema, Mapping):
        return Split() if schema is False else _split({}, root, parts_left)
    schema = resolved(schema, root)
    more = next(parts_left, None) is not None
    for name in ("anyOf", "oneOf", "allOf"):
        parts = schema.get(name)
        if not more or not isinstance(parts, list) or not parts or (name == "allOf" and len(parts) > 1):
            continue
        rest = {key: value for key, value in schema.items() if key != name}
        joined = [_joined(rest, part, root) for part in parts]
        if None not in joined:
            made = [_split(part, root, parts_left) for part in joined]
            return Split(tuple(s for one in made for s in one.strings), tuple(s for one in made for s in one.others))
    if "const" in schema:
        schema = {**{key: value for key, value in schema.items() if key != "const"}, "enum": [schema["const"]]}
    types = schema.get("type")
    types = list(types) if isinstance(types, list | tuple) else [types] if types is not None else None
    values = schema.get("enum")
    strings: tuple[Mapping[str, Any], ...] = ()
    others: tuple[Mapping[str, Any], ...] = ()
    if types is None or "string" in types:
        own = {key: value for key, value in schema.items() if key != "enum"} | {"type": "string"}
        if not isinstance(values, list):
            strings = (own,)
        elif texts := [value for value in values if isinstance(value, str)]:
            strings = ({**own, "enum": texts},)
    left = [kind for kind in (OTHER_TYPES if types is None else types) if kind != "string"]
    if left:
        kept = {**schema, "type": left[0] if len(left) == 1 else left}
        if not isinstance(values, list):
            others = (kept,)
        elif rest_values := [value for value in values if not isinstance(value, str)]:
            others = ({**kept, "enum": rest_values},)
    return Split(strings, others)


def _joined(rest: Mapping[str, Any], part: Any, root: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """One schema for two that both hold; None where they say different things about one keyword."""
    if not isinstance(part, Mapping):
        return rest if part is True else None
    part = resolved(part, root)
    return None if any(key in rest and rest[key] != value for key, value in part.items()) else {**rest, **part}


def _found(reference: str, root: Mapping[str, Any]) -> Any:
    """What a reference names in the document; None where it names nothing there."""
    if reference != "#" and not reference.startswith("#/"):
        return None
    place: Any = root
    for step in reference[2:].split("/") if reference != "#" else ():
        name = step.replace("~1", "/").replace("~0", "~")
        if not isinstance(place, Mapping) or name not in place:
            return None
        place = place[name]
    return place


def _fits(value: Any, schema: Mapping[str, Any]) -> bool:
    """Whether a value has one of a schema's types, and is one of its values."""
    values = schema.get("enum")
    if isinstance(values, Sequence) and not any(value == one and type(value) is type(one) for one in values):
        return False
    types = schema.get("type", OTHER_TYPES)
    return any(_is(value, kind) for kind in ((types,) if isinstance(types, str) else types))


def _is(value: Any, kind: str) -> bool:
    if kind == "null":
        return value is None
    if kind in ("integer", "number") and not isinstance(value, bool):
        return isinstance(value, int | float) and (kind == "number" or float(value).is_integer())
    python = {"boolean": bool, "array": list, "object": dict}.get(kind)
    return python is not None and isinstance(value, python)
