"""What an API consists of here: how a request is read as one of OpenAI's chats or completions, and how its answer is
written. responses.py, ollama.py and llama_cpp.py are such APIs besides OpenAI's two older ones (answers.py)."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from eagle_runtime import Piece, Result
from eagle_serve.engine import Engine
from eagle_serve.errors import ApiError, unsupported
from eagle_serve.frames import EVENTS, comment, event
from eagle_serve.jobs import Job
from eagle_serve.refused import Endpoint
from eagle_serve.request import Request

Body = Mapping[str, Any]


class Writer(ABC):
    """Writes one answer: whole, or as bytes of a stream, of which `b""` is none. media_type: of the stream."""

    media_type = EVENTS

    def __init__(self, engine: Engine, job: Job) -> None:
        self._engine = engine
        self._job = job

    @abstractmethod
    def whole(self, pieces: Sequence[Piece], result: Result) -> dict[str, Any]:
        """The answer in one object. pieces: all; result: of the last."""

    def begin(self) -> bytes:
        """What comes before the first piece."""
        return b""

    @abstractmethod
    def add(self, piece: Piece) -> bytes:
        """What a piece adds."""

    @abstractmethod
    def end(self, result: Result) -> bytes:
        """What comes after the last piece."""

    def failed(self, error: ApiError) -> bytes:
        """The end of a stream that fails."""
        return event(error.data)

    def waiting(self, state: str) -> bytes:
        """What is sent while nothing comes."""
        return comment(state)


def each(writer: Callable[[Engine, Job, Body], Writer]) -> Callable[[Engine, Sequence[Job], Body], Sequence[Writer]]:
    """Returns what makes a writer for each job of a request, where they have nothing in common."""
    return lambda engine, jobs, body: [writer(engine, job, body) for job in jobs]


@dataclass(frozen=True, slots=True)
class Read:
    """A request in OpenAI's fields. endpoint: whose fields they are."""

    endpoint: Endpoint
    fields: Body


@dataclass(frozen=True, slots=True)
class Dialect:
    """An address that answers. read: raises ApiError. write: returns what writes each job's answer, of the jobs of one
    request. names: OpenAI's field -> this API's, for errors. at_once: the answer to a request that asks for no text, if
    it is one. join: makes one object of several whole answers; None where a request gets one alone."""

    path: str
    read: Callable[[Body, Engine], Read]
    write: Callable[[Engine, Sequence[Job], Body], Sequence[Writer]]
    names: Mapping[str, str] = field(default_factory=dict)
    at_once: Callable[[Body, Engine], dict[str, Any] | None] = lambda body, engine: None
    join: Callable[[Sequence[dict[str, Any]]], dict[str, Any]] | None = None

    def check(self, request: Request) -> None:
        """Raises ApiError for a request of several answers, or of one that begins with the prompt, where this API has
        neither."""
        if self.join is None and request.choices * max(1, len(request.prompts)) > 1:
            name = "n" if request.choices > 1 else "prompt"
            raise unsupported(name, "asks for several answers, but here a request gets one")
        if self.join is None and request.echo:
            raise unsupported("echo", "is for /v1/completions alone; leave it out")

    def renamed(self, error: ApiError) -> ApiError:
        """An error of OpenAI's field as one of the field that was sent."""
        for name, own in self.names.items():
            if error.param is not None and (error.param == name or error.param.startswith((f"{name}.", f"{name}["))):
                message = error.message.replace(error.param, own, 1)
                return ApiError(error.status, error.code, message, own, error.headers)
        return error
