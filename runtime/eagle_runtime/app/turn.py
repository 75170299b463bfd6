"""One answer as its caller has it: pieces one by one, and ways to end it."""

from __future__ import annotations

import contextlib
import inspect
import sys
import threading
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor
from types import FrameType

from eagle_runtime.app.output import Output
from eagle_runtime.app.result import Piece, Result
from eagle_runtime.base.errors import BusyError, ClosedError
from eagle_runtime.core.rounds import Wish
from eagle_runtime.core.scheduler import Lease, Serve, served

NO_WORKER = (ClosedError, RuntimeError)  # the model is closed, or is just being closed


class TurnState:
    """What the turn's owner and the thread that computes it share. cancelled: the answer is to end after the running
    step. result: how it ended. ended: whether it has, with a result or with an error."""

    def __init__(self, on_end: Callable[[Output], None]) -> None:
        """on_end: called once, in whatever thread the answer ends."""
        self.cancelled = False
        self.result: Result | None = None
        self.ended = threading.Event()
        self._on_end = on_end
        self._ending = threading.Lock()

    def end(self, output: Output, result: Result | None = None) -> None:
        """The answer is over; a second call does nothing."""
        if self._ending.acquire(blocking=False):
            self.result = result
            on_end = self._on_end
            del self._on_end  # it refers to this state: else both wait for the collector
            try:
                on_end(output)
            finally:
                self.ended.set()


class Turn(Iterator[Piece]):
    """An answer piece by piece. Nothing is computed before the first piece is asked for, nor between two pieces.

        with model.stream("def f(", stop=["\\n\\n"]) as turn:
            for piece in turn: ...          # or: async for piece in turn

    One thread at a time asks for pieces. Any thread may call `cancel`. A turn that is left early, by `close`, an
    exception or because nothing refers to it any more, ends as if it had been cancelled. events: the pieces with the
    wishes before them, for a caller that serves those of several turns together, and asks for pieces in no other
    way."""

    def __init__(
        self,
        state: TurnState,
        output: Output,
        events: Generator[Piece | Wish, None, None],
        serve: Serve,
        lease: Lease,
        worker: Callable[[], Executor],
    ) -> None:
        """Use `EagleModel.stream` or a Conversation. events: as decoding.decode yields them; serve: grants their
        wishes. worker: returns the executor, of one thread, in which `async for` computes pieces."""
        self._lease = lease
        self._state = state
        self._output = output
        self.events = events
        self._pieces = served(events, serve)
        self._worker = worker

    @property
    def done(self) -> bool:
        """Whether the turn has ended, with a result or with an error."""
        return self._state.ended.is_set()

    @property
    def result(self) -> Result | None:
        """The result; None before the end, and where an error or `close` ended the turn."""
        return self._state.result

    def cancel(self) -> None:
        """End the answer after the step that is running now, if one is. Returns at once, from any thread; a second
        call does nothing. The next piece that is asked for is the last."""
        self._state.cancelled = True

    @property
    def cancelled(self) -> bool:
        """Whether `cancel` or `close` was called."""
        return self._state.cancelled

    def wait(self, timeout: float | None = None) -> bool:
        """Wait until the turn has ended, for `timeout` seconds at most; returns whether it has."""
        return self._state.ended.wait(timeout)

    def __next__(self) -> Piece:
        """Raises BusyError while another thread waits for a piece of this turn."""
        if self._running:
            raise BusyError("another thread already waits for the next piece of this stream; let one thread read it")
        return next(self._pieces)

    def close(self) -> None:
        """End the turn; a second call does nothing. While another thread computes a piece, it ends after that step."""
        self.cancel()
        if not self._running:
            with contextlib.suppress(ValueError):  # a thread has asked for a piece meanwhile, which is the last
                self._pieces.close()
                self.events.close()
                self._lease.end()
                self._state.end(self._output)  # also where no piece was ever asked for

    @property
    def runs_here(self) -> bool:
        """Whether the caller is within a step of this turn, as its callbacks are: it cannot wait for the end."""
        step: FrameType | None = getattr(self.events, "gi_frame", None)
        frame: FrameType | None = sys._getframe()
        while frame is not None and frame is not step:
            frame = frame.f_back
        return frame is not None

    @property
    def _running(self) -> bool:
        return inspect.getgeneratorstate(self._pieces) == inspect.GEN_RUNNING

    def __enter__(self) -> Turn:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __del__(self) -> None:
        if hasattr(self, "_pieces"):
            self.close()

    # In an event loop: every piece is computed in the model's worker thread.

    def __aiter__(self) -> Turn:
        return self

    async def __anext__(self) -> Piece:
        """Cancelling the task that waits here cancels the turn."""
        import asyncio

        try:
            piece = await asyncio.get_running_loop().run_in_executor(self._worker(), next, self._pieces, None)
        except asyncio.CancelledError:
            self.cancel()
            with contextlib.suppress(*NO_WORKER):
                self._worker().submit(self.close)
            raise
        if piece is None:
            raise StopAsyncIteration
        return piece

    async def __aenter__(self) -> Turn:
        return self

    async def __aexit__(self, *_: object) -> None:
        import asyncio

        self.cancel()
        try:
            closed = asyncio.get_running_loop().run_in_executor(self._worker(), self.close)
        except NO_WORKER:
            self.close()
        else:
            await closed


class AwaitedTurn:
    """What worker and server keep of a turn that waits or runs; any thread may end it. cancelled: whether one did."""

    def __init__(self) -> None:
        self.cancelled = False
        self._turn: Turn | None = None

    def cancel(self) -> None:
        """End it after the running step; a second call does nothing."""
        self.cancelled = True
        if (turn := self._turn) is not None:
            turn.cancel()

    def begin(self, turn: Turn) -> Turn:
        """It has begun: `cancel` reaches it from now on."""
        self._turn = turn
        if self.cancelled:
            turn.cancel()
        return turn
