"""One generation at a time on a model's caches.

Generations that run to their end in one call wait for each other, in order of arrival. Nobody waits for a stream of
another thread, which may never end: that is refused. In one thread a newer generation ends an older stream.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Generator, Iterator
from typing import TypeVar

from eagle_runtime.errors import BusyError, RequestError
from eagle_runtime.threads.engines import Engines
from eagle_runtime.threads.line import Line, Place, this_thread

T = TypeVar("T")


class Claim:
    """A generation's claim on the caches; over when nothing refers to it any more, if not before.

    streamed: whether the caller's own code runs between its steps, so that others cannot wait for its end. waited: for
    other callers so far, in seconds."""

    def __init__(self, *, streamed: bool) -> None:
        self.place = _ClaimPlace(streamed)
        self.waited = 0.0

    def end(self) -> None:
        """Let others have the caches; a second call does nothing."""
        self.place.leave()

    def __del__(self) -> None:
        if hasattr(self, "place"):  # it has none where an interrupt came while it was made
            self.end()


class Turns:
    """The generations on one pair of caches."""

    def __init__(self, engines: Engines) -> None:
        self._engines = engines
        self._line = Line()
        self._holder: _ClaimPlace | None = None  # the newest that began, over or not

    def steps(self, claim: Claim, work: Iterator[T]) -> Generator[T, None, None]:
        """What `work` yields, each item made in a step of its own; the claim ends with the last. Raises ClosedError,
        BusyError at the first step, RequestError at a later one if a newer generation has taken the caches."""
        place = claim.place
        asked = time.perf_counter()

        def step() -> list[T]:
            """The next item, or none."""
            claim.waited += time.perf_counter() - asked
            if self._holder is not place or not place.left.locked():
                raise RequestError("another generation was started on this model before this stream ended")
            return list(itertools.islice(work, 1))

        try:
            self._begin(place)
            while items := self._engines.step(step):
                yield items[0]
                asked = time.perf_counter()
                place.thread = this_thread()
        finally:
            claim.end()

    def run(self, work: Callable[[], T]) -> T:
        """What `work` returns, as a generation of one step."""
        with contextlib.closing(self.steps(Claim(streamed=False), (done() for done in (work,)))) as steps:
            return next(steps)

    def _begin(self, place: _ClaimPlace) -> None:
        self._engines.check()
        place.thread = this_thread()
        if (holder := self._holder) is not None and holder.thread is place.thread:
            holder.leave()
        self._line.join(place, _refuse)
        self._holder = place


class _ClaimPlace(Place):
    def __init__(self, streamed: bool) -> None:
        super().__init__()
        self.streamed = streamed
        self.left.acquire()

    def leave(self) -> None:
        with contextlib.suppress(RuntimeError):  # left already
            self.left.release()


def _refuse(before: Place) -> None:
    assert isinstance(before, _ClaimPlace)
    if before.streamed:
        raise BusyError(
            "a stream of another thread has this model's caches; finish or close it first, or decode on model.twin()"
        )
    if before.thread is this_thread():
        raise BusyError("this thread waits for the model already; a signal handler cannot use it then")
