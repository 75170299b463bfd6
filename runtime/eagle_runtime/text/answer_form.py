"""What an answer may consist of besides text, and the prompt that goes with it."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_runtime.base.arguments import MOST_DEPTH, is_deeper, short_repr
from eagle_runtime.base.errors import RequestError
from eagle_runtime.text.call_formats import CallFormat, format_named, recognised
from eagle_runtime.text.channels import one_call_each
from eagle_runtime.text.tokenizer import Message, Text
from eagle_runtime.text.tools import Tool, ToolUse

ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"


@dataclass(frozen=True, slots=True)
class AnswerForm:
    """format: how calls are written. use: of tools; None where none may be called. thinks: whether an answer may begin
    with reasoning; thinking: whether the prompt has begun it."""

    format: CallFormat
    use: ToolUse | None = None
    thinks: bool = False
    thinking: bool = False

    def must_follow(self, tool: Tool) -> bool:
        """Whether arguments of a tool follow its schema whatever it takes, and not as far as a grammar can say."""
        return tool.strict or (self.use is not None and self.use.required)


@dataclass(frozen=True, slots=True)
class ChatPrompt:
    """What the chat template made, and the form of the answer."""

    text: str
    form: AnswerForm


def chat_prompt(
    text: Text,
    messages: Sequence[Message],
    use: ToolUse | None = None,
    *,
    template_kwargs: Mapping[str, Any] | None = None,
    tool_format: str | None = None,
) -> ChatPrompt:
    """Returns the prompt of a chat in which tools may be called. messages: as OpenAI's API has them: arguments of
    calls may be JSON text. tool_format: a format's name; None for the one that the template speaks of. Raises
    RequestError, TemplateError."""
    source = text.template_source(tools=use is not None)
    form = recognised(source)
    if tool_format is not None and form.channels is None:
        form = format_named(tool_format)
    elif tool_format not in (None, form.name):
        raise RequestError(f"tool_format is {tool_format!r}, but this model writes {form.name} alone; leave it out")
    knows_calls = "tool_calls" in source and not form.calls_as_text
    chat = [_message(message, form, knows_calls, f"messages[{index}]") for index, message in enumerate(messages)]
    kwargs, offered = dict(template_kwargs or {}), None
    if form.results is not None:
        chat = _results_of_user(chat, *form.results)
    if form.channels is not None and knows_calls:
        chat = one_call_each(chat)
    if use is not None:
        described = {} if form.channels is None else {"description": ""}  # which those templates cannot do without
        tools = [{**described, **tool.data} for tool in use.tools]
        if not form.functions_alone:
            tools = [{"type": "function", "function": tool} for tool in tools]
        if form.tools_as == "tools":
            offered = tools
        elif form.tools_as == "xml_tools":
            kwargs.setdefault("xml_tools", tools)
        else:
            chat = _told(chat, form, tools, source)
    rendered = text.render(chat, tools=offered, template_kwargs=kwargs)
    thinks = form.reasons(source)
    begun = thinks and form.channels is None and rendered.rstrip().endswith(form.thought[0])
    return ChatPrompt(rendered, AnswerForm(form, use, thinks, begun))


def has_heads(text: Text) -> bool:
    """Returns whether answers to chats are messages with heads, which no text of an answer should show. Raises
    TemplateError."""
    return text.chat and recognised(text.template_source(tools=False)).channels is not None


def _message(message: Message, form: CallFormat, knows_calls: bool, where: str) -> dict[str, Any]:
    """A message as the template takes it: calls with arguments of the kind that it reads, or written out."""
    result = dict(message)
    if result.get("role") == "tool" and form.id_length is not None and isinstance(result.get("tool_call_id"), str):
        result["tool_call_id"] = _short_id(result["tool_call_id"], form.id_length)
    calls = result.get("tool_calls")
    if not calls:
        result.pop("tool_calls", None)
        return result
    if not isinstance(calls, list | tuple):
        raise RequestError(f"{where}.tool_calls is {short_repr(calls)}, but must be a list")
    read = [_call(call, form, f"{where}.tool_calls[{index}]") for index, call in enumerate(calls)]
    if knows_calls:
        return {**result, "tool_calls": read}
    said = _said(result)
    try:
        written = form.written([(call["function"]["name"], call["function"]["arguments"]) for call in read])
    except (TypeError, ValueError) as error:
        raise RequestError(f"{where}.tool_calls are not JSON ({error}); use text, numbers, lists and dicts") from None
    del result["tool_calls"]
    return {**result, "content": f"{said}{form.joint}{written}" if said else written}


def _said(message: Message) -> Any:
    """The content of a message as one text, its parts joined by line ends; "" where it has none. Raises
    RequestError."""
    content = message.get("content")
    if not isinstance(content, list | tuple):
        return "" if content is None else content
    texts: list[Any] = [part.get("text") if isinstance(part, Mapping) else None for part in content]
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"a message's content is {short_repr(content)}, but must be text, or parts that have text")
    return "\n".join(texts)


def _call(call: Any, form: CallFormat, where: str) -> dict[str, Any]:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise RequestError(f"{where} is {short_repr(call)}, but must have a function with a name")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments or "{}")
        except (ValueError, RecursionError):
            arguments = None
    if not isinstance(arguments, Mapping):
        raise RequestError(
            f"{where}.function.arguments is {short_repr(function['arguments'])}, but must be the JSON text of an object"
        )
    if is_deeper(arguments):
        raise RequestError(f"{where}.function.arguments is more than {MOST_DEPTH} levels deep; make it flatter")
    result = {**call, "type": "function", "function": {"name": function["name"], "arguments": arguments}}
    if form.id_length is not None:
        result["id"] = _short_id(str(call.get("id", "")), form.id_length)
    return result


def _short_id(given: str, length: int) -> str:
    """An id of letters and digits of some length, the same for the same one."""
    if len(given) == length and given.isascii() and given.isalnum():
        return given
    number = int.from_bytes(hashlib.sha256(given.encode("utf-8", "replace")).digest(), "big")
    digits = []
    for _ in range(length):
        number, digit = divmod(number, len(ALPHABET))
        digits.append(ALPHABET[digit])
    return "".join(digits)


def _results_of_user(messages: Sequence[dict[str, Any]], before: str, after: str) -> list[dict[str, Any]]:
    """Messages of role tool become one of the user, who answers each run of calls."""
    result: list[dict[str, Any]] = []
    joins = False
    for message in messages:
        if message.get("role") != "tool":
            result.append(message)
            joins = False
            continue
        said = f"{before}{_said(message)}{after}"
        if joins:
            result[-1]["content"] += f"\n{said}"
        else:
            result.append({"role": "user", "content": said})
        joins = True
    return result


def _told(
    messages: Sequence[dict[str, Any]], form: CallFormat, tools: Sequence[Mapping[str, Any]], source: str
) -> list[dict[str, Any]]:
    """Messages whose first, of the system, tells of the tools; of the user where the template has no system."""
    role = "user" if "system" not in source or "System role not supported" in source else "system"
    first = messages[0] if messages and messages[0].get("role") == role else {"role": role, "content": ""}
    rest = list(messages[1:] if messages and messages[0] is first else messages)
    if form.tools_as == "message":
        return [{**first, "tools": json.dumps(list(tools), ensure_ascii=False)}, *rest]
    listed = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    told, said = form.description.replace("{tools}", listed), _said(first)
    both = f"{said}\n\n{told}" if role == "system" else f"{told}\n\n{said}"
    return [{**first, "content": both.strip()}, *rest]
