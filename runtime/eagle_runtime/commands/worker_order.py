"""One line of input, checked: the id, what is to be done, and its arguments."""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from eagle_runtime.app.settings import Settings
from eagle_runtime.base.arguments import MOST_DEPTH, is_deeper, short_repr
from eagle_runtime.base.errors import ConstraintError, RequestError
from eagle_runtime.sampling.constraint import Constraint
from eagle_runtime.sampling.params import bias_of_json

Id = str | int
ACTIONS = {
    "open": {"messages", "tools", "template_kwargs", "tool_format"},
    "fork": {"conversation"},
    "edit": {"conversation", "index", "content"},
    "rollback": {"conversation", "to"},
    "save": {"conversation", "path", "kv", "max_bytes"},
    "load": {"path"},
    "close": {"conversation"},
}
NOT_JSON = {"drafter", "form", "on_cycle", "on_prefill", "sampling"}  # settings that are Python objects
SETTINGS = Settings.__annotations__.keys() - NOT_JSON
ARGUMENTS = {
    "hello": set[str](),
    "status": set[str](),
    "shutdown": set[str](),
    "cancel": {"target"},
    "count_tokens": {"prompt", "messages"},
    "generate": {
        "prompt", "messages", "tools", "tool_choice", "parallel_tool_calls", "tool_format", "template_kwargs",
        "conversation", "message", "results", "regenerate", *SETTINGS,
    },
    "conversation": {"action", *(name for names in ACTIONS.values() for name in names)},
}  # fmt: skip
KINDS = {
    "messages": list, "tools": list, "results": dict, "template_kwargs": dict, "path": str, "conversation": str,
    "action": str,
}  # fmt: skip
LONGEST_ID = 256  # characters; it comes back in every line


@dataclass(frozen=True, slots=True)
class Order:
    """A checked line."""

    id: Id
    op: str
    arguments: dict[str, Any]


class LineError(RequestError):
    """Raised for a line that is not an order. id: of the line, None where it has none."""

    code = "line"

    def __init__(self, message: str, order_id: Id | None = None) -> None:
        super().__init__(message)
        self.id = order_id


def read_order(line: bytes) -> Order:
    """Returns what a line asks for. Raises LineError."""
    try:
        data = json.loads(line.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise LineError(f"the line is not JSON in UTF-8 ({short_repr(str(error))}); send one object per line") from None
    if not isinstance(data, dict):
        raise LineError(f"the line is {short_repr(data)}; send an object with id and op")
    order_id = data.pop("id", None)
    number = isinstance(order_id, int) and not isinstance(order_id, bool) and abs(order_id) < 2**53
    if not number and not (isinstance(order_id, str) and len(order_id) <= LONGEST_ID):
        raise LineError(f"id is {short_repr(order_id)}, but must be a string or a whole number")
    if is_deeper(data):
        raise LineError(f"the line is more than {MOST_DEPTH} levels deep; make it flatter", order_id)
    op = data.pop("op", None)
    if not isinstance(op, str) or op not in ARGUMENTS:
        raise LineError(f"op is {short_repr(op)}, but must be one of {', '.join(ARGUMENTS)}", order_id)
    if unknown := sorted(set(data) - ARGUMENTS[op]):
        raise LineError(
            f"{op} takes no {short_repr(unknown[0])}; it takes {', '.join(sorted(ARGUMENTS[op]))}", order_id
        )
    for name, kind in KINDS.items():
        if name in data and not isinstance(data[name], kind):
            what = {list: "a list", dict: "an object", str: "a string"}[kind]
            raise LineError(f"{name} is {short_repr(data[name])}, but must be {what}", order_id)
    if not all(isinstance(tool, dict) for tool in data.get("tools", [])):
        raise LineError(f"tools are {short_repr(data['tools'])}, but must be objects", order_id)
    return Order(order_id, op, data)


def taken(arguments: dict[str, Any], *names: str) -> dict[str, Any]:
    """Returns the arguments of these names that are given."""
    return {name: arguments[name] for name in names if name in arguments}


def settings_of(arguments: dict[str, Any]) -> dict[str, Any]:
    """The settings of an answer as `EagleModel.stream` takes them. Raises RequestError."""
    settings = taken(arguments, *SETTINGS)
    if "logit_bias" in settings:
        settings["logit_bias"] = bias_of_json(settings["logit_bias"])
    if settings.get("constraint") is not None:
        settings["constraint"] = _constraint(settings["constraint"])
    return settings


def _constraint(value: Any) -> Constraint:
    if value == "json_object":
        return Constraint.of(value)
    if not isinstance(value, dict) or len(value) != 1 or (kind := next(iter(value))) not in Constraint.MADE_FROM:
        raise ConstraintError(
            f"constraint is {short_repr(value)}, but must be 'json_object', or an object with one of "
            f"{', '.join(Constraint.MADE_FROM)}"
        )
    return Constraint.of(kind, value[kind])
