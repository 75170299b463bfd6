"""The queue: requests wait their turn, first come, first served, for a thread that decodes.

Each thread decodes one request; with several threads the model itself lets them take turns, one step at a time. The
event loop hears of a job through its `events`.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import secrets
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Literal

from eagle_runtime import Cycle, EagleError, Piece
from eagle_runtime.app.turn import AwaitedTurn
from eagle_serve.errors import ApiError, error_of
from eagle_serve.prepared import Prepared

log = logging.getLogger("eagle_serve")
Event = Piece | ApiError
Reason = Literal["client", "shutdown"]
STOPPING = "the server is stopping; send the request to it again when it runs"


class Job(AwaitedTurn):
    """One request that waits, decodes, or is done. Events: pieces, of which the last carries the result, or an error at
    the end."""

    def __init__(self, prepared: Prepared) -> None:
        """Made in the event loop that reads the events."""
        super().__init__()
        self.prepared = prepared
        self.events: asyncio.Queue[Event] = asyncio.Queue()
        self.asked = time.perf_counter()
        self.finished = threading.Event()
        self.prefill = (0, len(prepared.ids))  # tokens of the prompt that were read, and all
        self.first: float | None = None  # seconds until the first token
        self.drafted = 0  # tokens that were drafted, and of them accepted
        self.accepted = 0
        self.reason: Reason | None = None  # of its end before its time
        self._loop = asyncio.get_running_loop()

    def note_cycle(self, cycle: Cycle) -> None:
        """Count what was drafted, and accepted of it."""
        self.drafted += cycle.tree.num_nodes - 1
        self.accepted += cycle.step.num_accepted

    def note_prefill(self, done: int, total: int) -> None:
        """So many tokens of the prompt were read."""
        self.prefill = done, total

    def withdraw(self, reason: Reason) -> None:
        """Cancel it; of several reasons the first counts."""
        self.reason = self.reason or reason
        self.cancel()

    def note_piece(self) -> None:
        """A piece has come; the first one's time is the time to the first token."""
        if self.first is None:
            self.first = time.perf_counter() - self.asked

    def tell(self, event: Event) -> None:
        """Pass an event to the event loop, if it still runs."""
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self.events.put_nowait, event)


class Jobs:
    """The queue and its threads. run: decodes a job, telling it its pieces. waiting: jobs that may wait besides those
    that decode. idle: called after the last job, which counts as running until it returns."""

    def __init__(
        self, run: Callable[[Job], None], threads: int, waiting: int, idle: Callable[[], None] = lambda: None
    ) -> None:
        self._run = run
        self._idle = idle
        self._most = threads + waiting
        self._ready = threading.Condition()
        self._queue: deque[Job] = deque()
        self._running: set[Job] = set()
        self._decoding = 0  # of these, those that are not done
        self._stopping = False
        self._threads = [threading.Thread(target=self._work, name=f"eagle-serve-{n}") for n in range(threads)]
        for thread in self._threads:
            thread.start()

    def submit(self, job: Job) -> None:
        """Add a job. Raises ApiError: 429 if too many wait, 503 while the server stops."""
        with self._ready:
            if self._stopping:
                raise stopping()
            if len(self._queue) + len(self._running) >= self._most:
                reason = f"{len(self._queue)} requests wait already; try again soon, or start with a larger --queue"
                raise ApiError(429, "queue_full", reason, headers={"retry-after": "1"})
            self._queue.append(job)
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
        """Cancel all jobs, and end the threads once they are done."""
        self.refuse()
        with self._ready:
            jobs = [*self._queue, *self._running]
        for job in jobs:
            self.withdraw(job, "shutdown")
        with self._ready:
            self._ready.notify_all()
        for thread in self._threads:
            thread.join()

    def _work(self) -> None:
        while True:
            with self._ready:
                while not self._queue and not self._stopping:
                    self._ready.wait()
                if not self._queue:
                    return
                job = self._queue.popleft()
                self._running.add(job)
                self._decoding += 1
            try:
                if not job.cancelled:
                    self._run(job)
            except Exception as error:
                job.tell(self._failure(error))
            finally:
                with self._ready:
                    self._decoding -= 1
                    last = self._decoding == 0 and not self._queue
                if last:
                    self._idle()
                with self._ready:
                    self._running.discard(job)
                self._end(job)

    def _end(self, job: Job) -> None:
        if job.reason == "shutdown":
            job.tell(stopping())
        job.finished.set()

    def _failure(self, error: Exception) -> ApiError:
        if isinstance(error, EagleError):
            return error_of(error)
        return internal_error(error)


def stopping() -> ApiError:
    """The error of a server that is about to end."""
    return ApiError(503, "shutting_down", STOPPING)


def internal_error(error: BaseException) -> ApiError:
    """An answer that says nothing of a bug but the number under which the log describes it."""
    number = secrets.token_hex(6)
    log.error("internal error %s", number, exc_info=error)
    return ApiError(500, "internal_error", f"an internal error, described in the server's log under {number}")
