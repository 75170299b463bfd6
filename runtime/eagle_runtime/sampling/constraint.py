"""What an output must look like, as an application says it. Nothing here knows a model."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

from eagle_runtime.base.arguments import MOST_DEPTH, is_deeper, short_repr
from eagle_runtime.base.errors import ConstraintError
from eagle_runtime.sampling.schemas import effective

MOST_BYTES = 64 * 1024  # of a schema, pattern or grammar in UTF-8; chosen, grammars.STACK suffices for so many

Kind = Literal["json_schema", "regex", "lark", "calls"]  # the last: a grammar in Lark that answer_grammar.py writes
CONTENT = "content"  # by which a grammar around a constraint names it


@dataclass(frozen=True, slots=True)
class Constraint:
    """The form of an output. Made by one of the functions below; compiled when a model first uses it.

    Each raises ConstraintError for what is of a wrong type, above 64 KiB, or no UTF-8 text; a schema may be 64 levels
    deep. Errors within a schema, pattern or grammar come from the model's method that it is passed to. within: a
    grammar in Lark in which it stands as CONTENT, where the answer has more than that; answer_grammar.py writes it.
    tools: the names of tools whose arguments are in either, in the order of their rules."""

    MADE_FROM: ClassVar = ("json_schema", "regex", "lark", "choice")  # its functions that take one value
    kind: Kind
    source: str
    within: str | None = None
    tools: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.source, str):
            raise ConstraintError(f"a constraint is {short_repr(self.source)}, but must be text")
        try:
            size = len((self.source + (self.within or "")).encode("utf-8"))
        except UnicodeEncodeError as error:
            raise ConstraintError(
                f"the constraint holds half a character (a surrogate) at position {error.start}; give text in UTF-8"
            ) from None
        if size > MOST_BYTES:
            raise ConstraintError(f"the constraint has {size} bytes, but may have {MOST_BYTES}; make it shorter")

    @staticmethod
    def json_schema(schema: Mapping[str, Any] | str) -> Constraint:
        """JSON that a schema accepts, in one line. schema: a dict, or its JSON text."""
        try:
            # As a schema's text may write one thing in many ways, all are brought to the same text.
            data = json.loads(schema) if isinstance(schema, str) else schema
            if not isinstance(data, Mapping):
                raise ConstraintError(f"the schema is {short_repr(schema)}, but must be a JSON object")
            if is_deeper(data):
                raise RecursionError
            text = json.dumps(effective(dict(data)), ensure_ascii=False, allow_nan=False, separators=(",", ":"))
        except RecursionError:
            raise ConstraintError(f"the schema is more than {MOST_DEPTH} levels deep; make it flatter") from None
        except (TypeError, ValueError) as error:
            raise ConstraintError(
                f"the schema is not JSON ({str(error)[:200]}); give a dict of JSON's types or its text"
            ) from None
        return Constraint("json_schema", text)

    @staticmethod
    def of(kind: str, value: Any = None) -> Constraint:
        """The constraint of a kind: "json_object", or one of MADE_FROM with a value."""
        made: Constraint = Constraint.json_object() if kind == "json_object" else getattr(Constraint, kind)(value)
        return made

    @staticmethod
    def json_object() -> Constraint:
        """Any JSON object."""
        return Constraint.json_schema({"type": "object"})

    @staticmethod
    def regex(pattern: str) -> Constraint:
        """Text that a regular expression matches as a whole; without look-around and references to groups."""
        return Constraint("regex", pattern)

    @staticmethod
    def lark(grammar: str) -> Constraint:
        """Text of a context-free grammar in Lark's notation, whose first rule is `start`."""
        return Constraint("lark", grammar)

    @staticmethod
    def choice(options: Sequence[str]) -> Constraint:
        """One of several texts, none of them empty."""
        wrong = isinstance(options, str | bytes) or not isinstance(options, Sequence) or not options
        if wrong or not all(isinstance(option, str) and option for option in options):
            raise ConstraintError(f"the options are {short_repr(options)}, but must be a list of texts, none empty")
        return Constraint("lark", "start: " + " | ".join(map(lark_text, options)))


def lark_text(text: str) -> str:
    """Returns a text as it stands in a grammar in Lark, whose reader takes JSON's strings without the letter DEL."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")
