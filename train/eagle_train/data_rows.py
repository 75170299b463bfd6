"""Rows of training data in the forms in which they are published: JSON lines, JSON arrays, and what a row holds.

{"ids": [...], "prompt_tokens": 3}                               token ids
{"text": "..."}                                                  plain text
{"messages": [{"role", "content"}, ...], "tools": [...]}         a chat, as OpenAI and TRL write it
{"conversations": [{"from", "value"}, ...]}                      a chat, as ShareGPT writes it
{"prompt": ..., "completion": ...}, {"prompt": ..., "chosen": ...}   TRL: text or messages; what was rejected is not
                                                                 read
{"instruction": "...", "input": "...", "output": "..."}          Alpaca
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from eagle_calib.text_files import json_lines, text_lines
from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.files import parse_json
from eagle_train.errors import RowError, TrainError

Message = dict[str, Any]
Tools = list[Mapping[str, Any]] | None  # as the chat template describes them
Row = tuple[str, Mapping[str, Any]]  # where it stands, and what it holds
CHATS = ("messages", "conversations", "conversation", "chosen", "instruction")  # keys of rows that are chats
KNOWN = ("ids", "text", "prompt", *CHATS)
LISTS = ("data", "rows", "train", "instances")  # keys of objects that hold rows
ROLES = {"human": "user", "gpt": "assistant", "chatgpt": "assistant", "bing": "assistant", "bard": "assistant"}
ROLES |= {"model": "assistant", "observation": "tool"}
TEXT_PARTS = ("text", "input_text", "output_text")
PASSED = ("tool_calls", "tool_call_id", "name", "reasoning_content")  # what templates read besides role and content


def rows_of(path: Path, leave_out: Callable[[str], None]) -> Iterator[Row] | None:
    """Yields the rows of a file; None for a file of plain text. leave_out: called with the reason for each row that is
    no JSON object. Raises TrainError for a file that is not a text."""
    if path.suffix not in (".jsonl", ".ndjson", ".json"):
        return None
    start = next((line.strip() for line in text_lines(path, TrainError) if line.strip()), "")
    if start == "[" or start.replace(" ", "").startswith("[{"):
        return _array(path, leave_out)
    if path.suffix != ".json":
        return lines_of(path, leave_out)
    try:
        whole = parse_json("".join(text_lines(path, TrainError)), path, TrainError, "correct the file")
    except TrainError:  # of JSON lines, as they are often named, or of something else that is text
        first = _object(start)
        return None if first is None or not any(key in first for key in KNOWN) else lines_of(path, leave_out)
    listed = next((whole[key] for key in LISTS if isinstance(whole.get(key), list)), None)
    if any(key in whole for key in KNOWN):
        listed = [whole]
    return None if listed is None else _checked(path, enumerate(listed, 1), leave_out)


def is_chat(row: Mapping[str, Any]) -> bool:
    """Returns whether a row holds messages."""
    return any(key in row for key in CHATS)


def completion_of(row: Mapping[str, Any]) -> tuple[str, str] | None:
    """Returns prompt and completion of a row that holds both as text; None for any other."""
    prompt = row.get("prompt")
    answer = row.get("completion", row.get("chosen"))
    return (prompt, answer) if isinstance(prompt, str) and isinstance(answer, str) else None


def prompt_of(row: Mapping[str, Any]) -> str | None:
    """Returns the text of a row that is to be continued as it is; None for one that holds ids or messages, which may
    repeat their question, or what the template of another model makes of it, under "prompt" or "text"."""
    text = row.get("prompt", row.get("text"))
    return text if isinstance(text, str) and (completion_of(row) or not is_chat(row)) else None


def messages_of(where: str, row: Mapping[str, Any]) -> list[Message]:
    """Returns the messages of a row in any of its forms, without answers before the first question. Raises RowError."""
    rows = next((row[key] for key in ("messages", "conversations", "conversation") if key in row), None)
    if rows is None and isinstance(answer := row.get("completion", row.get("chosen")), list):
        prompt = row.get("prompt") or []
        before = prompt if isinstance(prompt, list) else [{"role": "user", "content": prompt}]
        rows = answer if all(item in answer for item in before) else [*before, *answer]
    if rows is None and isinstance(row.get("instruction"), str) and isinstance(row.get("output"), str):
        asked = "\n\n".join(text for text in (row["instruction"], row.get("input")) if isinstance(text, str) and text)
        rows = [{"role": "user", "content": asked}, {"role": "assistant", "content": row["output"]}]
    if rows is None:
        raise RowError(
            f"{where}: the row holds no 'ids', 'messages', 'conversations' or 'text', and no prompt with its "
            "completion; correct the file"
        )
    messages = [_message(where, item) for item in (rows if isinstance(rows, list) else [None])]
    first = next((i for i, message in enumerate(messages) if message["role"] == "user"), len(messages))
    return [m for i, m in enumerate(messages) if i >= first or m["role"] != "assistant"]


def tools_of(where: str, row: Mapping[str, Any]) -> Tools:
    """Returns the descriptions of tools of a row, a list or its JSON text; None without any. Raises RowError."""
    tools = row.get("tools")
    if isinstance(tools, str) and tools.strip():
        try:
            tools = json.loads(tools)
        except (ValueError, RecursionError):
            raise RowError(f"{where}: tools are text that is not JSON; correct the file") from None
    if not tools:
        return None
    if not isinstance(tools, list) or not all(isinstance(tool, Mapping) for tool in tools):
        raise RowError(f"{where}: tools are {short_repr(tools)}, but must be a list of objects; correct the file")
    return tools


def _message(where: str, item: Any) -> Message:
    role = item.get("role", item.get("from")) if isinstance(item, dict) else None
    if not isinstance(role, str):
        raise RowError(f"{where}: a message needs role and content (or from and value) as text; correct the file")
    content = next((item[key] for key in ("content", "value", "text") if item.get(key) is not None), None)
    if isinstance(content, list):
        content = _joined(where, content)
    calls = item.get("tool_calls")
    if not isinstance(content, str) and not (content is None and calls):
        raise RowError(f"{where}: a message needs role and content (or from and value) as text; correct the file")
    message: Message = {"role": ROLES.get(role, role), "content": content}
    message |= {key: item[key] for key in PASSED if item.get(key)}  # templates take an empty list for calls
    if calls and isinstance(calls, list):
        message["tool_calls"] = [_call(call) for call in calls]
    return message


def _joined(where: str, parts: Sequence[Any]) -> str:
    """The text of a content that is a list of parts, joined by line ends as eagle-serve joins them."""
    texts = []
    for part in parts:
        text = part.get("text") if isinstance(part, dict) and part.get("type", "text") in TEXT_PARTS else part
        if not isinstance(text, str):
            raise RowError(f"{where}: a part of a message's content is {short_repr(part)}, but only text is learned")
        texts.append(text)
    return "\n".join(texts)


def _call(call: Any) -> Any:
    """A call of a tool as templates read it: OpenAI's API writes its arguments as text."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    arguments = _object(function["arguments"])
    return call if arguments is None else {**call, "function": {**function, "arguments": arguments}}


def lines_of(path: Path, leave_out: Callable[[str], None]) -> Iterator[Row]:
    """Yields the rows of JSON lines, as rows_of does."""
    for number, row in json_lines(path, TrainError, "correct the file", leave_out):
        yield f"{path}, line {number}", _given(row)


def _array(path: Path, leave_out: Callable[[str], None]) -> Iterator[Row]:
    """The rows of a JSON array, one decoded at a time."""
    text, decoder = "".join(text_lines(path, TrainError)), json.JSONDecoder()

    def items() -> Iterator[tuple[int, Any]]:
        place, number = text.index("[") + 1, 0
        while (place := _after(text, place)) < len(text) and text[place] != "]":
            number += 1
            try:
                item, place = decoder.raw_decode(text, place)
            except (ValueError, RecursionError) as error:
                leave_out(f"{path}, row {number} is not readable JSON ({error}), nor is what follows; correct the file")
                return
            yield number, item

    return _checked(path, items(), leave_out)


def _after(text: str, place: int) -> int:
    """The place of what comes next in an array."""
    while place < len(text) and text[place] in " \t\r\n,":
        place += 1
    return place


def _checked(path: Path, items: Any, leave_out: Callable[[str], None]) -> Iterator[Row]:
    for number, item in items:
        where = f"{path}, row {number}"
        try:
            json.dumps(item, ensure_ascii=False).encode()
        except (UnicodeEncodeError, RecursionError):
            leave_out(f"{where} holds half a character (a surrogate); correct the file")
            continue
        if isinstance(item, dict):
            yield where, _given(item)
        else:
            leave_out(f"{where} does not hold a JSON object; correct the file")


def _given(row: dict[str, Any]) -> dict[str, Any]:
    """A row without the keys that hold null, which stand for none where all rows have the same keys."""
    return {key: value for key, value in row.items() if value is not None}


def _object(text: str) -> dict[str, Any] | None:
    """The JSON object in a text; None for anything else."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return None
    return value if isinstance(value, dict) else None
