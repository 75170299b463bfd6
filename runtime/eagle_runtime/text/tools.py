"""The tools that a request offers, as OpenAI's API writes them, and which of them the answer may or must call."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from eagle_runtime.base.arguments import MOST_DEPTH, is_deeper, json_text, short_repr
from eagle_runtime.base.errors import ConstraintError, RequestError

NAME = re.compile(r"[A-Za-z0-9_.:-]{1,64}")
Choice = Literal["none", "auto", "required"]
CHOICES: tuple[Choice, ...] = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """A function. parameters: the JSON schema of its arguments. strict: whether they follow it whatever it takes, and
    not as far as a grammar can say. data: all that was given of it."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool
    data: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class ToolUse:
    """tools: all that the model is told of. callable: those that the answer may call. required: whether it must.
    parallel: whether it may call several."""

    tools: tuple[Tool, ...]
    callable: tuple[Tool, ...]
    required: bool = False
    parallel: bool = True

    @staticmethod
    def of(
        tools: Sequence[Mapping[str, Any]] | None, tool_choice: Any = None, parallel_tool_calls: bool | None = None
    ) -> ToolUse | None:
        """Returns what the three fields of OpenAI's API ask for; None where no tool may be called. Raises RequestError,
        which begins with the field."""
        known = [_tool(value, f"tools[{index}]") for index, value in enumerate(_list(tools or [], "tools"))]
        by_name = {tool.name: tool for tool in known}
        if len(by_name) < len(known):
            twice = next(tool.name for tool in known if by_name[tool.name] is not tool)
            raise RequestError(f"tools have the name {twice!r} twice; rename one")
        if not isinstance(parallel_tool_calls, bool | None):
            raise RequestError(f"parallel_tool_calls is {short_repr(parallel_tool_calls)}, but must be true or false")
        mode, names, single = _choice(tool_choice)
        if mode == "none":
            return None
        if not known:
            if mode == "required":
                raise RequestError("tool_choice asks for a call, but there are no tools; send some")
            return None
        for name in names or ():
            if not isinstance(name, str) or name not in by_name:
                raise RequestError(f"tool_choice names {short_repr(name)}, which is none of the tools")
        may = tuple(known if names is None else [tool for tool in known if tool.name in names])
        return ToolUse(tuple(known), may, mode == "required", parallel_tool_calls is not False and not single)


def _tool(value: Any, where: str) -> Tool:
    tool = _object(value, where)
    kind = tool.get("type", "function")
    if kind != "function":
        raise RequestError(f"{where}.type is {short_repr(kind)}, but must be 'function': no others are called here")
    at = f"{where}.function" if "function" in tool else where
    function = _object(tool.get("function", tool), at)
    name = function.get("name")
    if not isinstance(name, str) or not NAME.fullmatch(name):
        raise RequestError(f"{at}.name is {short_repr(name)}, but must be 1 to 64 letters, digits, or any of _.:-")
    parameters = function.get("parameters")
    strict = function.get("strict")
    if not isinstance(strict, bool | None):
        raise RequestError(f"{at}.strict is {short_repr(strict)}, but must be true or false")
    if parameters is not None:
        _object(parameters, f"{at}.parameters")
    data = {key: item for key, item in function.items() if key not in ("type", "strict")}
    if is_deeper({"function": data}):  # as templates get it
        raise ConstraintError(f"{where} has values more than {MOST_DEPTH} levels deep; make them flatter")
    json_text(where, data)
    return Tool(name, parameters or {}, bool(strict), data)


def _choice(value: Any) -> tuple[Choice, list[str] | None, bool]:
    """Returns the mode, the names of the tools that may be called (None: all), and whether one call is wanted."""
    if value is None or isinstance(value, str):
        if value is not None and value not in CHOICES:
            raise RequestError(
                f"tool_choice is {short_repr(value)}, but must be one of {', '.join(CHOICES)}, or an object"
            )
        return value or "auto", None, False
    given = _object(value, "tool_choice")
    kind = given.get("type")
    if kind == "function":
        return "required", [_object(given.get("function", given), "tool_choice.function").get("name", "")], True
    if kind != "allowed_tools":
        raise RequestError(
            f"tool_choice.type is {short_repr(kind)}, but must be 'function' or 'allowed_tools': no others are called"
        )
    allowed = _object(given.get("allowed_tools", given), "tool_choice.allowed_tools")
    mode = allowed.get("mode", "auto")
    if mode not in ("auto", "required"):
        raise RequestError(f"tool_choice.allowed_tools.mode is {short_repr(mode)}, but must be 'auto' or 'required'")
    names = []
    for index, item in enumerate(_list(allowed.get("tools"), "tool_choice.allowed_tools.tools")):
        tool = _object(item, f"tool_choice.allowed_tools.tools[{index}]")
        names.append(_object(tool.get("function", tool), f"tool_choice.allowed_tools.tools[{index}]").get("name", ""))
    if not names:
        raise RequestError("tool_choice.allowed_tools.tools is empty; name one, or send tool_choice 'none'")
    return mode, names, False


def _object(value: Any, where: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise RequestError(f"{where} is {short_repr(value)}, but must be an object")
    return value


def _list(value: Any, where: str) -> Sequence[Any]:
    if not isinstance(value, list | tuple):
        raise RequestError(f"{where} is {short_repr(value)}, but must be a list")
    return value
