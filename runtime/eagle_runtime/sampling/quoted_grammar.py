"""The grammar of arguments with bare names and strings between marks (text/quoted_values.py).

Values follow their schema however deep they stand. Members come in order, required ones always, those that the schema
does not name last. Strings follow it as in tagged_grammar.py.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from eagle_runtime.base.arguments import MOST_DEPTH
from eagle_runtime.base.errors import ConstraintError
from eagle_runtime.sampling.constraint import lark_text
from eagle_runtime.sampling.schemas import COMBINING, OF_ARRAYS, OF_OBJECTS
from eagle_runtime.sampling.tagged_grammar import (
    impossible,
    in_commas,
    key_pattern,
    members_of,
    schema_of,
    string_rules,
)
from eagle_runtime.text.call_formats import CallFormat
from eagle_runtime.text.quoted_values import NAME, in_order, value_written
from eagle_runtime.text.tagged_values import split
from eagle_runtime.text.tools import Tool

REFUSED = frozenset((*COMBINING, *OF_ARRAYS, *OF_OBJECTS, "$dynamicRef", "$recursiveRef"))  # what split() left of them
OF_NUMBERS = ("enum", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "multipleOf")


def quoted_rules(
    name: str, tool: Tool, form: CallFormat, lit: Callable[[str], str], *, must_follow: bool
) -> dict[str, str]:
    """Returns the rules of a tool's arguments without the braces around them, as tagged_rules does. Raises
    ConstraintError."""
    schema, refuse = schema_of(tool, form, must_follow=must_follow)
    writer = _Writer(name, schema, form.quote, lit, refuse)
    whole = writer.members(name, schema)
    if whole is None:
        properties, required, more = members_of(schema)
        raise impossible(tool, next(key for key in required if writer.value(properties.get(key, more)) is None))
    return {name: whole, **writer.rules}


class _Writer:
    """Writes the rules of values. Equal schemas have one rule, which may name itself."""

    def __init__(
        self, name: str, root: Mapping[str, Any], quote: str, lit: Callable[[str], str], refuse: Callable[[str], None]
    ) -> None:
        """name: with which those of rules begin. root: the schema in which the others stand. lit, refuse: as in
        tagged_grammar.py."""
        self.rules: dict[str, str] = {}
        self._names: dict[str, str | None] = {}
        self._name, self._root, self._quote, self._lit, self._refuse = name, root, quote, lit, refuse
        self._depth = 0

    def value(self, schema: Any) -> str | None:
        """The name of the rule of a value; None where nothing fits. Raises ConstraintError."""
        key = json.dumps(schema, sort_keys=True)
        if key not in self._names:
            own = self._names[key] = f"{self._name}v{len(self._names)}"
            self._depth += 1
            if self._depth > MOST_DEPTH:
                raise ConstraintError(f"a tool's parameters are more than {MOST_DEPTH} levels deep; make them flatter")
            options = self._options(own, schema)
            self._depth -= 1
            if options:
                self.rules[own] = " | ".join(options)
            else:
                self._names[key] = None
        return self._names[key]

    def members(self, own: str, schema: Mapping[str, Any]) -> str | None:
        """What stands between an object's braces; None where nothing fits. own: with which names of its rules begin."""
        properties, required, more = members_of(schema)
        parts: list[tuple[str, bool]] = []  # with whether it is required
        for key, value in in_order(properties):
            if not NAME.fullmatch(key):
                self._refuse(f"the property {key!r}")
            elif rule := self.value(value):
                parts.append((f"{lark_text(f'{key}:')} {rule}", key in required))
            elif key in required:
                return None
        others = ""
        if more is not False and (rule := self.value(more)):
            word = f"KEY{own.upper()}"
            self.rules[word] = key_pattern(NAME, properties)
            others = f'{word} ":" {rule}'
        return in_commas(own, parts, others, '","', self.rules)

    def _options(self, own: str, schema: Any) -> list[str]:
        both, begin = split(schema, self._root), self._lit(self._quote)
        rules, strings, _ = string_rules(own, both.strings, self._quote, self._lit, self._refuse)
        self.rules |= rules
        options = [f"{begin} {string}" for string in strings]
        for number, other in enumerate(both.others):
            for keyword in other:
                if keyword in REFUSED:
                    self._refuse(keyword)
            types = [other["type"]] if isinstance(other["type"], str) else other["type"]
            enum = other["enum"] if isinstance(other.get("enum"), list) else None
            alone = {key: other[key] for key in OF_NUMBERS if key in other}
            alone["type"] = [kind for kind in types if kind not in ("array", "object")]
            if enum is not None:
                alone["enum"] = [value for value in enum if not isinstance(value, list | dict)]
                for kind, made in (("array", list), ("object", dict)):
                    options += [self._literal(value) for value in enum if kind in types and isinstance(value, made)]
            elif "array" in types and (items := self._items(other)) is not None:
                options.append(f'"[" {items} "]"')
            if enum is None and "object" in types and (members := self.members(f"{own}o{number}", other)) is not None:
                self.rules[f"{own}o{number}"] = members
                options.append(f'"{{" {own}o{number} "}}"')
            if alone["type"] and alone.get("enum") != []:
                alone["x-guidance"] = self._root["x-guidance"]
                self.rules[f"{own}j{number}"] = f"%json {json.dumps(alone, ensure_ascii=False)}"
                options.append(f"{own}j{number}")
        return options

    def _literal(self, value: Any) -> str:
        """A list or an object of an enum."""
        texts = value_written(value, self._quote).split(self._quote)
        return f" {self._lit(self._quote)} ".join(lark_text(text) if text else "" for text in texts)

    def _items(self, schema: Mapping[str, Any]) -> str | None:
        """What stands between a list's brackets; None where nothing fits."""
        first, more = schema.get("prefixItems"), schema.get("items", True)
        if isinstance(more, list):  # as in older drafts
            first, more = more, schema.get("additionalItems", True)
        counts = {key: schema[key] for key in ("minItems", "maxItems") if key in schema}
        for key in [key for key, count in counts.items() if type(count) is not int or count < 0]:
            self._refuse(key)
            del counts[key]
        least, most = counts.get("minItems", 0), counts.get("maxItems")
        item = self.value(more) if more is not False else None
        rules = [self.value(part) for part in first] if isinstance(first, list) and first else [item]
        left = max(least - len(rules), 0)
        text: str | None = ""
        if item is not None and (most is None or most > len(rules)):
            text = f'("," {item}){{{left},{"" if most is None else most - len(rules)}}}'
        elif left:
            text = None
        for number in reversed(range(len(rules) if most is None else min(len(rules), most))):
            rule, comma = rules[number], '","' if number else ""
            text = None if rule is None or text is None else f"{comma} {rule} {text}"
            if number >= least:
                text = "" if text is None else f"({text})?"
        return text if most is None or least <= most else None
