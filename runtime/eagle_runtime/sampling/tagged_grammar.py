"""The grammar of arguments that are values between tags (text/tagged_values.py).

Values come in the order of the schema, required ones always. A string stands as it is: one of an enum, or text that
follows length, pattern and format and ends at the first closing tag; any other value is JSON.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from eagle_runtime.base.errors import ConstraintError
from eagle_runtime.sampling.constraint import lark_text
from eagle_runtime.sampling.schemas import NO_EFFECT, argument_schema
from eagle_runtime.text.call_formats import CallFormat
from eagle_runtime.text.tagged_values import TaggedValues, resolved, split
from eagle_runtime.text.tools import Tool

NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")  # of a value that a schema does not name
WHOLE = "all-arguments"  # the name of a definition
DEFINED = re.compile(r'"\$ref": "#/(\$defs|definitions)/([^"/]+)')
ANY = r"(.|\n)"
OF_WHOLE = frozenset(  # keywords of the schema of all arguments that the rules below follow
    ("type", "properties", "required", "additionalProperties", "$defs", "definitions", "x-guidance", "$schema", "$id")
)
OF_STRINGS = frozenset(("type", "enum", "minLength", "maxLength", "pattern", "format"))
OF_OTHERS = frozenset(  # which say nothing of strings
    ("items", "prefixItems", "minItems", "maxItems", "properties", "required", "additionalProperties",
     "patternProperties", "minProperties", "maxProperties", "minimum", "maximum", "exclusiveMinimum",
     "exclusiveMaximum", "multipleOf", "additionalItems", "$defs", "definitions", "x-guidance", *NO_EFFECT)
)  # fmt: skip
DAY = r"[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|3[01])"
HOUR = r"([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](\.[0-9]+)?(Z|[+-]([01][0-9]|2[0-3]):[0-5][0-9])"
BYTE = r"(25[0-5]|2[0-4][0-9]|1[0-9]{2}|[1-9]?[0-9])"
WORD = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
FORMATS = {
    "date": DAY,
    "time": HOUR,
    "date-time": f"{DAY}T{HOUR}",
    "duration": r"P([0-9]+W|([0-9]+Y)?([0-9]+M)?[0-9]+D(T[0-9]+H([0-9]+M([0-9]+S)?)?)?|T[0-9]+(H|M|S)|[0-9]+(Y|M))",
    "uuid": r"[0-9a-fA-F]{8}(-[0-9a-fA-F]{4}){3}-[0-9a-fA-F]{12}",
    "ipv4": rf"{BYTE}(\.{BYTE}){{3}}",
    "hostname": rf"{WORD}(\.{WORD})*",
    "email": rf"[A-Za-z0-9!#$%&'*+=?^_`{{|}}~-]+(\.[A-Za-z0-9!#$%&'*+=?^_`{{|}}~-]+)*@{WORD}(\.{WORD})*",
    "uri": r"[A-Za-z][A-Za-z0-9+.-]*:[A-Za-z0-9._~:?#@!$&'()*+,;=%\/-]+",
}


def tagged_rules(
    name: str, tool: Tool, form: CallFormat, lit: Callable[[str], str], *, must_follow: bool
) -> dict[str, str]:
    """Returns the rules of a tool's arguments, of which the first is `name`. lit: writes the format's texts.
    must_follow: as in argument_schema; keywords that values between tags cannot follow count too. Raises
    ConstraintError for those."""
    tags = form.tagged
    assert tags is not None
    schema, refuse = schema_of(tool, form, must_follow=must_follow)
    properties, required, more = members_of(schema)
    alone = standing_alone(schema)
    rules, parts = {name: ""}, []
    for number, (key, value) in enumerate([*properties.items(), ("", more)]):
        own = f"{name}v{number}"
        extra = number == len(properties)
        written = _value_rules(own, value, schema, tags, lit, alone, refuse) if not extra or more is not False else {}
        if not written:  # nothing fits the schema
            if key in required:
                raise impossible(tool, key)
            continue
        rules |= written
        word = lark_text(key)
        if extra:
            word = f"KEY{own.upper()}"
            rules[word] = key_pattern(NAME, properties)
        part = f"{lit(tags.before)} {word} {lit(tags.middle)} {own}"
        parts.append(f"({part})*" if extra else part if key in required else f"({part})?")
    rules[name] = " ".join(parts) or '""'
    return rules


def schema_of(tool: Tool, form: CallFormat, *, must_follow: bool) -> tuple[dict[str, Any], Callable[[str], None]]:
    """Returns the schema of a tool's arguments, after a look at its own keywords, and what refuses a keyword. Raises
    ConstraintError."""
    schema = argument_schema(tool, must_follow=must_follow)
    schema = dict(resolved(schema, schema))

    def refuse(keyword: str) -> None:
        if must_follow:  # else arguments follow their schema as far as a grammar can say
            raise ConstraintError(
                f"{_where(tool)} have {keyword}, which calls in the format {form.name} cannot follow; leave it out"
            )

    for keyword in schema:
        if keyword not in OF_WHOLE and keyword not in NO_EFFECT:
            refuse(keyword)
    return schema, refuse


def members_of(schema: Mapping[str, Any]) -> tuple[dict[str, Any], list[Any], Any]:
    """Returns an object's members by name, the names of those that are required, and the schema of any others."""
    properties = dict(schema["properties"]) if isinstance(schema.get("properties"), Mapping) else {}
    required = schema["required"] if isinstance(schema.get("required"), list) else []
    more = schema.get("additionalProperties", True)
    properties |= {key: more for key in required if isinstance(key, str) and key not in properties}
    return properties, required, more


def key_pattern(name: re.Pattern[str], properties: Iterable[str]) -> str:
    """Returns what the name of a member that a schema does not name must match. name: what any does. properties: the
    names that the schema has."""
    taken = "|".join(escaped(one) for one in properties if name.fullmatch(one))
    return f"/{name.pattern}/ & ~/({taken})/" if taken else f"/{name.pattern}/"


def standing_alone(schema: Mapping[str, Any]) -> Callable[[Mapping[str, Any]], str]:
    """Returns what makes a rule of JSON of a part of a schema, with the definitions that it refers to."""
    whole = {key: value for key, value in schema.items() if key not in ("$defs", "definitions", "x-guidance")}
    defined = {key: dict(part) for key in ("$defs", "definitions") if isinstance(part := schema.get(key), Mapping)}
    shared = _moved({"definitions": {}, **defined, "$defs": {**defined.get("$defs", {}), WHOLE: whole}})

    def rule(part: Mapping[str, Any]) -> str:
        alone = _moved(part)
        alone = {**_needed(alone, shared), **alone, "x-guidance": schema["x-guidance"]}
        return f"%json {json.dumps(alone, ensure_ascii=False)}"

    return rule


def in_commas(own: str, parts: Sequence[tuple[str, bool]], more: str, comma: str, rules: dict[str, str]) -> str:
    """Returns what members with commas among them are: `parts`, with whether each must be there, and then any number of
    `more`, which may be empty. rules: to which those that are needed for it are added; own: with which these begin."""
    options, after = ['""'], ""
    if more:
        after = f"({comma} {more})*"
        options.append(f"{more} {after}")
    first = next((number for number, (_, always) in enumerate(parts) if always), None)
    if first is not None:
        texts = [*(f"({part} {comma})?" for part, _ in parts[:first]), parts[first][0]]
        texts += [f"{comma} {part}" if always else f"({comma} {part})?" for part, always in parts[first + 1 :]]
        return " ".join([*texts, after]).rstrip()
    for number, (part, _) in reversed(list(enumerate(parts))):
        options.append(f"{part} {after}")
        rest = f"{own}t{number}"
        rules[rest], after = f"({comma} {part})? {after}", rest
    return " | ".join(options)


def impossible(tool: Tool, key: str) -> ConstraintError:
    """Returns the error of an argument that is required and has no value."""
    return ConstraintError(f"{_where(tool)}: no value can be given for {key!r}, which is required; correct it")


def _value_rules(
    name: str,
    schema: Any,
    root: Mapping[str, Any],
    tags: TaggedValues,
    lit: Callable[[str], str],
    alone: Callable[[Mapping[str, Any]], str],
    refuse: Callable[[str], None],
) -> dict[str, str]:
    """The rules of a value with its closing tag; none where nothing fits."""
    both, end, gap = split(schema, root), lit(tags.close), lit(tags.gap)
    rules, strings, free = string_rules(name, both.strings, tags.close, lit, refuse)
    options = [f"{string} {gap}" for string in strings]
    others = both.others
    if rules and "\n" not in tags.close and "<[" not in end:  # a string in JSON may hold the tag, which ends any text
        others = tuple(filter(None, map(_simple, others)))
    for number, other in enumerate(() if free else others):  # free text is all text; its reader tells them apart
        rules[f"{name}j{number}"] = alone(other)
        options.append(f"{name}j{number} {end} {gap}")
    if not options:
        return {}
    return {**rules, name: " | ".join(options)}


def string_rules(
    name: str,
    strings: Sequence[Mapping[str, Any]],
    close: str,
    lit: Callable[[str], str],
    refuse: Callable[[str], None],
) -> tuple[dict[str, str], list[str], bool]:
    """Returns rules, the alternatives of a string with what closes it, which may name those, and whether one is any
    text. name: with which those of the rules begin. strings: schemas, one of which it follows."""
    rules: dict[str, str] = {}
    options: list[str] = []
    texts: list[str] = []
    end, free = lit(close), False
    for string in strings:
        values = string.get("enum")
        pattern, follows = _pattern(string, close, refuse), _checks(string)
        if isinstance(values, list):
            fitting = [value for value in values if close not in value and follows(value)]
            if pattern is not None and "pattern" in string and any(fitting):  # the grammar finds those that match
                options.append(f"PATTERN{name.upper()}N{len(rules)} {end}")
                rules[options[-1].split()[0]] = f"({' | '.join(map(lark_text, filter(None, fitting)))}) & {pattern}"
                continue
            texts += filter(None, fitting)
            if "" in fitting:
                options.append(end)
            continue
        text = f"{'PATTERN' if 'pattern' in string else 'TEXT'}{name.upper()}N{len(rules)}"
        free = free or pattern is None
        rules[text] = pattern or f"/{ANY}*/"
        head, special, rest = end.partition("<[")
        if special:  # no text holds a special token, so that what stands before it ends the text
            rules[f"{text}E"] = f"{text} {head}"
            rules[text.lower()] = f"{text}E {special}{rest}"
        else:
            rules[f"{text.lower()}[lazy]"] = f"{text} {end}"
        options.append(text.lower())
    if texts:
        options.append(f"({' | '.join(map(lark_text, texts))}) {end}")
    return rules, options, free


def _moved(schema: Any) -> Any:
    """A schema that stands alone, whose references to all arguments go to the definition WHOLE."""
    if isinstance(schema, list):
        return [_moved(part) for part in schema]
    if not isinstance(schema, Mapping):
        return schema
    made = {name: value if name in ("enum", "const") else _moved(value) for name, value in schema.items()}
    reference = schema.get("$ref")
    if isinstance(reference, str) and re.match(r"#(?!/(\$defs|definitions)/)", reference):
        made["$ref"] = f"#/$defs/{WHOLE}{reference[1:]}"
    return made


def _needed(schema: Any, shared: Mapping[str, Mapping[str, Any]]) -> dict[str, dict[str, Any]]:
    """The definitions that a schema refers to, and those that they refer to."""
    found: dict[str, dict[str, Any]] = {}
    left = [schema]
    while left:
        for kind, escaped in DEFINED.findall(json.dumps(left.pop(), ensure_ascii=False)):
            name = escaped.replace("~1", "/").replace("~0", "~")
            if name in shared[kind] and name not in found.setdefault(kind, {}):
                found[kind][name] = shared[kind][name]
                left.append(shared[kind][name])
    return found


def _simple(schema: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """What a schema accepts besides lists and objects; None for nothing."""
    types = [schema["type"]] if isinstance(schema["type"], str) else schema["type"]
    left = [kind for kind in types if kind not in ("array", "object")]
    return {**schema, "type": left} if left else None


def _pattern(schema: Mapping[str, Any], close: str, refuse: Callable[[str], None]) -> str | None:
    """What the text of a string must match, in Lark; None for any text."""
    check_keywords(schema, refuse)
    parts = []
    kinds = {"minLength": int, "maxLength": int, "pattern": str, "format": str}
    wrong = [keyword for keyword, kind in kinds.items() if keyword in schema and type(schema[keyword]) is not kind]
    if wrong or min(schema.get("minLength", 0), schema.get("maxLength", 0)) < 0:
        refuse(wrong[0] if wrong else "a length below 0")
        return None
    if isinstance(pattern := schema.get("pattern"), str):
        whole = whole_pattern(pattern)
        if whole is None:
            refuse("pattern")
        else:
            parts.append(whole)
    if isinstance(named := schema.get("format"), str):
        if named in FORMATS:
            parts.append(FORMATS[named])
        else:
            refuse(f"format {named!r}")
    least, most = schema.get("minLength", 0), schema.get("maxLength")
    if least or most is not None:
        parts.append(f"{ANY}{{{least},{'' if most is None else most}}}")
    if not parts:
        return None
    if parts[1:] or least or "pattern" in schema:  # else the closing tag ends the text where it first stands
        return " & ".join([*(f"/{part}/" for part in parts), f"~/{ANY}*{escaped(close)}{ANY}*/"])
    return f"/{parts[0]}/"


def check_keywords(string: Mapping[str, Any], refuse: Callable[[str], None]) -> None:
    """Refuses what a string's schema says that is neither about strings nor about other values alone."""
    for keyword in string:
        if keyword not in OF_STRINGS and keyword not in OF_OTHERS:
            refuse(keyword)


def _checks(schema: Mapping[str, Any]) -> Callable[[str], bool]:
    """Whether a value of an enum has a length that is allowed."""
    least, most = schema.get("minLength"), schema.get("maxLength")
    return lambda value: (
        not ((isinstance(least, int) and len(value) < least) or (isinstance(most, int) and len(value) > most))
    )


def whole_pattern(pattern: str) -> str | None:
    """Returns a regular expression, as it stands between slashes, for the texts in which a schema's pattern is found;
    None where its anchors are in alternatives of it."""
    if any(char == "|" and depth == 0 for char, depth in _outside(pattern)) and re.search(r"[\^$]", pattern):
        return None
    begins, ends = pattern.startswith("^"), re.search(r"(?<!\\)(\\\\)*\$$", pattern) is not None
    inner = pattern[begins : len(pattern) - ends]
    inner = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], inner, flags=re.DOTALL)
    inner = inner.replace("\n", "\\n").replace("\r", "\\r")
    return f"{'' if begins else f'{ANY}*'}({inner}){'' if ends else f'{ANY}*'}"


def _outside(pattern: str) -> Iterator[tuple[str, int]]:
    """The characters of a pattern that stand in no class and are not escaped, with the groups around each."""
    depth, escaped, classed = 0, False, False
    for char in pattern:
        if escaped:
            escaped = False
        elif char == "\\":
            escaped = True
        elif classed:
            classed = char != "]"
        elif char == "[":
            classed = True
        else:
            depth += (char == "(") - (char == ")")
            yield char, depth


def escaped(text: str) -> str:
    """Returns a text as it stands in a regular expression between slashes."""
    return re.sub(r"[^\w<>\n]", lambda found: f"\\{found[0]}", text, flags=re.ASCII).replace("\n", "\\n")


def _where(tool: Tool) -> str:
    return f"the parameters of tool {tool.name!r}"
