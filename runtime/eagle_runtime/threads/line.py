"""A line in which turns are granted in order of arrival.

Each place waits for the one before it to be left, and leaving is one call that runs no Python code. So whatever an
interrupt breaks off, wherever it comes, those behind are not left waiting, and the garbage collector may drop what held
a place while its thread is anywhere in here.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class _Here(threading.local):
    """An object for each thread; numbers of threads come again when they have ended."""

    def __init__(self) -> None:
        self.thread = object()


_here = _Here()


def this_thread() -> object:
    """What stands for the thread that asks, and for no other."""
    return _here.thread


class Place:
    """One caller's place. left: locked until the place is left. thread: the one that holds or waits. before: the place
    that it waits for, None when its turn has come."""

    def __init__(self) -> None:
        self.left = threading.Lock()
        self.thread = this_thread()
        self.before: Place | None = None

    def ahead(self) -> Place | None:
        """The nearest place before this one that is not left. One that was left while it still waited did not have its
        turn; what it waited for is waited for in its stead."""
        while (before := self.before) is not None and not before.left.locked():
            self.before = before.before
        return before


class Line:
    """Places in order of arrival."""

    def __init__(self) -> None:
        self._last: Place | None = None
        self._joining = threading.RLock()  # a signal handler may join while its thread does

    def join(self, place: Place, refuse: Callable[[Place], None]) -> None:
        """Returns when all places before this one, whose `left` is locked, are left. refuse: called with each of them;
        may raise instead of waiting. Whatever comes out of here, the caller leaves the place."""
        with self._joining:
            place.before, self._last = self._last, place
        before = place.ahead()
        while before is not None:
            refuse(before)
            before = before.ahead()
        while (before := place.ahead()) is not None:
            wait(before)


def wait(place: Place) -> None:
    """Until a place is left."""
    try:
        with place.left:
            pass
    except RuntimeError:
        if place.left.locked():
            raise  # from a signal handler
        # else it was left twice, the second time while it was held here
