"""Exceptions for wrong input. Each message is one sentence: what is wrong, where, and what to do.

`code` names the kind for programs and stays the same from release to release.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import ClassVar


class EagleError(Exception):
    """Base class of errors caused by the input, not by a bug. Commands print the message and exit with status 2."""

    code: ClassVar[str] = "error"


class BundleError(EagleError):
    """Raised for a bundle that is incomplete, altered or made for another version."""

    code = "bundle"


class BackendError(EagleError):
    """Raised if the engine that should run a bundle is missing or refuses it."""

    code = "backend"


class MemoryLimitError(BackendError):
    """Raised where a text needs more memory for keys and values than the budget allows."""

    code = "memory_limit"


class RequestError(EagleError):
    """Raised for a prompt or a setting that cannot be served."""

    code = "request"


class ContextError(RequestError):
    """Raised for a text that is longer than the context. needed: tokens of the text and one of an answer; available:
    tokens that the context holds."""

    code = "context"

    def __init__(self, message: str, *, needed: int, available: int) -> None:
        super().__init__(message)
        self.needed = needed
        self.available = available


class TemplateError(RequestError):
    """Raised where a chat template fails on the messages or refuses them."""

    code = "template"


class ConstraintError(RequestError):
    """Raised for a constraint that cannot be compiled, or whose limits an answer exceeds."""

    code = "constraint"


class BusyError(RequestError):
    """Raised if another thread holds the model's caches for an unknown time, or a conversation is in a turn."""

    code = "busy"


class ConversationFileError(EagleError):
    """Raised for a file of a conversation that is damaged, or of another bundle."""

    code = "conversation_file"


class ClosedError(EagleError):
    """Raised by a model or conversation that was closed, or loaded before this process was forked."""

    code = "closed"


class EagleWarning(UserWarning):
    """Warns once, in one sentence, of something that works otherwise than expected."""


def is_panic(error: BaseException) -> bool:
    """Returns whether an error is the panic of a library written in Rust. Its class cannot be imported and is not a
    subclass of Exception."""
    return type(error).__name__ == "PanicException"


def call_all(steps: Iterable[Callable[[], object]]) -> None:
    """Call every one of the steps that free something, then raise the first error of any of them."""
    first: BaseException | None = None
    for step in steps:
        try:
            step()
        except BaseException as error:
            first = first or error
    if first is not None:
        raise first


def why(error: BaseException) -> object:
    """Returns what an error of the system or of an encoding says, without the number and the path of an OSError."""
    return getattr(error, "strerror", None) or error


def first_line(error: BaseException) -> str:
    """Returns the first line of what another library's error says, cut short; its type's name if it says nothing."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]
