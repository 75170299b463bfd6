"""Limits for a chat template that runs: processor time, sizes of values, and the text that it makes in all."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from jinja2.utils import Namespace

SECONDS = 1.0  # of processor time for one prompt; templates in use take milliseconds
TEXT_CHARS = 1 << 23  # of a prompt, or of any intermediate value
WORK_CHARS = 1 << 28  # of all intermediate values together
ITEMS = 1 << 17  # of a list or dict, with everything inside it
BITS = 1 << 12  # of an integer


class OverrunError(TemplateError):
    """A template exceeded a limit."""


class Meter:
    """Counts what one rendering uses. Its methods raise OverrunError when a limit is exceeded."""

    def __init__(self) -> None:
        self._work = 0
        self.start()

    def start(self) -> None:
        """Start counting processor time."""
        self._end = time.thread_time() + SECONDS

    def step(self) -> None:
        """Count a loop iteration, a call or an operation."""
        if time.thread_time() > self._end:
            raise OverrunError(f"it does not end: {SECONDS:g} s were not enough")

    def work(self, chars: int) -> None:
        """Count text that was made or is about to be."""
        self.step()
        self._work += chars
        if chars > TEXT_CHARS or self._work > WORK_CHARS:
            raise OverrunError(f"it makes a text of more than {TEXT_CHARS} characters")

    def made(self, value: Any) -> Any:
        """Returns a value that was made, after counting its size. Values may not contain namespaces, whose sizes change
        later."""
        if isinstance(value, str):
            self.work(len(value))
        elif isinstance(value, Namespace):
            self.size(attributes(value))
        elif not isinstance(value, bool) and isinstance(value, int):
            self.step()
            if value.bit_length() > BITS:
                raise OverrunError(f"it makes a number of more than {BITS} bits")
        else:
            self.work(self.size(value))
        return value

    def size(self, value: Any) -> int:
        """Returns the items and characters in a value as if it were written out: an item that occurs twice counts
        twice."""
        items = chars = 0
        rest = [value]
        while rest:
            item = rest.pop()
            items += 1
            if isinstance(item, str | bytes):
                chars += len(item)
            elif isinstance(item, Mapping):
                items += len(item)
                rest += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | set | frozenset):
                rest += item
            elif isinstance(item, Namespace) and item is not value:
                raise OverrunError("it puts a namespace into a value")
            if items + len(rest) > ITEMS or chars > TEXT_CHARS:
                raise OverrunError(f"it makes a value of more than {ITEMS} items or {TEXT_CHARS} characters")
        return items + chars


def attributes(namespace: Namespace) -> Mapping[str, Any]:
    """Returns the attributes of a namespace of the template."""
    values: Mapping[str, Any] = getattr(namespace, "_Namespace__attrs")  # noqa: B009  (mangled in a plain access)
    return values
