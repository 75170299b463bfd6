"""Errors of tools whose arguments no grammar can follow: which tool, and which keyword."""

from __future__ import annotations

import re
from typing import Any

import pytest

from eagle_runtime import Constraint, ConstraintError
from eagle_runtime.text.answer_form import AnswerForm
from eagle_runtime.text.call_formats import format_named
from eagle_runtime.text.tools import ToolUse
from format_model import Model

MODELS = {name: Model(format_named(name), True) for name in ("hermes", "harmony")}
CLOCK = {"name": "clock", "parameters": {"type": "object", "properties": {"utc": {"type": "boolean"}}}}
SCHEMAS: list[tuple[Any, str]] = [
    ({"type": "string", "not": {"const": "x"}}, "its keyword not has no grammar"),
    ({"not": {}, "if": {}, "then": False}, "its keywords if, not, then have no grammar"),
    ({"items": {"type": "array", "uniqueItems": True}}, "its keyword uniqueItems has no grammar"),
    ({"type": "string", "pattern": "(?=a)b"}, "regex: look-around, including look-ahead and look-behind, is not"),
    ({"type": "string", "format": "regex"}, "Unknown format: regex"),
    ({"type": "banana"}, "Invalid type: banana"),
    ({"$ref": "https://example.com/x"}, "is not present"),
    ({"const": -(2**63)}, "the schema has const -9223372036854775808, but grammars hold integers up to 2**53"),
]


@pytest.mark.parametrize(("schema", "says"), SCHEMAS)
@pytest.mark.parametrize("name", MODELS)
def test_the_tool_is_named(name: str, schema: Any, says: str) -> None:
    wrong = {"name": "plan", "parameters": {"type": "object", "properties": {"a": schema}, "required": ["a"]}}
    for tools in ([wrong, CLOCK], [CLOCK, wrong], [*({**CLOCK, "name": f"clock{n}"} for n in range(11)), wrong]):
        with pytest.raises(ConstraintError) as caught:
            MODELS[name].accepts(AnswerForm(format_named(name), ToolUse.of(tools, "required")), "")
        said = str(caught.value)
        assert said.startswith("the parameters of tool 'plan' cannot be followed (") and said.endswith("; correct them")
        assert says in said and not re.search(r"\d\(\d|\n|args\d|clock", said)


def test_the_schema_of_the_content_is_none_of_a_tool() -> None:
    content = Constraint.json_schema({"not": {"type": "null"}})
    for name, model in MODELS.items():
        form = AnswerForm(format_named(name), ToolUse.of([CLOCK]), thinks=True)
        with pytest.raises(
            ConstraintError, match=r"^the constraint cannot be compiled \(its keyword not has no grammar"
        ):
            model.accepts(form, "", content)
