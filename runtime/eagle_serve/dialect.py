"""What an API consists of here: how a request is read as one of OpenAI's chats or completions, and how its answer is
written. responses.py, ollama.py and llama_cpp.py are such APIs besides OpenAI's two older ones (answers.py)."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from eagle_runtime import Piece, Result
from eagle_serve.engine import Engine
from eagle_serve.errors import ApiError
from eagle_serve.jobs import Job
from eagle_serve.refused import Endpoint

Body = Mapping[str, Any]


class Writer(Protocol):
    """Writes one answer: whole, or as bytes of a stream, of which `b""` is none."""

    media_type: str  # of the stream

    def whole(self, pieces: Sequence[Piece]) -> dict[str, Any]:
        """The answer in one object."""

    def begin(self) -> bytes:
        """What comes before the first piece."""

    def add(self, piece: Piece) -> bytes:
        """What a piece adds."""

    def end(self, result: Result) -> bytes:
        """What comes after the last piece."""

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that fails."""

    def waiting(self, state: str) -> bytes:
        """What is sent while nothing comes."""


@dataclass(frozen=True, slots=True)
class Read:
    """A request in OpenAI's fields. endpoint: whose fields they are."""

    endpoint: Endpoint
    fields: Body


@dataclass(frozen=True, slots=True)
class Dialect:
    """An address that answers. read: raises ApiError. names: OpenAI's field -> this API's, for errors. at_once: the
    answer to a request that asks for no text, if it is one."""

    path: str
    read: Callable[[Body, Engine], Read]
    write: Callable[[Engine, Job, Body], Writer]
    names: Mapping[str, str] = field(default_factory=dict)
    at_once: Callable[[Body, Engine], dict[str, Any] | None] = lambda body, engine: None

    def renamed(self, error: ApiError) -> ApiError:
        """An error of OpenAI's field as one of the field that was sent."""
        for name, own in self.names.items():
            if error.param is not None and (error.param == name or error.param.startswith((f"{name}.", f"{name}["))):
                message = error.message.replace(error.param, own, 1)
                return ApiError(error.status, error.code, message, own, error.headers)
        return error
