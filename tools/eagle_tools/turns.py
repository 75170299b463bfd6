"""Generations that are compared take turns, so that whatever else the machine does slows all of them alike.

A run is a generator that yields its number of tokens so far wherever another run may have its turn, and returns its
result. On the CPU that is after every cycle; on other engines a run is one turn."""

from __future__ import annotations

import time
from collections.abc import Generator, Iterator, Sequence
from typing import Any, TypeVar

from eagle_runtime import EagleModel, Result, SamplingParams
from eagle_runtime.app.turns import Prompt
from eagle_runtime.base.backend_names import on_cpu

WARM_UP = 8  # tokens that each contender generates before the first prompt that counts
TURN = 0.1  # minimum seconds of a turn: a small model must find its weights in the processor's caches again
PAUSE = 0.05  # seconds between first turns: threads of another engine may spin for some milliseconds

R = TypeVar("R")


def generation(
    model: EagleModel, prompt: Prompt, *, earlier_tokens: int = 0, **settings: Any
) -> Generator[int, None, Result]:
    """A run of one generation. No other run of the same model may take turns with it: give each a twin of the model.

    earlier_tokens: tokens of the same run before this generation. settings: as of EagleModel.generate,
    but that decoding is greedy unless they say otherwise."""
    count = earlier_tokens
    for piece in model.stream(prompt, **{"sampling": SamplingParams(), **settings}):
        if piece.result is not None:
            return piece.result
        count += len(piece.token_ids)
        if on_cpu(model.backend):
            yield count
    raise AssertionError("a stream ends with a result")


def starting_order(contenders: int, prompt: int) -> list[int]:
    """Returns the order in which the contenders begin the prompt of that number: a different one begins each time."""
    first = prompt % contenders
    return [*range(first, contenders), *range(first)]


def by_turns(runs: Sequence[Generator[int, None, R]], turn: float = TURN) -> Iterator[tuple[int, R]]:
    """Yields (index, result) of each run as it ends. After `turn` seconds it is the turn of the run with the fewest
    tokens, so that all runs proceed over the same time."""
    tokens = dict.fromkeys(range(len(runs)), 0)
    while tokens:
        index = min(tokens, key=tokens.__getitem__)
        begins = tokens[index] == 0
        if begins:
            time.sleep(PAUSE)
        ends = time.perf_counter() + turn
        try:
            tokens[index] = next(runs[index])
            while time.perf_counter() < ends:
                tokens[index] = next(runs[index])
        except StopIteration as end:
            del tokens[index]
            yield index, end.value
        if begins:
            time.sleep(PAUSE)
