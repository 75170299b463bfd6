"""A queue that grants its callers their turn in order of arrival.

Each caller has a ticket with a lock, and waits for the lock of the ticket before its own. Releasing a lock is one call
that runs no Python code. So an interrupt anywhere in this module leaves no later caller waiting for ever, and the
garbage collector may drop the holder of a ticket while its thread is anywhere in here.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable

_local = threading.local()


def this_thread() -> object:
    """Returns an object that identifies the calling thread and no other. A thread's number would not do: the system
    reuses it after the thread has ended."""
    return _local.__dict__.setdefault("thread", object())


class Ticket:
    """One caller's ticket. lock: held until the caller is done. thread: the one that holds the ticket. previous: the
    ticket that this one waits for, None when its turn has come. streamed: as in scheduler.Lease."""

    def __init__(self, *, streamed: bool = False) -> None:
        self.streamed = streamed
        self.lock = threading.Lock()
        self.thread = this_thread()
        self.previous: Ticket | None = None

    def release(self) -> None:
        """The caller is done; a second call does nothing."""
        with contextlib.suppress(RuntimeError):  # released already
            self.lock.release()

    def unfinished_predecessor(self) -> Ticket | None:
        """Returns the nearest earlier ticket whose lock is still held. A ticket that was released while it was waiting
        is skipped: this one then waits for the ticket that it had waited for."""
        while (previous := self.previous) is not None and not previous.lock.locked():
            self.previous = previous.previous
        return previous


class TicketQueue:
    """Tickets in order of arrival."""

    def __init__(self) -> None:
        self._last: Ticket | None = None
        self._append_lock = threading.RLock()  # a signal handler may append while its thread does

    def wait_for_turn(self, ticket: Ticket, check: Callable[[Ticket], None]) -> None:
        """Append a ticket, whose lock the caller holds, and return when all earlier ones are released.

        check: called with each earlier ticket before waiting; it may raise to give up. Whether this call returns or
        raises, the caller has to release the ticket."""
        with self._append_lock:
            ticket.previous, self._last = self._last, ticket
        previous = ticket.unfinished_predecessor()
        while previous is not None:
            check(previous)
            previous = previous.unfinished_predecessor()
        while (previous := ticket.unfinished_predecessor()) is not None:
            wait(previous)


def wait(ticket: Ticket) -> None:
    """Return when a ticket is released."""
    try:
        with ticket.lock:
            pass
    except RuntimeError:
        if ticket.lock.locked():
            raise  # from a signal handler
        # Otherwise its holder released it twice, the second time while this thread held the lock.
