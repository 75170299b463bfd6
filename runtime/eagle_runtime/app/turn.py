"""One answer, token by token: the loop's events become pieces, until the answer ends or somebody stops it."""

from __future__ import annotations

import contextlib
import inspect
import threading
import time
from collections.abc import Callable, Generator, Iterator
from concurrent.futures import Executor
from dataclasses import replace

from eagle_runtime.app.output import Output
from eagle_runtime.app.request import Request
from eagle_runtime.app.result import Piece, Result, usage_of
from eagle_runtime.base.errors import BusyError
from eagle_runtime.core.generate import Cycle, Reading
from eagle_runtime.core.scheduler import Lease, Scheduler
from eagle_runtime.core.target import Verification

Work = Iterator[Reading | Cycle | Verification]


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

    def end(self, output: Output) -> None:
        """The answer is over; a second call does nothing."""
        if self._ending.acquire(blocking=False):
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
    exception or because nothing refers to it any more, ends as if it had been cancelled."""

    def __init__(
        self,
        state: TurnState,
        output: Output,
        pieces: Generator[Piece, None, None],
        lease: Lease,
        worker: Callable[[], Executor],
    ) -> None:
        """Use `EagleModel.stream` or a Conversation. worker: returns the executor, of one thread, in which `async for`
        computes pieces."""
        self._lease = lease
        self._state = state
        self._output = output
        self._pieces = pieces
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
                self._lease.end()
                self._state.end(self._output)  # also where no piece was ever asked for

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
        await asyncio.get_running_loop().run_in_executor(self._worker(), self.close)


class AwaitedTurn:
    """A turn that waits to begin, or runs; any thread may end it. cancelled: whether that was asked."""

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


def decode(
    scheduler: Scheduler,
    lease: Lease,
    work: Work,
    request: Request,
    output: Output,
    state: TurnState,
    known: Callable[[], int],
) -> Generator[Piece, None, None]:
    """Yields the pieces of an answer, the last one with the result. work: the loop's events, each computed in a step of
    its own. known: returns how many tokens of the prompt did not have to be read."""
    cycles: list[Cycle] = []
    times = _Times()
    steps = scheduler.steps(lease, work)
    try:
        with contextlib.closing(steps):
            while output.stop is None:
                if state.cancelled or (event := next(steps, None)) is None:
                    output.finish("cancelled" if state.cancelled else "context_full")
                    break
                assert not isinstance(event, Verification), "a round runs it"
                if isinstance(event, Reading):
                    if request.on_prefill is not None:
                        left = time.perf_counter()
                        request.on_prefill(event.count, event.total)
                        times.elsewhere(left)
                    continue
                if not output.token_ids:
                    times.first_token(lease.waited)
                else:
                    cycles.append(event)
                    if request.on_cycle is not None:
                        request.on_cycle(event)
                _add(event, request, output)
                if state.cancelled:
                    output.finish("cancelled")
                elif output.stop is None and (released := output.release())[0]:
                    left = time.perf_counter()
                    yield Piece(*released, parts=output.parts(released[0]))
                    times.elsewhere(left)
        figures = times.figures(lease.waited)
        assert output.stop is not None
        released = output.release()
        parts = output.parts(released[0])
        prompt = len(request.prompt), known()
        seed, count = request.sampler.params.seed, len(output.token_ids)
        usage = usage_of(request.method, seed, prompt, count, cycles, figures, request.lookahead)
        if (predicted := request.predicted) is not None:
            predicted.follow([*request.prompt, *output.token_ids])
            usage = replace(usage, prediction_accepted=predicted.accepted, prediction_rejected=predicted.rejected)
        usage = replace(usage, accepted_per_draft=tuple(request.draft_accepted))
        text = output.text if request.has_text else None
        message = None if request.reader is None else output.message
        ids, reason = tuple(output.token_ids), output.finish_reason
        state.result = Result(text, ids, reason, output.stop, usage, message)
    finally:
        if output.stop is None:  # the turn was left early
            output.finish("cancelled")
            output.parts(output.release()[0])
        state.end(output)
    yield Piece(*released, state.result, parts)


def _add(cycle: Cycle, request: Request, output: Output) -> None:
    """Hand the tokens of a cycle to the output, up to the one that ends it."""
    records = cycle.step.log_probs
    tokens, accepted = cycle.step.tokens.tolist(), cycle.step.num_accepted
    for number, token in enumerate(tokens):
        complete = number == len(tokens) - 1 and request.sampler.finished
        if not output.add(token, number < accepted, records[number] if records else None, complete=complete):
            return


class _Times:
    """Seconds of an answer, without those in which the consumer had its turn."""

    def __init__(self) -> None:
        self._started = self._first = time.perf_counter()
        self._elsewhere = 0.0  # since the first token, or before there is one since the beginning
        self._before = 0.0
        self._waited = 0.0  # before the first token

    def elsewhere(self, left: float) -> None:
        """The consumer had its turn since `left`, a time of the clock: that does not count."""
        self._elsewhere += time.perf_counter() - left

    def first_token(self, waited: float) -> None:
        """The first token has come. waited: seconds that were waited for other callers so far."""
        self._first = time.perf_counter()
        self._waited, self._before, self._elsewhere = waited, self._elsewhere, 0.0

    def figures(self, waited: float) -> tuple[float, float, float]:
        """Returns the seconds of waiting before the first token, of prefill, and of decode. waited: as above."""
        prefill = self._first - self._started - self._before - self._waited
        decode = time.perf_counter() - self._first - self._elsewhere - (waited - self._waited)
        return self._waited, max(0.0, prefill), max(0.0, decode)
