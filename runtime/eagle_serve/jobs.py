"""The queue: requests wait their turn, first come, first served, for a place among those that decode.

One thread decodes them all: it advances each to the forward pass that it needs next, runs these passes, as one where
the engine can, and tells the event loop once what all have gained. The loop hears of a job through its `events`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Literal

from eagle_runtime import Cycle, EagleError, Piece, Wish
from eagle_runtime.app.turn import AwaitedTurn
from eagle_serve.errors import ApiError, error_of, wrong_value
from eagle_serve.request import Prepared

log = logging.getLogger("eagle_serve")
Event = Piece | ApiError
News = tuple["Job", Event]
Reason = Literal["client", "shutdown"]
STOPPING = "the server is stopping; send the request to it again when it runs"


class Events:
    """News of the jobs of one request, in the event loop: pieces, of which the last carries the result, or an error at
    the end."""

    def __init__(self) -> None:
        self._held: list[News] = []
        self._awaited: asyncio.Future[None] | None = None

    def __len__(self) -> int:
        return len(self._held)

    def put(self, news: Sequence[News]) -> None:
        self._held += news
        self.wake()

    def wake(self) -> None:
        """Let who waits for news go on, though there may be none."""
        if self._awaited is not None and not self._awaited.done():
            self._awaited.set_result(None)

    async def take(self) -> list[News]:
        """Waits for news, or for `wake`; returns all that were not taken. One task at a time may wait."""
        if not self._held:
            self._awaited = asyncio.get_running_loop().create_future()
            try:
                await self._awaited
            finally:
                self._awaited = None
        taken, self._held = self._held, []
        return taken


class Job(AwaitedTurn):
    """One answer that waits, decodes, or is done. events: what the event loop has heard of it, and of the others of its
    request."""

    def __init__(self, prepared: Prepared, events: Events) -> None:
        """Made in the event loop that reads the events."""
        super().__init__()
        self.prepared = prepared
        self.events = events
        self.asked = time.perf_counter()
        self.finished = threading.Event()
        self.prefill = (0, len(prepared.ids))  # tokens of the prompt that were read, and all
        self.first: float | None = None  # seconds until the first token
        self.drafted = 0  # tokens that were drafted, and of them accepted
        self.accepted = 0
        self.reason: Reason | None = None  # of its end before its time
        self.loop = asyncio.get_running_loop()
        self._untold: list[Event] = []

    def note_cycle(self, cycle: Cycle) -> None:
        self.drafted += cycle.tree.num_nodes - 1
        self.accepted += cycle.step.num_accepted

    def note_prefill(self, done: int, total: int) -> None:
        self.prefill = done, total

    def withdraw(self, reason: Reason) -> None:
        """Cancel it; of several reasons the first counts."""
        self.reason = self.reason or reason
        self.cancel()

    def note_piece(self) -> None:
        """A piece has come; the first one's time is the time to the first token."""
        if self.first is None:
            self.first = time.perf_counter() - self.asked

    def news(self, event: Event) -> list[Event]:
        """Returns what is to be told now that an event has come: of an answer that is not streamed, all at its end."""
        self._untold.append(event)
        if not self.prepared.request.stream and isinstance(event, Piece) and event.result is None:
            return []
        told, self._untold = self._untold, []
        return told


class Jobs:
    """The queue and its thread. waiting: jobs that may wait besides those that decode."""

    def __init__(
        self,
        decode: Callable[[Job], Iterator[Piece | Wish]],
        serve: Callable[[Sequence[Wish]], None],
        at_once: int,
        waiting: int,
        idle: Callable[[], None] = lambda: None,
    ) -> None:
        """decode: yields a job's pieces, and before them wishes; serve: grants the wishes of several jobs. at_once: how
        many decode. idle: called after the last job, which counts as running until it returns."""
        self._decode = decode
        self._serve = serve
        self._idle = idle
        self._at_once = at_once
        self._most = at_once + waiting
        self._ready = threading.Condition()
        self._queue: deque[Job] = deque()
        self._running: set[Job] = set()
        self._stopping = False
        self._thread = threading.Thread(target=self._work, name="eagle-serve-decode")
        self._thread.start()

    def submit(self, jobs: Sequence[Job]) -> None:
        """Add the jobs of a request. Raises ApiError: 429 if too many wait, 400 if there are more than may ever wait,
        503 while the server stops."""
        if len(jobs) > self._most:
            reason = f"asks for {len(jobs)} answers, but {self._most} may run and wait; start with a larger --queue"
            raise wrong_value("n" if jobs[0].prepared.request.choices > 1 else "prompt", reason)
        with self._ready:
            if self._stopping:
                raise stopping()
            if len(self._queue) + len(self._running) + len(jobs) > self._most:
                reason = f"{len(self._queue)} answers wait already; try again soon, or start with a larger --queue"
                raise ApiError(429, "queue_full", reason, headers={"retry-after": "1"})
            self._queue.extend(jobs)
            self._ready.notify()

    def ahead(self, job: Job) -> int | None:
        """Returns the number of a waiting job in the queue, 1 being the next; None if it does not wait."""
        with self._ready:
            return self._queue.index(job) + 1 if job in self._queue else None

    def withdraw(self, job: Job, reason: Reason) -> None:
        """Cancel a job; one that waits leaves the queue at once."""
        job.withdraw(reason)
        with self._ready:
            if job not in self._queue:
                return
            self._queue.remove(job)
        self._end(job)

    @property
    def depth(self) -> int:
        """Jobs that wait."""
        with self._ready:
            return len(self._queue)

    @property
    def running(self) -> int:
        """Jobs that decode."""
        with self._ready:
            return len(self._running)

    def refuse(self) -> None:
        """Take no more jobs; those there are go on."""
        with self._ready:
            self._stopping = True

    def stop(self) -> None:
        """Cancel all jobs, and end the thread once they are done."""
        self.refuse()
        with self._ready:
            jobs = [*self._queue, *self._running]
        for job in jobs:
            self.withdraw(job, "shutdown")
        with self._ready:
            self._ready.notify_all()
        self._thread.join()

    def _work(self) -> None:
        decoding: dict[Job, Iterator[Piece | Wish]] = {}
        while True:
            decoding |= {job: iter(()) if job.cancelled else self._decode(job) for job in self._admitted()}
            if not decoding:
                return
            news: list[tuple[Job, list[Event]]] = []
            wishes: dict[Job, Wish] = {}
            for job, events in decoding.items():
                told, wish = self._advance(job, events)
                if told:
                    news.append((job, told))
                if wish is not None:
                    wishes[job] = wish
            _tell(news)
            ended = [job for job in decoding if job not in wishes]
            decoding = {job: decoding[job] for job in wishes}
            if ended:
                self._leave(ended, last=not decoding)
            if wishes:
                self._grant(wishes)

    def _admitted(self) -> list[Job]:
        """Waits for jobs where none runs; returns those that now begin, none at the end."""
        with self._ready:
            while not (self._queue or self._running or self._stopping):
                self._ready.wait()
            count = min(len(self._queue), self._at_once - len(self._running))
            jobs = [self._queue.popleft() for _ in range(count)]
            self._running.update(jobs)
            return jobs

    def _advance(self, job: Job, events: Iterator[Piece | Wish]) -> tuple[list[Event], Wish | None]:
        """Returns what is to be told of a job, and its next wish; None at its end."""
        told: list[Event] = []
        try:
            for event in events:
                if isinstance(event, Wish):
                    return told, event
                told += job.news(event)
        except Exception as error:
            told += job.news(failure(error))
        return told, None

    def _grant(self, wishes: dict[Job, Wish]) -> None:
        try:
            self._serve([*wishes.values()])
        except Exception as error:  # the engines are closed
            for wish in wishes.values():
                if not wish.done:
                    wish.fail(error)

    def _leave(self, ended: Sequence[Job], last: bool) -> None:
        """Jobs have ended. last: whether none decodes any more."""
        with self._ready:
            last = last and not self._queue
        if last:
            self._idle()
        with self._ready:
            self._running.difference_update(ended)
        for job in ended:
            self._end(job)

    def _end(self, job: Job) -> None:
        if job.reason == "shutdown":
            _tell([(job, [stopping()])])
        job.finished.set()


def _tell(news: Sequence[tuple[Job, list[Event]]]) -> None:
    """Pass events of jobs to their event loop, if it still runs, which wakes once for all of them."""

    def put() -> None:
        for job, events in news:
            job.events.put([(job, event) for event in events])

    if news:
        with contextlib.suppress(RuntimeError):
            news[0][0].loop.call_soon_threadsafe(put)


def stopping() -> ApiError:
    """The error of a server that is about to end."""
    return ApiError(503, "shutting_down", STOPPING)


def failure(error: Exception) -> ApiError:
    """An error as an answer; of a bug it says nothing but the number under which the log describes it."""
    if isinstance(error, EagleError):
        return error_of(error)
    number = secrets.token_hex(6)
    log.error("internal error %s", number, exc_info=error)
    return ApiError(500, "internal_error", f"an internal error, described in the server's log under {number}")
