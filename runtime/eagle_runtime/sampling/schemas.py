"""JSON schemas as grammars take them: without what says nothing, and objects of arguments closed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_runtime.base.arguments import MOST_DEPTH, short_repr
from eagle_runtime.base.errors import ConstraintError
from eagle_runtime.text.tools import Tool

# Of llguidance. JSON outputs stand in one line with single spaces, as in templates: models that may add white space go
# on with it for long. A schema may say otherwise in llguidance's own keyword "x-guidance".
SPACING: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
LENIENT = {"lenient": True}
STRICT: Any = {"lenient": False, "coerce_one_of": False}  # nothing in a schema is passed over
NO_EFFECT = ("title", "description", "default", "examples", "$comment", "deprecated", "readOnly", "writeOnly")
COMBINING = ("anyOf", "allOf", "oneOf", "not", "if", "$ref", "patternProperties", "unevaluatedProperties")
# Where other schemas stand in a schema: as a value, in a list or in an object by names.
ONE = (
    "items", "additionalItems", "unevaluatedItems", "contains", "additionalProperties", "unevaluatedProperties",
    "propertyNames", "not", "if", "then", "else", "contentSchema",
)  # fmt: skip
LISTS = ("anyOf", "allOf", "oneOf", "prefixItems", "items")
NAMED = ("properties", "patternProperties", "dependentSchemas", "dependencies", "$defs", "definitions")
# Keywords that llguidance refuses and that say something of one type alone.
OF_ARRAYS = ("uniqueItems", "contains", "minContains", "maxContains", "unevaluatedItems")
OF_OBJECTS = (
    "dependentRequired", "dependentSchemas", "dependencies", "propertyNames", "unevaluatedProperties",
    "minProperties", "maxProperties",
)  # fmt: skip
# Formats that the standard defines. Any other one is a note to readers, as "password" and "int32" are.
FORMATS = frozenset(
    ("date-time", "date", "time", "duration", "email", "idn-email", "hostname", "idn-hostname", "ipv4", "ipv6", "uri",
     "uri-reference", "iri", "iri-reference", "uuid", "uri-template", "json-pointer", "relative-json-pointer", "regex")
)  # fmt: skip
LEAST = -(2**63)
LARGEST = 2**63 - 1024  # of the integers of 64 bits that a double holds; no minimum below -LARGEST has a grammar
DIALECT = "json-schema.org/draft"  # in the name of every dialect that llguidance knows


def effective(schema: Any, depth: int = 0) -> Any:
    """Returns a schema that accepts the same values, without keywords that say nothing where they stand: llguidance
    refuses some of them. Null says nothing but as a `const`: Go writes it for an empty list. A minimum of 64 bits
    becomes the least that has a grammar. Raises ConstraintError for integers that are none of a double's, as which
    llguidance reads them."""
    if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
        return schema
    made = {name: value for name, value in schema.items() if value is not None or name == "const"}
    for name in ("minimum", "exclusiveMinimum"):
        if isinstance(least := made.get(name), int) and least < -LARGEST:
            made[name] = -LARGEST
    for name in ("const", "enum", "minimum", "exclusiveMinimum", "maximum", "exclusiveMaximum"):
        _check_integers(name, made.get(name))
    for name in ONE:
        if name in made:
            made[name] = effective(made[name], depth + 1)
    for name in LISTS:
        if isinstance(parts := made.get(name), list):
            made[name] = [effective(part, depth + 1) for part in parts]
    for name in NAMED:
        if isinstance(parts := made.get(name), Mapping):
            made[name] = {key: effective(part, depth + 1) for key, part in parts.items()}
    for name in _idle(made):
        made.pop(name, None)
    if depth == 0 and _ends_the_process(made):
        raise ConstraintError(f"the schema has a constant {LEAST}, which no grammar holds")
    return made


def _check_integers(name: str, value: Any) -> None:
    """Raises ConstraintError for an integer in a keyword's value that is another one as a double, or none of 64 bits; a
    maximum may be above them."""
    if isinstance(value, Mapping | list | tuple):
        for part in value.values() if isinstance(value, Mapping) else value:
            _check_integers(name, part)
    elif isinstance(value, int) and not (abs(value) <= LARGEST and float(value) == value):
        if value > LARGEST and name in ("maximum", "exclusiveMaximum"):
            return
        raise ConstraintError(
            f"the schema has {name} {short_repr(value)}, but grammars hold integers up to 2**53 ({2**53}) alone"
        )


def _ends_the_process(value: Any, constant: bool = False) -> bool:
    """Whether LEAST, for which llguidance overflows its stack, is a constant at any place: references may name each."""
    if isinstance(value, Mapping):
        return any(_ends_the_process(part, constant or name in ("const", "enum")) for name, part in value.items())
    if isinstance(value, list | tuple):
        return any(_ends_the_process(part, constant) for part in value)
    return constant and isinstance(value, int) and value == LEAST


def _idle(schema: Mapping[str, Any]) -> list[str]:
    """The keywords of a schema that say nothing in it; what it holds was looked through before."""
    names = [name for name in ("then", "else") if "if" not in schema or _takes_all(schema.get(name, False))]
    if all(name not in schema or name in names for name in ("then", "else")):
        names.append("if")
    if "contains" not in schema:
        names += ["minContains", "maxContains"]
    for name in ("unevaluatedItems", "unevaluatedProperties"):
        if _takes_all(schema.get(name, False)):
            names.append(name)
    for name in ("dependentRequired", "dependentSchemas", "dependencies"):
        if isinstance(parts := schema.get(name), Mapping) and all(p == [] or _takes_all(p) for p in parts.values()):
            names.append(name)
    if schema.get("propertyNames", False) in (True, {}, {"type": "string"}):
        names.append("propertyNames")
    for name in ("uniqueItems", "not", "$recursiveAnchor"):
        if schema.get(name) is False:
            names.append(name)
    if isinstance(form := schema.get("format"), str) and form not in FORMATS:
        names.append("format")
    if isinstance(dialect := schema.get("$schema"), str) and DIALECT not in dialect:
        names.append("$schema")
    if isinstance(types := schema.get("type"), str | list):
        names += [*(OF_ARRAYS if "array" not in types else ()), *(OF_OBJECTS if "object" not in types else ())]
    return names + _idle_counts(schema)


def _idle_counts(schema: Mapping[str, Any]) -> list[str]:
    """Counts of properties that any object has which follows the other keywords."""
    required, properties = schema.get("required"), schema.get("properties")
    least = len({name for name in required if isinstance(name, str)}) if isinstance(required, list) else 0
    names = []
    if _at_most(schema.get("minProperties"), least):
        names.append("minProperties")
    closed = schema.get("additionalProperties") is False and not schema.get("patternProperties")
    most = schema.get("maxProperties")
    if closed and isinstance(properties, Mapping) and isinstance(most, int) and not _at_most(most, len(properties) - 1):
        names.append("maxProperties")
    return names


def _takes_all(schema: Any) -> bool:
    return schema is True or schema == {}


def _at_most(value: Any, most: int) -> bool:
    return isinstance(value, int) and value <= most


def argument_schema(tool: Tool, *, must_follow: bool) -> dict[str, Any]:
    """Returns the JSON schema of a tool's arguments as a grammar takes it: an object, without properties that it does
    not name. must_follow: keywords that no grammar can express are errors; else they are passed over."""
    own = tool.parameters
    try:
        known = effective({**own, "type": "object", "properties": own.get("properties") or {}})
    except ConstraintError as error:
        raise ConstraintError(
            f"the parameters of tool {tool.name!r} cannot be followed ({error}); correct them"
        ) from None
    schema = _closed(known)
    own = schema.pop("x-guidance", None)
    options = own if isinstance(own, Mapping) else {}
    return {**schema, "x-guidance": {**SPACING, **(STRICT if must_follow else LENIENT), **options}}


def _closed(schema: Any, depth: int = 0) -> Any:
    """A schema without what has no effect; objects that say nothing of other properties have none."""
    if not isinstance(schema, Mapping) or depth > MOST_DEPTH:
        return schema
    result = {name: value for name, value in schema.items() if name not in NO_EFFECT}
    if isinstance(properties := result.get("properties"), Mapping):
        result["properties"] = {name: _closed(value, depth + 1) for name, value in properties.items()}
        if not any(name in result for name in COMBINING):
            result.setdefault("additionalProperties", False)
    if "items" in result:
        result["items"] = _closed(result["items"], depth + 1)
    for name in ("$defs", "definitions", *(() if result.get("properties") else ("anyOf",))):
        if isinstance(parts := result.get(name), Mapping):
            result[name] = {key: _closed(value, depth + 1) for key, value in parts.items()}
        elif isinstance(parts, list):
            result[name] = [_closed(value, depth + 1) for value in parts]
    return result
