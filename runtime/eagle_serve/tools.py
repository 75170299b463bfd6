"""The tools of a request: OpenAI's fields, and the older ones about functions, which mean the same."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_runtime import RequestError, ToolUse
from eagle_serve.checks import a_list, an_object
from eagle_serve.errors import ApiError, unsupported, wrong_value

FIELDS = ("tools", "tool_choice", "parallel_tool_calls")
OLD = ("functions", "function_call")


def tools_of(given: Mapping[str, Any]) -> ToolUse | None:
    """Returns which tools a chat may call; None for none. Raises ApiError."""
    if has_functions(given):
        if other := next((name for name in FIELDS if name in given), None):
            raise wrong_value(other, f"and {' or '.join(OLD)} are both given, but mean the same; send tools alone")
        given = _renamed(given)
    try:
        return ToolUse.of(*(given.get(name) for name in FIELDS))
    except RequestError as error:
        name = str(error).split(maxsplit=1)[0]
        raise ApiError(400, "invalid_value", str(error), name) from None


def has_functions(given: Mapping[str, Any]) -> bool:
    """Whether a request asks for calls in the older form, in which it is answered then."""
    return bool(given.get("functions")) or given.get("function_call") not in (None, "none", "auto")


def no_tools(given: Mapping[str, Any]) -> None:
    """Raises ApiError for tools that a completion is asked to call."""
    if given.get("tools") and given.get("tool_choice") != "none":
        raise unsupported("tools", "are called in chats alone; send them to /v1/chat/completions")
    if given.get("tool_choice") not in (None, "none", "auto"):
        raise unsupported("tool_choice", "is for chats alone; send it to /v1/chat/completions")
    for name in OLD:
        if given.get(name) not in (None, [], "none"):
            raise unsupported(name, "is for chats alone; send it to /v1/chat/completions")


def _renamed(given: Mapping[str, Any]) -> dict[str, Any]:
    functions = a_list(given.get("functions", []), "functions")
    tools = [
        {"type": "function", "function": an_object(function, f"functions[{index}]")}
        for index, function in enumerate(functions)
    ]
    choice = given.get("function_call")
    if isinstance(choice, dict):
        choice = {"type": "function", "function": choice}
    return {"tools": tools, "tool_choice": choice, "parallel_tool_calls": False}
