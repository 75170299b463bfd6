"""The grammar of arguments that are written as Python's keywords are (text/keyword_values.py).

Arguments come in the order of the schema, required ones always. A string stands between single quotes, or between
double quotes as JSON where it has a length, a pattern or a format to follow.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from eagle_runtime.sampling.constraint import lark_text
from eagle_runtime.sampling.tagged_grammar import (
    OF_STRINGS,
    check_keywords,
    impossible,
    in_commas,
    key_pattern,
    members_of,
    schema_of,
    standing_alone,
)
from eagle_runtime.text.call_formats import CallFormat
from eagle_runtime.text.keyword_values import NAME, value_written
from eagle_runtime.text.tagged_values import split
from eagle_runtime.text.tools import Tool

STRING = r"""/'([^'\\\n\r]|\\[\\'"nrt])*'/"""
AS_JSON = OF_STRINGS - {"type", "enum"}
WORDS = {"boolean": (True, False), "null": (None,)}


def keyword_rules(name: str, tool: Tool, form: CallFormat, *, must_follow: bool) -> dict[str, str]:
    """Returns the rules of a tool's arguments, as tagged_rules does. Raises ConstraintError."""
    schema, refuse = schema_of(tool, form, must_follow=must_follow)
    properties, required, more = members_of(schema)
    alone, rules = standing_alone(schema), dict[str, str]()

    def value(own: str, part: Any) -> str:
        """A rule for a value; empty where nothing fits."""
        options = _options(own, part, schema, rules, alone, refuse)
        rules.update({own: " | ".join(options)} if options else {})
        return own if options else ""

    parts: list[tuple[str, bool]] = []  # with whether it is required
    for number, (key, part) in enumerate(properties.items()):
        if not NAME.fullmatch(key):
            refuse(f"the property {key!r}")
        elif rule := value(f"{name}v{number}", part):
            parts.append((f"{lark_text(f'{key}=')} {rule}", key in required))
            continue
        if key in required:
            raise impossible(tool, key)
    others = ""
    if more is not False and (rule := value(f"{name}more", more)):
        word = f"KEY{name.upper()}"
        rules[word] = key_pattern(NAME, properties)
        others = f'{word} "=" {rule}'
    return {name: in_commas(name, parts, others, '", "', rules), **rules}


def _options(
    own: str,
    value: Any,
    schema: Mapping[str, Any],
    rules: dict[str, str],
    alone: Callable[[Mapping[str, Any]], str],
    refuse: Callable[[str], None],
) -> list[str]:
    """The alternatives of a value; rules: of those that they name, which are added. own: with which these begin."""
    both, options = split(value, schema), list[str]()

    def as_json(part: Mapping[str, Any]) -> None:
        options.append(f"{own}j{len(rules)}")
        rules[options[-1]] = alone(part)

    for string in both.strings:
        check_keywords(string, refuse)
        if AS_JSON & string.keys():
            as_json(string)
        elif isinstance(string.get("enum"), list):
            options += [lark_text(value_written(text)) for text in string["enum"]]
        else:
            rules["STRING"] = STRING
            options.append("STRING")
    for other in both.others:
        types = [other["type"]] if isinstance(other["type"], str) else list(other["type"])
        values = other["enum"] if isinstance(other.get("enum"), list) else None
        for kind, words in WORDS.items():
            known = [word for word in words if values is None or any(word is one for one in values)]
            options += [lark_text(value_written(word)) for word in known if kind in types]
        left: dict[str, Any] = {"type": [kind for kind in types if kind not in WORDS]}
        if values is not None:
            left["enum"] = [one for one in values if one is not None and not isinstance(one, bool)]
        if left["type"] and left.get("enum") != []:
            as_json({**other, **left})
    return options
