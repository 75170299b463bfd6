"""Calls whose arguments are written as JSON is, but in order, with bare names, and with strings between marks.

    <|tool_call>call:weather{days:3,place:<|"|>Ulm<|"|>,when:{dates:[],exact:true}}<tool_call|>

Nothing is escaped, so that a string cannot hold the mark, and a name no signs. What type a value has it says itself.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any, TypeVar

from eagle_runtime.base.arguments import json_value

SIGN = r':,{}\[\]"<|'  # and what strings begin with
NAME = re.compile(rf"[^\s{SIGN}]([^\n{SIGN}]*[^\s{SIGN}])?")  # that is read as it was written

_Value = TypeVar("_Value")


def in_order(values: Mapping[str, _Value]) -> list[tuple[str, _Value]]:
    """Returns an object's members as chat templates order them: by name, upper case as lower case."""
    return sorted(values.items(), key=lambda item: item[0].lower())


def members_written(arguments: Mapping[str, Any], quote: str) -> str:
    """Returns the text of an object without its braces. quote: what stands before and after a string."""
    return ",".join(f"{name}:{value_written(value, quote)}" for name, value in in_order(arguments))


def value_written(value: Any, quote: str) -> str:
    """Returns the text of a value of JSON's types."""
    if isinstance(value, str):
        return f"{quote}{value}{quote}"
    if isinstance(value, Mapping):
        return f"{{{members_written(value, quote)}}}"
    if isinstance(value, list | tuple):
        return f"[{','.join(value_written(item, quote) for item in value)}]"
    return json.dumps(value)


def word_read(text: str) -> str:
    """Returns the JSON text of a value that is no string, list or object; of a string where it is no JSON."""
    try:
        json_value(text)
    except (ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text
