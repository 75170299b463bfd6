"""OpenAI's Responses API: a request as one of the chat completions that it stands for.

Text and function tools; nothing is kept from one request to the next. responses_answer.py writes the answers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from eagle_serve.checks import a_list, an_object, boolean, integer, one_of, text
from eagle_serve.dialect import Body, Dialect, Read, each
from eagle_serve.engine import Engine
from eagle_serve.errors import ApiError, unsupported, wrong_type, wrong_value
from eagle_serve.messages import text_of
from eagle_serve.responses_answer import ResponseAnswer

PATH = "/v1/responses"
TEXTS = {"input_text": "text", "output_text": "text", "text": "text", "refusal": "refusal"}  # type of part -> its field
REFUSALS = {
    "conversation": "names what was kept, but nothing is kept here; send the earlier items in input",
    "prompt": "names a template that OpenAI keeps; send its text in instructions and input",
    "context_management": "is not supported; shorten input yourself",
    "messages": "is not a field of responses; send input",
}
# What may be added to the answer. What follows the first two is of tools and images, which are refused.
INCLUDED = (
    "reasoning.encrypted_content",  # reasoning comes as text, which needs no secrecy
    "message.output_text.logprobs",
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)
OWN = {
    "input", "instructions", "max_output_tokens", "text", "reasoning", "include", "store", "background", "truncation",
    "max_tool_calls", "top_logprobs", "previous_response_id", *REFUSALS,
}  # fmt: skip


def read(body: Body, engine: Engine) -> Read:
    """Returns the chat that a request of `POST /v1/responses` stands for. Raises ApiError."""
    given = {name: value for name, value in body.items() if value is not None}
    _refuse(given)
    fields = {name: value for name, value in given.items() if name not in OWN}
    fields["messages"] = list(_messages(given.get("input")))
    if "instructions" in given:
        first = {"role": "system", "content": text(given["instructions"], "instructions")}
        fields["messages"] = [first, *fields["messages"]]
    if "max_output_tokens" in given:
        fields["max_completion_tokens"] = integer(1)(given["max_output_tokens"], "max_output_tokens")
    shape = an_object(given.get("text", {}), "text")
    if shape.get("format") is not None:
        fields["response_format"] = _response_format(an_object(shape["format"], "text.format"))
    reasoning = an_object(given.get("reasoning", {}), "reasoning")
    if reasoning.get("effort") is not None:
        fields["reasoning_effort"] = text(reasoning["effort"], "reasoning.effort")
    include = a_list(given.get("include", []), "include")
    for index, name in enumerate(include):
        one_of(INCLUDED)(name, f"include[{index}]")
    if "message.output_text.logprobs" in include or given.get("top_logprobs"):
        fields |= {"logprobs": True, "top_logprobs": given.get("top_logprobs", 0)}
    return Read("chat", fields)


def _refuse(given: Body) -> None:
    if "previous_response_id" in given:
        name = text(given["previous_response_id"], "previous_response_id")
        raise ApiError(
            400,
            "previous_response_not_found",
            f"no response with the id {name[:80]!r} is kept here; send the earlier items in input",
            "previous_response_id",
        )
    for name, reason in REFUSALS.items():
        if given.get(name) not in (None, [], {}):
            raise unsupported(name, reason)
    if boolean(given.get("background", False), "background"):
        raise unsupported("background", "is not supported, since no response is kept here; leave it out")
    boolean(given.get("store", False), "store")
    if one_of(("disabled", "auto"))(given.get("truncation", "disabled"), "truncation") == "auto":
        raise unsupported("truncation", "may be 'disabled' alone; shorten input yourself")
    integer(0)(given.get("max_tool_calls", 0), "max_tool_calls")  # of tools that OpenAI runs


def _response_format(given: Mapping[str, Any]) -> dict[str, Any]:
    kind = one_of(("text", "json_object", "json_schema"))(given.get("type"), "text.format.type")
    if kind != "json_schema":
        return {"type": kind}
    return {"type": kind, "json_schema": {name: value for name, value in given.items() if name != "type"}}


def _messages(value: object) -> Iterator[dict[str, Any]]:
    """The messages that input stands for. Reasoning, text and calls of one answer are one message."""
    if isinstance(value, str):
        yield {"role": "user", "content": text(value, "input")}
        return
    if not isinstance(value, list):
        raise wrong_type("input", value, "a string or a list of items")
    if not value:
        raise wrong_value("input", "is empty; send a text or at least one item")
    answer: dict[str, Any] = {}
    for index, data in enumerate(value):
        where = f"input[{index}]"
        item = an_object(data, where)
        kind = text(item.get("type") or "message", f"{where}.type")
        said = _of_answer(item, kind, where)
        if said is None or not _goes_on(answer, said):
            yield from _whole(answer)
            answer = {}
        if said is None:
            yield _other(item, kind, where)
        else:
            calls = [*answer.get("tool_calls", ()), *said.get("tool_calls", ())]
            answer |= said | ({"tool_calls": calls} if calls else {})
    yield from _whole(answer)


def _whole(answer: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """The message of an answer's items; none of no items. An answer may have ended within its reasoning."""
    if answer:
        yield {"content": None if "tool_calls" in answer else "", **answer}


def _goes_on(answer: Mapping[str, Any], said: Mapping[str, Any]) -> bool:
    """Whether an item belongs to the same answer as those before it."""
    if "tool_calls" in said:
        return True
    return "content" in said and not {"content", "tool_calls"} & answer.keys()


def _of_answer(item: Mapping[str, Any], kind: str, where: str) -> dict[str, Any] | None:
    """What an item says of an answer of the model; None for other items."""
    if kind == "message" and item.get("role") == "assistant":
        return {"role": "assistant", "content": text_of(item.get("content"), f"{where}.content", TEXTS)}
    if kind == "reasoning":
        parts = a_list(item.get("content") or item.get("summary") or [], f"{where}.content")
        said = [text(an_object(part, f"{where}.content").get("text"), f"{where}.content") for part in parts]
        return {"role": "assistant", **({"reasoning_content": "\n".join(said)} if said else {})}
    if kind == "function_call":
        function = {name: text(item.get(name), f"{where}.{name}") for name in ("name", "arguments")}
        call = {"id": text(item.get("call_id"), f"{where}.call_id"), "type": "function", "function": function}
        return {"role": "assistant", "tool_calls": [call]}
    return None


def _other(item: Mapping[str, Any], kind: str, where: str) -> dict[str, Any]:
    if kind == "message":
        role = one_of(("user", "system", "developer"))(item.get("role"), f"{where}.role")
        return {"role": role, "content": text_of(item.get("content"), f"{where}.content", TEXTS)}
    if kind == "function_call_output":
        call = text(item.get("call_id"), f"{where}.call_id")
        return {"role": "tool", "tool_call_id": call, "content": text_of(item.get("output"), f"{where}.output", TEXTS)}
    if kind == "item_reference":
        raise unsupported(where, "refers to an item that was kept, but nothing is kept here; send the item itself")
    raise unsupported(where, f"is an item of type {kind[:40]!r}; messages, function calls and their outputs are read")


RESPONSES = Dialect(
    PATH,
    read,
    each(ResponseAnswer),
    {
        "messages": "input",
        "max_completion_tokens": "max_output_tokens",
        "max_tokens": "max_output_tokens",
        "response_format.json_schema.schema": "text.format.schema",
        "response_format.json_schema": "text.format",
        "response_format": "text.format",
        "reasoning_effort": "reasoning.effort",
        "logprobs": "top_logprobs",
    },
)
