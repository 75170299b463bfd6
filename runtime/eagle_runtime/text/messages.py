"""What a chat template is given, as transformers prepares it: plain data, and a final message that goes on."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eagle_runtime.base.arguments import MOST_DEPTH, short_repr
from eagle_runtime.base.errors import TemplateError

REASONING = ("reasoning_content", "thinking", "reasoning")  # names of a message's reasoning; templates read the first
RESERVED = ("messages", "tools", "add_generation_prompt")  # have parameters of their own
MARK = "CONTINUE_FINAL_MESSAGE_TAG "  # ends the text to continue while the template runs


def message_data(messages: Sequence[Mapping[str, Any]]) -> list[dict[Any, Any]]:
    """Returns messages as plain data, without keys whose value is None, their reasoning under each of its names that
    templates read. Raises TemplateError."""
    if not messages:
        raise TemplateError("there is no chat message; give one at least")
    plain: list[dict[Any, Any]] = []
    for index, message in enumerate(messages):
        if not isinstance(message, Mapping):
            raise TemplateError(f"message {index} is {short_repr(message)}, but must be a dict")
        data = _data({name: value for name, value in message.items() if value is not None}, f"message {index}")
        reasoning = next((data[name] for name in REASONING if data.get(name) is not None), None)
        if reasoning is not None:
            data = {"thinking": reasoning, **data, "reasoning_content": reasoning}
        plain.append(data)
    return plain


def tool_data(tools: Sequence[Mapping[str, Any]] | None) -> list[dict[Any, Any]] | None:
    """Returns the descriptions of tools as plain data. Raises TemplateError."""
    if tools is None:
        return None
    if not isinstance(tools, list | tuple) or not all(isinstance(tool, Mapping) for tool in tools):
        raise TemplateError(f"tools are {short_repr(tools)}, but must be a list of dicts, or None")
    return [_data(tool, f"tool {index}") for index, tool in enumerate(tools)]


def keyword_data(keywords: Mapping[str, Any] | None) -> dict[str, Any]:
    """Returns template_kwargs as plain data. `documents` must be a list of dicts, or None. Raises TemplateError."""
    keywords = {} if keywords is None else keywords
    if not isinstance(keywords, Mapping) or not all(isinstance(name, str) for name in keywords):
        raise TemplateError(f"template_kwargs are {short_repr(keywords)}, but must be a dict with names as keys")
    taken = next((name for name in keywords if name in RESERVED), None)
    if taken is not None:
        raise TemplateError(f"template_kwargs may not hold {taken!r}, which has a parameter of its own")
    documents = keywords.get("documents")
    if documents is not None and not (
        isinstance(documents, list | tuple) and all(isinstance(document, Mapping) for document in documents)
    ):
        raise TemplateError(f"template_kwargs: documents are {short_repr(documents)}, but must be a list of dicts")
    return dict(_data(keywords, "template_kwargs"))


def mark_end(messages: list[dict[Any, Any]], source: str) -> str:
    """Puts a mark after the text of the final message. Returns that text. Raises TemplateError. source: the
    template's."""
    content = messages[-1].get("content")
    if "content" not in source:
        raise TemplateError("the final message cannot be continued, since the template does not read its content")
    if isinstance(content, str):
        messages[-1]["content"] = content + MARK
        return content
    blocks = content if isinstance(content, list | tuple) else []
    for block in reversed(blocks):
        if isinstance(block, dict) and "text" in block:
            if not isinstance(block["text"], str):
                break
            content = block["text"]
            block["text"] = content + MARK
            return content
    raise TemplateError("the final message has no text to continue; give it content")


def cut_at_mark(prompt: str, final: str) -> str:
    """Returns a prompt up to the mark. final: the text that must stand before it. Raises TemplateError."""
    mark = MARK.strip()
    if final.strip() not in prompt or mark not in prompt:
        raise TemplateError("the final message cannot be continued, since the template leaves out its end")
    end = prompt.rindex(mark)
    return prompt[:end] if prompt.startswith(MARK, end) else prompt[:end].rstrip()


def _data(value: Any, what: str) -> Any:
    try:
        return _plain(value, MOST_DEPTH)
    except RecursionError:
        raise TemplateError(
            f"{what} holds lists or dicts in each other without end, or more than {MOST_DEPTH}; make it flatter"
        ) from None


def _plain(value: Any, depth: int) -> Any:
    """Returns data as JSON types, so that a template meets no methods of other classes; an object of any other type
    becomes "<its class>". Raises RecursionError for more than `depth` levels."""
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        return int.__int__(value)
    if isinstance(value, float):
        return float.__float__(value)
    if isinstance(value, np.generic):
        return _plain(value.item(), depth)
    if not depth:
        raise RecursionError
    if isinstance(value, Mapping):
        return {_plain(key, depth - 1): _plain(item, depth - 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        items = [_plain(item, depth - 1) for item in value]
        return items if isinstance(value, list) else tuple(items)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {field.name: _plain(getattr(value, field.name), depth - 1) for field in dataclasses.fields(value)}
    if callable(getattr(value, "model_dump", None)):  # pydantic's models
        return _plain(value.model_dump(), depth - 1)
    return f"<{type(value).__name__}>"
