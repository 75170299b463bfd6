"""Calls whose arguments are written as Python's keywords are, as LFM2 does.

    <|tool_call_start|>[weather(place='Ulm', days=3, exact=True, dates=["2026-12-01"])]<|tool_call_end|>

Lists and objects are JSON, and so is a string between double quotes.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
WORDS = {"True": "true", "False": "false", "None": "null"}  # and what they are in JSON
ESCAPED = {"\\": "\\", "'": "'", '"': '"', "n": "\n", "r": "\r", "t": "\t"}  # what stands for what after a backslash
WRITTEN = str.maketrans({"\\": r"\\", "'": r"\'", "\n": r"\n", "\r": r"\r"})


def arguments_written(arguments: Mapping[str, Any]) -> str:
    """Returns the text of a call's arguments."""
    return ", ".join(f"{name}={value_written(value)}" for name, value in arguments.items())


def value_written(value: Any) -> str:
    """Returns the text of a value of JSON's types."""
    if isinstance(value, str):
        return f"'{value.translate(WRITTEN)}'"
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list | tuple) else str(value)


def string_read(text: str) -> str:
    """Returns the string that stands between single quotes."""
    return re.sub(r"\\(.)", lambda found: ESCAPED.get(found[1], found[0]), text, flags=re.DOTALL)
