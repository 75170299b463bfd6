"""How a family of models is told of tools, and how it writes calls of them in its answer."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal


@dataclass(frozen=True, slots=True)
class CallFormat:
    """The text of an answer with calls is `begin`, the calls with `between` among them, and `end`. From it follow the
    grammar of such answers, their parser, and what stands in a prompt for earlier calls that its template leaves out.

    marks: texts that chat templates of the family hold, all of them. call: what stands before a call's name, between
    name and arguments (a JSON object), and after those. between: None for one call per answer. trigger: the beginning
    of `begin` from which on an answer is one of calls; where it is empty, an answer that begins as a call is one. also:
    other texts that may stand in place of `begin`. tools_as: the template's variable for the tools; "message" puts
    them as JSON into the system message's field `tools`, and "text" writes `description` into its content.
    functions_alone: whether tools are given without {"type": "function"} around. results: what stands before and after
    the result of a call in a message of the user; None where the template knows messages of role tool.
    calls_as_text: whether earlier calls are written into the content of their message, as for all templates without
    `tool_calls`. id_length: of the ids of calls, where the template counts characters."""

    name: str
    marks: tuple[str, ...]
    begin: str
    call: tuple[str, str, str]
    end: str = ""
    between: str | None = None
    trigger: str = ""
    also: tuple[str, ...] = ()
    tools_as: Literal["tools", "xml_tools", "message", "text"] = "tools"
    functions_alone: bool = False
    description: str = "{tools}"
    results: tuple[str, str] | None = None
    calls_as_text: bool = False
    id_length: int | None = None

    @property
    def begins(self) -> tuple[str, ...]:
        """All that may stand before the first call."""
        return (self.begin, *self.also)

    def written(self, calls: Sequence[tuple[str, Any]]) -> str:
        """Returns the text of calls, each a name and its arguments."""
        before, middle, after = self.call
        texts = [f"{before}{name}{middle}{json.dumps(args, ensure_ascii=False)}{after}" for name, args in calls]
        return f"{self.begin}{(self.between or '').join(texts)}{self.end}"
