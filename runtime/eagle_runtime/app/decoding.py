"""One answer, token by token: the loop's events become pieces, until the answer ends or somebody stops it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Generator, Iterator
from dataclasses import replace

from eagle_runtime.app.output import Output
from eagle_runtime.app.request import Request
from eagle_runtime.app.result import Piece, Result, usage_of
from eagle_runtime.app.turn import TurnState
from eagle_runtime.core.generate import Cycle, Reading
from eagle_runtime.core.rounds import Wish
from eagle_runtime.core.scheduler import Lease, Scheduler
from eagle_runtime.core.session import SharedPass

Work = Iterator[Reading | Cycle | SharedPass]


def decode(
    scheduler: Scheduler,
    lease: Lease,
    work: Work,
    request: Request,
    output: Output,
    state: TurnState,
    known: Callable[[], int],
) -> Generator[Piece | Wish, None, None]:
    """Yields the pieces of an answer, the last one with the result, and before them the wishes for the steps that they
    need, as Scheduler.asking does. work: the loop's events, each computed in a step of its own. known: returns how many
    tokens of the prompt did not have to be read."""
    cycles: list[Cycle] = []
    result: Result | None = None
    times = _Times()
    steps = scheduler.asking(lease, work)
    try:
        with contextlib.closing(steps):
            while output.stop is None:
                event = None if state.cancelled else next(steps, None)
                if isinstance(event, Wish):
                    yield event
                    event = next(steps, None)
                if event is None:
                    output.finish("cancelled" if state.cancelled else "context_full")
                    break
                assert not isinstance(event, SharedPass | Wish), "a round runs it"
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
                elif output.stop is None and (piece := output.release()).tokens:
                    left = time.perf_counter()
                    yield piece
                    times.elsewhere(left)
        figures = times.figures(lease.waited)
        piece = output.release()
        result = _result(request, output, cycles, figures, known())
    finally:
        if output.stop is None:  # the turn was left early
            output.finish("cancelled")
            output.release()
        state.end(output, result)
    yield replace(piece, result=result)


def _result(
    request: Request, output: Output, cycles: list[Cycle], figures: tuple[float, float, float], known: int
) -> Result:
    """The result of an answer that has ended. figures: seconds, as in usage_of; known: as in decode, of now."""
    assert output.stop is not None
    prompt, seed = (len(request.prompt), known), request.sampler.params.seed
    usage = usage_of(request.method, seed, prompt, len(output.token_ids), cycles, figures, request.lookahead)
    usage = replace(usage, accepted_per_draft=tuple(request.draft_accepted))
    if (predicted := request.predicted) is not None:
        predicted.follow([*request.prompt, *output.token_ids])
        usage = replace(usage, prediction_accepted=predicted.accepted, prediction_rejected=predicted.rejected)
    message = None if request.reader is None else output.message
    scored = () if request.scores is None else request.scores.tokens
    return Result(output.shown_text, tuple(output.token_ids), output.finish_reason, output.stop, usage, message, scored)


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
