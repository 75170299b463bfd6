"""The JSON body of a request, read within limits of size, time and depth."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterable, MutableMapping
from typing import Any, NoReturn

from starlette.types import Receive

from eagle_serve.errors import ApiError
from eagle_serve.options import Limits

CLOSE = {"connection": "close"}  # the rest of the body is not read
# How many times the allowed size is read and dropped, so that a client that sends its body first gets the answer and no
# broken connection.
DRAINED = 16


async def read_json(receive: Receive, limits: Limits) -> dict[str, Any]:
    """Returns the object that a body holds. Raises ApiError: 413 for a body that is too large, 408 for one that takes
    too long, 400 for one that is not a JSON object; and ConnectionError if the client goes away meanwhile."""
    try:
        body = await asyncio.wait_for(_read(receive, limits.body_bytes), limits.body_s)
    except TimeoutError:
        reason = f"the body did not arrive within {limits.body_s:g} s"
        raise ApiError(408, "request_timeout", reason, headers=CLOSE) from None
    return parse_json(body, limits.depth)


async def _read(receive: Receive, most: int) -> bytes:
    pieces: list[bytes] = []
    size = 0
    while True:
        message: MutableMapping[str, Any] = await receive()
        if message["type"] == "http.disconnect":
            raise ConnectionError("the client went away before its request was whole")
        piece = message.get("body", b"")
        size += len(piece)
        more = message.get("more_body", False)
        if size > most:
            pieces.clear()
            if not more or size > DRAINED * most:
                raise too_large(most)
        else:
            pieces.append(piece)
        if not more:
            return b"".join(pieces)


def too_large(most: int) -> ApiError:
    """The error of a body of more than `most` bytes."""
    return ApiError(413, "request_too_large", f"the body is larger than {most} bytes; shorten it", headers=CLOSE)


def parse_json(body: bytes, depth: int) -> dict[str, Any]:
    """Returns the JSON object in `body`. Raises ApiError: 400 `invalid_json`."""
    try:
        value = json.loads(body.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except RecursionError:
        raise _too_deep(depth) from None
    except UnicodeDecodeError as error:
        raise _invalid(f"is not UTF-8 text (byte {error.start})") from None
    except json.JSONDecodeError as error:
        raise _invalid(f"is not JSON ({error.msg} at line {error.lineno}, column {error.colno})") from None
    except ValueError as error:  # of the two functions below, or a number of thousands of digits
        raise _invalid(f"is not JSON ({str(error)[:200]})") from None
    if not isinstance(value, dict):
        raise _invalid("must be an object")
    if _is_deeper(value, depth):
        raise _too_deep(depth)
    return value


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not a JSON number")


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) < len(pairs):
        raise ValueError("a name stands twice in one object")
    return result


def _is_deeper(value: object, depth: int) -> bool:
    level: list[Any] = [value]
    for _ in range(depth):
        level = [item for held in level for item in _items(held) if isinstance(item, dict | list)]
    return bool(level)


def _items(value: object) -> Iterable[object]:
    return value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()


def _too_deep(depth: int) -> ApiError:
    return _invalid(f"is nested deeper than {depth} levels")


def _invalid(reason: str) -> ApiError:
    return ApiError(400, "invalid_json", f"the body {reason}")
