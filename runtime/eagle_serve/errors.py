"""Errors as OpenAI's API answers them: a status, and {"error": {"message", "type", "param", "code"}}."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from eagle_runtime import EagleError

# What JSON calls values, with the article.
KINDS = {bool: "a boolean", int: "an integer", float: "a number", str: "a string", list: "a list", dict: "an object"}
TYPES = {401: "authentication_error", 403: "permission_error", 404: "not_found_error", 429: "rate_limit_error"}


class ApiError(Exception):
    """An answer that is an error. param: the field of the request that is at fault."""

    def __init__(
        self,
        status: int,
        code: str,
        message: str,
        param: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    @property
    def data(self) -> dict[str, Any]:
        """The error as OpenAI's API writes it."""
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": self.message, "type": kind, "param": self.param, "code": self.code}}

    @property
    def body(self) -> bytes:
        """`data` as JSON in ASCII: a message may quote half a character of the request."""
        return json.dumps(self.data).encode("ascii")


def unsupported(param: str, reason: str) -> ApiError:
    """The error of a field that this server refuses instead of dropping it without a word."""
    return ApiError(400, "unsupported_parameter", f"{param} {reason}", param)


def wrong_type(param: str, value: object, wanted: str) -> ApiError:
    """The error of a value of another JSON type than the field's."""
    return ApiError(400, "invalid_type", f"{param} is {KINDS.get(type(value), 'null')}, but must be {wanted}", param)


def wrong_value(param: str, reason: str) -> ApiError:
    """The error of a value of the right type that means nothing or lies out of range."""
    return ApiError(400, "invalid_value", f"{param} {reason}", param)


# `code` of the runtime's errors -> status and code of the answer. Any other one is an error of the server.
CODES: dict[str, tuple[int, str]] = {
    "request": (400, "invalid_value"),
    "context": (400, "context_length_exceeded"),
    "template": (400, "template_error"),
    "constraint": (400, "invalid_schema"),
    "memory_limit": (503, "memory_limit"),
    "closed": (503, "shutting_down"),
}


def error_of(error: EagleError, param: str | None = None, bundle: Path | None = None) -> ApiError:
    """The answer to an error of the runtime. bundle: a path that the answer does not tell."""
    status, code = CODES.get(error.code, (500, "internal_error"))
    # OpenAI's clients repeat a request after a 503; that does not help where memory is short
    headers = {"x-should-retry": "false"} if code == "memory_limit" else None
    said = str(error) if bundle is None else str(error).replace(str(bundle), "the bundle")
    return ApiError(status, code, said, param, headers)
