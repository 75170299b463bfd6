"""The form of an answer as a request asks for it: OpenAI's field, and this server's own."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from eagle_runtime import Constraint
from eagle_serve.checks import a_list, an_object, one_of, text
from eagle_serve.errors import ApiError, wrong_type, wrong_value
from eagle_serve.options import Options


@dataclass(frozen=True, slots=True)
class Grammar:
    """What an answer must follow. kind: "json_object", or one of Constraint.MADE_FROM with its
    value; param: the field that says so."""

    kind: str
    value: Any = None
    param: str = field(default="response_format", compare=False)


def grammar_of(given: Mapping[str, Any], options: Options) -> Grammar | None:
    """Returns what the fields of a request ask for; None where they ask for nothing. Raises ApiError."""
    constraint = an_object(given.get("eagle", {}), "eagle").get("constraint")
    if constraint is not None and "response_format" in given:
        raise wrong_value("eagle.constraint", "and response_format are both given; send one of them")
    return _response_format(given, options) if constraint is None else _constraint(constraint, options)


def _response_format(given: Mapping[str, Any], options: Options) -> Grammar | None:
    if "response_format" not in given:
        return None
    wanted = an_object(given["response_format"], "response_format")
    kind = one_of(("text", "json_object", "json_schema"))(wanted.get("type"), "response_format.type")
    if kind == "text":
        return None
    if kind == "json_schema":
        named = an_object(wanted.get("json_schema"), "response_format.json_schema")
        return _schema(named.get("schema"), "response_format.json_schema.schema", options)
    if wanted.get("schema") is not None:
        return _schema(wanted["schema"], "response_format.schema", options)
    return Grammar("json_object")


def _constraint(value: object, options: Options) -> Grammar:
    given = an_object(value, "eagle.constraint")
    if len(given) != 1 or next(iter(given)) not in Constraint.MADE_FROM:
        raise wrong_value("eagle.constraint", f"must have one name out of {', '.join(Constraint.MADE_FROM)}")
    ((kind, content),) = given.items()
    where = f"eagle.constraint.{kind}"
    if kind == "json_schema":
        return _schema(content, where, options)
    if kind == "choice":
        content = tuple(text(item, f"{where}[{index}]") for index, item in enumerate(a_list(content, where)))
    elif len(text(content, where)) > options.limits.schema_bytes:
        raise ApiError(400, "invalid_schema", f"{where} is longer than {options.limits.schema_bytes} bytes", where)
    return Grammar(kind, content, where)


def _schema(value: object, name: str, options: Options) -> Grammar:
    """The grammar of a JSON schema that is small enough."""
    if not isinstance(value, dict):
        raise wrong_type(name, value, "a JSON schema")
    size = len(json.dumps(value))
    if size > options.limits.schema_bytes:
        reason = f"{name} has {size} bytes, but at most {options.limits.schema_bytes} are compiled"
        raise ApiError(400, "invalid_schema", reason, name)
    return Grammar("json_schema", value, name)
