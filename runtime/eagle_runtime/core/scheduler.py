"""Schedules the generations on one model's caches: one at a time.

Generations that run to their end in one call wait for each other, in order of arrival. A generation is refused while a
stream of another thread holds the caches, since that stream may never end. A newer generation ends an older stream of
its own thread.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import TypeVar

from eagle_runtime.base.errors import BusyError, RequestError
from eagle_runtime.core.engines import Engines
from eagle_runtime.core.rounds import Wish
from eagle_runtime.core.ticket_queue import Ticket, TicketQueue, this_thread

T = TypeVar("T")
Serve = Callable[[Sequence[Wish]], None]


class Lease:
    """A generation's right to use the caches; it ends at the latest when nothing refers to it any more.

    streamed: whether the caller's own code runs between steps, so that others cannot wait for the end. waited: seconds
    spent waiting for other callers so far."""

    def __init__(self, *, streamed: bool) -> None:
        self.ticket = Ticket(streamed=streamed)
        self.ticket.lock.acquire()
        self.waited = 0.0

    def end(self) -> None:
        """Let other generations use the caches; a second call does nothing."""
        self.ticket.release()

    def __del__(self) -> None:
        if hasattr(self, "ticket"):  # not where an interrupt came during __init__
            self.end()


class Scheduler:
    """The generations on one pair of caches."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._queue = TicketQueue()
        self._newest: Ticket | None = None  # of the generation that began last, whether it has ended or not

    def steps(self, lease: Lease, work: Iterator[T]) -> Generator[T, None, None]:
        """Yields the items of `work`, each computed in a step of its own; the lease ends with the last.

        Raises ClosedError, BusyError at the first step, RequestError at a later one if a newer generation has taken the
        caches."""
        return served(self.asking(lease, work), self._engines.rounds.serve)

    def asking(self, lease: Lease, work: Iterator[T]) -> Generator[T | Wish, None, None]:
        """As `steps`, with the wish for each item before it, which the caller serves (Rounds.serve) before it goes
        on."""
        ticket = lease.ticket
        asked: float | None = time.perf_counter()  # None: counted already
        rounds = self._engines.rounds

        def step() -> list[T]:
            """Returns the next item in a list, which is empty at the end."""
            nonlocal asked
            lease.waited += 0.0 if asked is None else time.perf_counter() - asked
            asked = None
            if self._newest is not ticket or not ticket.lock.locked():
                raise RequestError("another generation was started on this model before this stream ended")
            return list(itertools.islice(work, 1))

        member = rounds.enter()
        try:
            self._begin(ticket)
            while True:
                yield (wish := Wish(member, step))
                if not (items := wish.taken()):
                    return
                yield items[0]
                asked = time.perf_counter()
                ticket.thread = this_thread()
        finally:
            rounds.leave(member)
            lease.end()

    def _begin(self, ticket: Ticket) -> None:
        self._engines.check()
        ticket.thread = this_thread()
        if (newest := self._newest) is not None and newest.thread is ticket.thread:
            newest.release()
        self._queue.wait_for_turn(ticket, _check_predecessor)
        self._newest = ticket


def served(events: Generator[T | Wish, None, None], serve: Serve) -> Generator[T, None, None]:
    """The items among events of one generation, whose wishes are served one after the other."""
    with contextlib.closing(events):
        for event in events:
            if isinstance(event, Wish):
                serve([event])
            else:
                yield event


def _check_predecessor(previous: Ticket) -> None:
    """Raises BusyError if waiting for an earlier ticket could take for ever."""
    if previous.streamed:
        raise BusyError(
            "a stream of another thread has this model's caches; finish or close it first, or decode on model.twin()"
        )
    if previous.thread is this_thread():
        raise BusyError("this thread waits for the model already; a signal handler cannot use it then")
