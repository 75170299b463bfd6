"""What the answer to a chat must follow: the model's way to reason and to call tools, a constraint of its content."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from eagle_runtime.base.errors import RequestError
from eagle_runtime.sampling.call_grammar import calls_constraint, thinking_grammar
from eagle_runtime.sampling.channel_grammar import channel_grammar
from eagle_runtime.sampling.constraint import Constraint
from eagle_runtime.text.answer_form import AnswerForm


def answer_constraint(
    form: AnswerForm, specials: Mapping[str, int], constraint: Constraint | None
) -> Constraint | None:
    """Returns the constraint of an answer; None where it is free text.

    specials: the special tokens in the form's texts. constraint: of the answer's content. Reasoning before it is free
    in a format with channels, and before a JSON schema in any other; another constraint there is one of the whole
    answer, tags included. Raises RequestError, and ConstraintError for what is too long."""
    use, json_schema = form.use, constraint is not None and constraint.kind == "json_schema"
    if use is not None and constraint is not None and not json_schema:
        raise RequestError("constraint may be a JSON schema where tools are offered, and nothing else; omit the tools")
    if form.format.channels is None:
        if use is not None:
            return calls_constraint(form, specials, None if constraint is None else json.loads(constraint.source))
        if constraint is not None and json_schema and form.thinks:
            return replace(constraint, within=thinking_grammar(form, specials))
        return constraint
    names = () if use is None else tuple(tool.name for tool in use.callable)
    if constraint is not None and (use is None or not use.required):
        return replace(constraint, within=channel_grammar(form, specials, content=True), tools=names)
    return None if use is None else Constraint("calls", channel_grammar(form, specials, content=False), tools=names)
