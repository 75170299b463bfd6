"""The messages of a chat request: roles, text parts, and what of them a chat template sees."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_serve.checks import a_list, an_object, text
from eagle_serve.errors import unsupported, wrong_type, wrong_value

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
RENAMED = {"developer": "system", "function": "tool"}
TEXT = {"text": "text"}
PASSED = ("name", "tool_call_id", "reasoning_content")  # text that templates of some models read


def parse_messages(value: object, most: int) -> list[dict[str, Any]]:
    """Returns the messages as the template gets them: {"role", "content", ...} with text content, "developer" being
    "system", and "function" "tool". most: of messages. Raises ApiError naming the message."""
    messages = a_list(value, "messages")
    if not messages:
        raise wrong_value("messages", "is empty; send at least one message")
    if len(messages) > most:
        raise wrong_value("messages", f"has {len(messages)} messages, but at most {most} are read")
    return [_message(item, f"messages[{index}]") for index, item in enumerate(messages)]


def _message(value: object, name: str) -> dict[str, Any]:
    message = an_object(value, name)
    role = text(message.get("role"), f"{name}.role")
    if role not in ROLES:
        raise wrong_value(f"{name}.role", f"is {role[:40]!r}, but must be one of {', '.join(ROLES)}")
    for refused in ("audio", "prefix", "partial"):
        if message.get(refused) not in (None, False):
            raise unsupported(f"{name}.{refused}", "is not supported")
    calls = message.get("tool_calls")
    if calls is None and message.get("function_call") is not None:  # of the older API
        calls = [{"function": an_object(message["function_call"], f"{name}.function_call")}]
    result: dict[str, Any] = {"role": RENAMED.get(role, role)}
    content = message.get("content")
    if content is not None or not (role == "assistant" and calls):
        result["content"] = text_of(content, f"{name}.content")
    else:
        result["content"] = None
    if calls is not None:
        result["tool_calls"] = [
            an_object(call, f"{name}.tool_calls[{index}]")
            for index, call in enumerate(a_list(calls, f"{name}.tool_calls"))
        ]
    for key in PASSED:
        if message.get(key) is not None:
            result[key] = text(message[key], f"{name}.{key}")
    return result


def text_of(value: object, name: str, fields: Mapping[str, str] = TEXT) -> str:
    """Returns a content, which is text or a list of text parts, as one text; parts are joined by line ends. fields: the
    types of parts that have text, and where it stands in them."""
    if isinstance(value, str):
        return text(value, name)
    if not isinstance(value, list):
        raise wrong_type(name, value, "a string or a list of text parts")
    parts = []
    for index, item in enumerate(value):
        where = f"{name}[{index}]"
        part = an_object(item, where)
        kind = text(part.get("type"), f"{where}.type")
        if kind not in fields:
            raise unsupported(where, f"is a part of type {kind[:40]!r}, but this model reads text alone")
        parts.append(text(part.get(fields[kind]), f"{where}.{fields[kind]}"))
    return "\n".join(parts)
