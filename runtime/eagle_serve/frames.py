"""How answers stand in the body of a stream: server-sent events, or lines of JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

EVENTS = "text/event-stream; charset=utf-8"
LINES = "application/x-ndjson"
DONE = b"data: [DONE]\n\n"
_ENCODER = json.JSONEncoder(separators=(",", ":"))  # json.dumps would make one for each event


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event. JSON in ASCII has no line ends."""
    return b"data: " + _json(data) + b"\n\n"


def named_event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event that is named by its type."""
    return b"event: " + str(data["type"]).encode() + b"\n" + event(data)


def comment(text: str) -> bytes:
    """A line that clients skip."""
    return f": {text}\n\n".encode()


def line(data: Mapping[str, Any]) -> bytes:
    """One line of JSON."""
    return _json(data) + b"\n"


def _json(data: Mapping[str, Any]) -> bytes:
    return _ENCODER.encode(data).encode("ascii")
