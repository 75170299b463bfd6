"""The engines of a model and its twins: used by one step at a time, until they are closed.

A step is a prefill, a cycle or a pass of scoring with all that it does to caches and statistics; the caller's own code
never runs in one. Nothing is freed under a running step: not by `close` in another thread, in a signal handler or in
the middle of a stream, and not by the end of the program, which would otherwise tear down libraries while a daemon
thread is inside them.

Threads of an engine do not survive a fork: in the child a pass would wait for them forever, and so would freeing the
engine. So there it is out of use, and never freed.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import weakref
from collections.abc import Callable, Sequence
from typing import TypeVar

from eagle_runtime.errors import BusyError, ClosedError
from eagle_runtime.session.protocol import Session
from eagle_runtime.threads.line import Line, Place, this_thread, wait

T = TypeVar("T")


class Engines:
    """Sessions with the line of those who want to run a step."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self.users: weakref.WeakSet[object] = weakref.WeakSet()  # whose memory belongs to the engines too
        self._sessions = list(sessions)
        self._line = Line()
        self._running: Place | None = None  # the newest step that began, over or not
        self._closed = False
        self._forked = False
        self._free_afterwards = False  # a running step frees the engines at its end
        _open.add(self)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """Of the target and, if there is one, of the head. Raises ClosedError."""
        self.check()
        return tuple(self._sessions)

    def check(self) -> None:
        """Raises ClosedError if the engines are out of use."""
        if self._forked:
            raise ClosedError(
                "this process was forked after the model was loaded, which an engine does not survive; load the bundle "
                "in the new process, or start it by multiprocessing's spawn method"
            )
        if self._closed:
            raise ClosedError("the model is closed, or the program is ending; load the bundle again")

    def step(self, work: Callable[[], T]) -> T:
        """What `work` returns, run when all who asked before have had their turn. Raises ClosedError, and BusyError in
        a thread whose own step is not over."""
        self.check()
        place = Place()
        with place.left:
            self._line.join(place, _refuse_own)
            self._running = place  # first this, then the question: `close` does the opposite
            self.check()
            try:
                return work()
            finally:
                if self._free_afterwards:
                    self._free()

    def close(self) -> None:
        """Refuse further steps, wait for the one that runs, free the engines; a second call does nothing. Called from
        within a step, by a signal handler, it leaves freeing to the step's end; in a forked process it frees
        nothing."""
        if self._forked:
            return
        self._closed = True
        running = self._running
        if running is not None and running.left.locked():
            if running.thread is this_thread():
                self._free_afterwards = True
                return
            wait(running)
        self._free()

    def stop(self) -> None:
        """Refuse further steps and wait for the one that runs."""
        if self._forked:
            return
        self._closed = True
        running = self._running
        if running is not None and running.thread is not this_thread():
            wait(running)

    def lose(self) -> None:
        """Put the engines, in a forked process, out of use. They and their users are kept until the process is gone:
        one reference more than there are."""
        self._forked = True
        for kept in (self, *self.users):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(kept))

    def _free(self) -> None:
        while self._sessions:
            try:
                session = self._sessions.pop()
            except IndexError:  # another thread had the last one
                return
            session.close()


_open: weakref.WeakSet[Engines] = weakref.WeakSet()


def _refuse_own(place: Place) -> None:
    if place.thread is this_thread():
        raise BusyError(
            "this thread is in a step of the model, or waits for one; a signal handler or destructor that runs then "
            "cannot use the model"
        )


def _stop_all() -> None:
    for engines in list(_open):
        engines.stop()


def _lose_all() -> None:
    for engines in list(_open):
        engines.lose()


atexit.register(_stop_all)
if sys.platform != "win32":
    import os

    os.register_at_fork(after_in_child=_lose_all)
