"""The results of a generation: pieces of output, the stop condition, and statistics."""

from __future__ import annotations

import inspect
from collections.abc import Generator, Iterator
from dataclasses import dataclass
from typing import Literal

from eagle_runtime.errors import BusyError
from eagle_runtime.generate import Cycle
from eagle_runtime.threads.scheduler import Lease

FinishReason = Literal["stop", "length"]


@dataclass(frozen=True, slots=True)
class Stats:
    """Statistics of one generation.

    target_passes: forward passes of the target that verified a tree. tau: tokens emitted per such pass (1 without
    drafts); the first token comes from the prompt's pass, so neither of the two counts. tau_untrimmed: also counts
    accepted tokens that a stop token or max_new_tokens cut off, as EAGLE's authors do. accepted_per_depth[d]: passes
    that accepted at least d + 1 drafted tokens. prefill_s: seconds until the first token; decode_s: seconds after it,
    of which draft_s, verify_s and host_s; neither includes the consumer's time between two pieces of a stream, nor
    waiting for other callers. tokens_per_s: tokens after the first, per second of decode_s."""

    method: str
    seed: int
    prompt_tokens: int
    new_tokens: int
    target_passes: int
    tau: float
    tau_untrimmed: float
    accepted_per_depth: tuple[int, ...]
    prefill_s: float
    decode_s: float
    draft_s: float
    verify_s: float
    host_s: float
    tokens_per_s: float


@dataclass(frozen=True, slots=True)
class Result:
    """A finished generation. text is None if the bundle has no tokenizer. token_ids include the stop token.

    finish_reason: "stop" at an end-of-sequence or stop token, "length" at max_new_tokens or a full context."""

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stats: Stats


@dataclass(frozen=True, slots=True)
class Piece:
    """The output of one cycle. The last piece of a stream carries the result."""

    text: str
    token_ids: tuple[int, ...]
    result: Result | None = None


class Stream(Iterator[Piece]):
    """A generation piece by piece. Nothing is computed before the first piece is asked for, nor between two pieces.
    From the first piece on it holds the model's caches, until it ends or is closed or dropped."""

    def __init__(self, pieces: Generator[Piece, None, None], lease: Lease) -> None:
        self.lease = lease
        self._pieces = pieces

    def __next__(self) -> Piece:
        """Raises BusyError while another thread waits for a piece of this stream."""
        if inspect.getgeneratorstate(self._pieces) == inspect.GEN_RUNNING:
            raise BusyError("another thread waits for the next piece of this stream; one at a time may")
        return next(self._pieces)

    def close(self) -> None:
        """End the generation; a second call does nothing. Raises BusyError while another thread waits for a piece."""
        if inspect.getgeneratorstate(self._pieces) == inspect.GEN_RUNNING:
            raise BusyError("this stream is computing a piece; the thread that waits for it can close it afterwards")
        self._pieces.close()

    def __enter__(self) -> Stream:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


@dataclass
class StopCondition:
    """Where the output stops: at a token of `stop` or at `limit` tokens, also in the middle of a cycle's tokens."""

    stop: frozenset[int]
    limit: int
    reason: FinishReason | None = None

    def cut(self, new: list[int], emitted: int) -> list[int]:
        """Returns the part of `new` to emit after `emitted` earlier tokens; sets `reason` if the output ends in it."""
        for index, token in enumerate(new):
            if token in self.stop:
                self.reason = "stop"
            elif emitted + index + 1 == self.limit:
                self.reason = "length"
            if self.reason is not None:
                return new[: index + 1]
        return new


def stats_of(
    method: str,
    seed: int,
    prompt_tokens: int,
    new_tokens: int,
    cycles: list[Cycle],
    times: tuple[float, float],
) -> Stats:
    """Returns the statistics of a generation. times: seconds of prefill and of decode."""
    passes = len(cycles)
    accepted = [cycle.step.num_accepted for cycle in cycles]
    prefill_s, decode_s = times
    return Stats(
        method=method,
        seed=seed,
        prompt_tokens=prompt_tokens,
        new_tokens=new_tokens,
        target_passes=passes,
        tau=(new_tokens - 1) / passes if passes else 1.0,
        tau_untrimmed=(sum(accepted) + passes) / passes if passes else 1.0,
        accepted_per_depth=tuple(sum(a > d for a in accepted) for d in range(max(accepted, default=0))),
        prefill_s=prefill_s,
        decode_s=decode_s,
        draft_s=sum(cycle.draft_s for cycle in cycles),
        verify_s=sum(cycle.verify_s for cycle in cycles),
        host_s=sum(cycle.host_s for cycle in cycles),
        tokens_per_s=(new_tokens - 1) / decode_s if passes and decode_s > 0 else 0.0,
    )
