"""Limits for a chat template that runs: processor time, memory, sizes of values, and the text that it makes in all."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any

from jinja2 import TemplateError
from jinja2.utils import Namespace

SECONDS = 0.9  # of processor time for one prompt; templates in use take milliseconds
TEXT_BYTES = 1 << 23  # of a prompt, or of any intermediate value, with 1, 2 or 4 bytes per character
WORK_BYTES = 1 << 28  # of all intermediate values together
HELD_BYTES = 1 << 25  # of all values that exist at one time
LARGE = 1 << 14  # bytes from which on a value counts as held
ITEM_BYTES = 64  # of an item of a list, about
ITEMS = 1 << 17  # of a list or dict, with everything inside it
BITS = 1 << 12  # of an integer
_EMPTY = sys.getsizeof("")


class OverrunError(TemplateError):
    """A template exceeded a limit."""


class Meter:
    """Counts what one rendering uses. Its methods raise OverrunError when a limit is exceeded."""

    def __init__(self) -> None:
        self._work = 0
        self._held: list[tuple[Any, int]] = []
        self._held_bytes = 0
        self._end = time.thread_time() + SECONDS

    def step(self) -> None:
        """Count a loop iteration, a call or an operation."""
        if time.thread_time() > self._end:
            raise OverrunError(f"it does not end: {SECONDS:g} s were not enough")

    def work(self, size: int) -> None:
        """Count bytes of text that was made or is about to be."""
        self.step()
        self._work += size
        if size > TEXT_BYTES or self._work > WORK_BYTES:
            raise OverrunError(f"it makes a text of more than {TEXT_BYTES} bytes")

    def made(self, value: Any) -> Any:
        """Returns a value that was made, after counting its size. Values may not contain namespaces, whose sizes change
        later."""
        if isinstance(value, str):
            self._hold(value, text_bytes(value))
        elif isinstance(value, Namespace):
            self.size(attributes(value))
        elif not isinstance(value, bool) and isinstance(value, int):
            self.step()
            if value.bit_length() > BITS:
                raise OverrunError(f"it makes a number of more than {BITS} bits")
        else:
            self._hold(value, self.size(value))
        return value

    def size(self, value: Any) -> int:
        """Returns the bytes in a value as if it were written out: an item that occurs twice counts twice."""
        items = size = 0
        rest = [value]
        while rest:
            item = rest.pop()
            items += 1
            if isinstance(item, str | bytes):
                size += len(item) if isinstance(item, bytes) else text_bytes(item)
            elif isinstance(item, Mapping):
                items += len(item)
                rest += [*item.keys(), *item.values()]
            elif isinstance(item, list | tuple | set | frozenset):
                rest += item
            elif isinstance(item, Namespace) and item is not value:
                raise OverrunError("it puts a namespace into a value")
            if items + len(rest) > ITEMS or size > TEXT_BYTES:
                raise OverrunError(f"it makes a value of more than {ITEMS} items or {TEXT_BYTES} bytes")
        return items + size if items == 1 else items * ITEM_BYTES + size

    def _hold(self, value: Any, size: int) -> None:
        """Counts a value of some bytes among those that exist, until nothing but the meter refers to it."""
        self.work(size)
        if size < LARGE:
            return
        self._held.append((value, size))
        self._held_bytes += size
        if self._held_bytes > HELD_BYTES:
            self._held = [entry for entry in self._held if sys.getrefcount(entry[0]) > _ALONE]
            self._held_bytes = sum(entry[1] for entry in self._held)
            if self._held_bytes > HELD_BYTES - TEXT_BYTES:
                raise OverrunError(f"its values take more than {HELD_BYTES - TEXT_BYTES} bytes together")


def text_bytes(text: str) -> int:
    """Returns the bytes of a text's characters: 1, 2 or 4 for each, as its widest needs."""
    return sys.getsizeof(text) - _EMPTY if text else 0


def attributes(namespace: Namespace) -> Mapping[str, Any]:
    """Returns the attributes of a namespace of the template."""
    values: Mapping[str, Any] = getattr(namespace, "_Namespace__attrs")  # noqa: B009  (mangled in a plain access)
    return values


def _references_of_an_entry() -> int:
    """Returns what sys.getrefcount says of a value that nothing but an entry of the meter's list refers to."""
    entries = [(object(), 0)]
    return max(sys.getrefcount(entry[0]) for entry in entries)


_ALONE = _references_of_an_entry()
