"""The engines of a model and its twins: one step at a time uses them, until they are closed.

A step is a prefill, a cycle or one forward pass of scoring, with all that it does to caches and statistics; the
caller's own code never runs in one. Engines are not freed during a step: not by `close` in another thread, in a signal
handler or in the middle of a stream, and not at the end of the program, where a daemon thread may still be inside a
library that is being unloaded.

An engine's own threads do not survive a fork: in the child a forward pass would wait for them for ever, and so would
freeing the engine. So a forked process can neither use nor free it.
"""

from __future__ import annotations

import atexit
import ctypes
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from eagle_runtime.base.errors import BusyError, ClosedError, call_all
from eagle_runtime.core.rounds import Rounds
from eagle_runtime.core.session import Session
from eagle_runtime.core.ticket_queue import Ticket, TicketQueue, this_thread, wait

T = TypeVar("T")


class Engines:
    """Sessions, and the queue of callers that want to run a step on them."""

    def __init__(self, sessions: Sequence[Session]) -> None:
        self._users: weakref.WeakSet[object] = weakref.WeakSet()  # models with caches in the engines' memory
        self._sessions = list(sessions)
        self._others: list[Session] = []  # that are used in steps of these engines too
        self._queue = TicketQueue()
        self._newest: Ticket | None = None  # of the step that began last, whether it has ended or not
        self._closed = False
        self._forked = False
        self._free_afterwards = False  # a running step frees the engines at its end
        self.rounds = Rounds(self.step, sessions[0] if sessions else None)
        _open.add(self)

    @property
    def sessions(self) -> tuple[Session, ...]:
        """The session of the target and, if there is one, of the head. Raises ClosedError."""
        self.check()
        return tuple(self._sessions)

    def add_user(self, model: object) -> None:
        """A model has caches in the engines' memory."""
        self._users.add(model)

    def take(self, others: Engines) -> None:
        """Use the sessions of other engines in steps of these, and free them with these; the others are not to be used
        any more. Raises ClosedError."""
        self._others += others.sessions

    @property
    def closed(self) -> bool:
        """Whether the engines were closed, or loaded before this process was forked."""
        return self._closed or self._forked

    def check(self) -> None:
        """Raises ClosedError if the engines were closed, or loaded before this process was forked."""
        if self._forked:
            raise ClosedError(
                "this process was forked after the model was loaded, which an engine does not survive; load the bundle "
                "in the new process, or start it by multiprocessing's spawn method"
            )
        if self._closed:
            raise ClosedError("the model is closed, or the program is ending; load the bundle again")

    def step(self, work: Callable[[], T]) -> T:
        """Call `work` after the steps of all earlier callers, and return its result. Raises ClosedError, and BusyError
        in a thread whose own step is still running."""
        self.check()
        ticket = Ticket()
        with ticket.lock:
            self._queue.wait_for_turn(ticket, _check_thread)
            self._newest = ticket  # before the check below: `close` does these two in the opposite order
            self.check()
            try:
                return work()
            finally:
                if self._free_afterwards:
                    self._free()

    def close(self) -> None:
        """Refuse further steps, wait for the running one, free the engines; a second call does nothing. A signal
        handler may call this during a step: then the engines are freed at the end of that step. In a forked process
        nothing is freed."""
        if self._forked:
            return
        self.stop()
        newest = self._newest
        if newest is not None and newest.thread is this_thread() and newest.lock.locked():
            self._free_afterwards = True
        else:
            self._free()

    def stop(self) -> None:
        """Refuse further steps and wait for the running one."""
        if self._forked:
            return
        self._closed = True
        newest = self._newest
        if newest is not None and newest.thread is not this_thread():
            wait(newest)

    def abandon(self) -> None:
        """Called in a forked process: make the engines unusable. An extra reference keeps them and their users until
        the process ends."""
        self._forked = True
        for owner in (self, *self._users):
            ctypes.pythonapi.Py_IncRef(ctypes.py_object(owner))

    def _free(self) -> None:
        call_all(session.close for session in self._taken())

    def _taken(self) -> Iterator[Session]:
        while sessions := self._sessions or self._others:
            try:
                yield sessions.pop()
            except IndexError:  # another thread has popped the last one
                return


_open: weakref.WeakSet[Engines] = weakref.WeakSet()


def _check_thread(previous: Ticket) -> None:
    """Raises BusyError instead of waiting for a ticket of this very thread."""
    if previous.thread is this_thread():
        raise BusyError(
            "this thread is in a step of the model, or waits for one; a signal handler or destructor that runs then "
            "cannot use the model"
        )


def _stop_all() -> None:
    for engines in list(_open):
        engines.stop()


def _abandon_all() -> None:
    for engines in list(_open):
        engines.abandon()


atexit.register(_stop_all)
if sys.platform != "win32":
    import os

    os.register_at_fork(after_in_child=_abandon_all)
