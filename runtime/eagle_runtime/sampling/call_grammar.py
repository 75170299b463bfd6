"""The grammar of an answer that may or must call tools, or that may reason before it follows a schema.

Where the model may write text too, the grammar is lazy: text is free, and from the format's first token or text on the
answer follows the grammar of a call. Free text holds no special token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from eagle_runtime.sampling.constraint import CONTENT, Constraint, lark_text
from eagle_runtime.sampling.keyword_grammar import keyword_rules
from eagle_runtime.sampling.quoted_grammar import quoted_rules
from eagle_runtime.sampling.schemas import SPACING, STRICT, argument_schema
from eagle_runtime.sampling.tagged_grammar import tagged_rules
from eagle_runtime.text.answer_form import AnswerForm
from eagle_runtime.text.tools import Tool


def calls_constraint(form: AnswerForm, specials: Mapping[str, int], content: Mapping[str, Any] | None) -> Constraint:
    """Returns the constraint of an answer. form: with tools. specials: the special tokens in the form's texts.
    content: the JSON schema of an answer without calls; None for any text. Raises ConstraintError for what is too
    long."""
    use, written, lit = form.use, form.format, Literals(specials)
    assert use is not None
    before, middle, after = written.call
    rules = {"TEXT": r"/(.|\n)*/"}
    for number, tool in enumerate(use.callable):
        named = before + tool.name
        begun = f"{lit(named + written.id_mark)} ID {lit(middle)}" if written.id_mark else lit(named + middle)
        rules[f"call{number}"] = f"{begun} args{number} {lit(after)}"
        rules |= argument_rules(f"args{number}", tool, form, lit)
    if written.id_mark:
        rules["ID"] = f"/[a-zA-Z0-9]{{{written.id_length}}}/"
    rules["call"] = " | ".join(f"call{number}" for number in range(len(use.callable)))
    rules["calls"] = "call"
    if use.parallel and written.between is not None:
        rules["calls"] = f"call ({lit(written.between)} call)*"
    whole = [f"{lit(begin)} calls {lit(written.end)}" for begin in written.begins]
    if use.required:
        body = whole
    elif content is not None:
        schema = {**content, "x-guidance": {**SPACING, **STRICT, **content.get("x-guidance", {})}}
        rules["content"] = f"%json {json.dumps(schema, ensure_ascii=False)}"
        body = [*whole, "content"]
    elif not written.trigger:
        rules["OTHER"] = r"/([^{](.|\n)*)?/"
        body = [*whole, "OTHER"]
    else:
        rest = f"{lit(written.begin.removeprefix(written.trigger))} calls {lit(written.end)}"
        if written.trigger in specials:
            body = ["TEXT", f"TEXT {lit(written.trigger)} {rest}"]
        else:
            rules["head[lazy]"] = f"TEXT {lit(written.trigger)}"
            body = ["TEXT", f"head {rest}"]
    rules["body"] = " | ".join(body)
    rules["start"] = _thought(form, specials, rules, lit)
    return Constraint("calls", lark_of(rules), tools=tuple(tool.name for tool in use.callable))


def argument_rules(name: str, tool: Tool, form: AnswerForm, lit: Literals) -> dict[str, str]:
    """Returns the rules of a tool's arguments, of which the first is `name`. Raises ConstraintError for a schema that
    the format cannot follow and should."""
    must = form.must_follow(tool)
    if form.format.tagged is not None:
        return tagged_rules(name, tool, form.format, lit, must_follow=must)
    if form.format.keywords:
        return keyword_rules(name, tool, form.format, must_follow=must)
    if form.format.quote:
        return quoted_rules(name, tool, form.format, lit, must_follow=must)
    return {name: f"%json {json.dumps(argument_schema(tool, must_follow=must), ensure_ascii=False)}"}


def grammar_of_arguments(source: str, number: int) -> str:
    """Returns the grammar of one tool's arguments alone. source: a grammar with the rules of several, args0 to args9
    and on; the names of their own rules have those in them."""
    own = re.compile(rf"[A-Za-z]*args{number}(?!\d)[^:]*:", re.IGNORECASE)
    rules = [line.partition(": ") for line in source.splitlines() if own.match(line)]
    return lark_of({"start": f"args{number}", **{name: rule for name, _, rule in rules}})


def thinking_grammar(form: AnswerForm, specials: Mapping[str, int]) -> str:
    """Returns the grammar, in Lark, of an answer that may begin with reasoning and then follows the grammar CONTENT."""
    rules = {"TEXT": r"/(.|\n)*/", "body": f"@{CONTENT}"}
    rules["start"] = _thought(form, specials, rules, Literals(specials))
    return lark_of(rules)


def lark_of(rules: Mapping[str, str]) -> str:
    """Returns rules, each by its name, as a grammar in llguidance's form of Lark."""
    return "%llguidance {}\n" + "".join(f"{name}: {rule}\n" for name, rule in rules.items())


def _thought(form: AnswerForm, specials: Mapping[str, int], rules: dict[str, str], lit: Literals) -> str:
    """The first rule: reasoning, which must end if it has begun, and what follows it."""
    if not form.thinks:
        return "body"
    begin, end = form.format.thought
    if end in specials:
        rules["thought"] = f"TEXT {lit(end)}"
    else:
        rules["thought[lazy]"] = f"TEXT {lit(end)}"
    rules["GAP"] = r"/\n{0,2}/"
    if form.thinking:
        return "thought GAP body"
    led = form.format.led
    opened = f"({lit(begin)} | {lit(led + begin)})" if led else lit(begin)
    if begin not in specials and "head[lazy]" in rules:  # free text that begins as reasoning is reasoning
        rules["head[lazy]"] = rules["head[lazy]"].replace("TEXT", "SPEECH")
        first = f"({led})?{re.escape(begin)}".replace("\n", r"\n")
        rules["SPEECH"] = rf"/(.|\n)*/ & ~/{first}(.|\n)*/"
        rules["after[lazy]"] = rules["head[lazy]"].replace("SPEECH", "TEXT")
        rules["later"] = rules["body"].replace("head ", "after ")
        rules["body"] = rules["body"].replace("TEXT |", "SPEECH |")
        return f"body | {opened} thought GAP later"
    return f"body | {opened} thought GAP body"


class Literals:
    """Writes texts as a grammar does, special tokens by their ids."""

    def __init__(self, specials: Mapping[str, int]) -> None:
        self._specials = specials
        self._split = re.compile("|".join(f"({re.escape(s)})" for s in specials)) if specials else None

    def __call__(self, text: str) -> str:
        parts = [text] if self._split is None else self._split.split(text)
        return " ".join(
            f"<[{self._specials[part]}]>" if part in self._specials else lark_text(part) for part in parts if part
        )
