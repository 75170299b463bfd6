"""The exponential random numbers that decide draws, and what is kept of them.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache, cached_property

import numpy as np

from eagle_runtime.base.tree import MAX_DEPTH, Int
from eagle_runtime.sampling.native_draws import native_draws
from eagle_runtime.sampling.scores import Row

TINY = np.finfo(np.float64).tiny
KEPT_POSITIONS = 2 * (MAX_DEPTH + 1)  # positions: those of a tree, and as many that were made ahead
# Positions that stay when their tokens are drawn. Were they dropped at once, the allocator would give their memory back
# to the system and take it again for the next: three times the time of making the numbers.
KEPT_DRAWN, KEPT_BYTES = 16, 8 << 20  # the fewer of both, 4 at least

Numbers = tuple[Row, float]  # random numbers [V] of a position, and the smallest of them


def exponential_noise(seed: int, position: int, count: int) -> Row:
    """Returns [count] exponential random numbers of an absolute position, one per token, all above 0, of Philox, a
    counter-based generator (Salmon et al. 2011)."""
    return Stream(seed).at(position, count)[0]


class Stream:
    """The same for many positions of one seed, in less time: making a generator takes a sixth of making 49,152 numbers.
    Used by one thread."""

    def __init__(self, seed: int) -> None:
        self._seed = seed
        self._native = native_draws()
        if self._native is None:
            self._philox = np.random.Philox(key=seed)
            self._generator = np.random.Generator(self._philox)
            self._begin = self._philox.state
            self._counter = self._begin["state"]["counter"]

    def at(self, position: int, count: int) -> Numbers:
        """Returns the numbers [count] of an absolute position, and the smallest."""
        if self._native is not None:
            numbers = self._native.exponential(self._seed, position, count)
        else:
            self._counter[3] = position
            self._philox.state = self._begin
            numbers = self._generator.standard_exponential(count)
        least = float(numbers.min(initial=np.inf))
        if least < TINY:  # with a chance of 2e-16 per number
            numbers, least = np.maximum(numbers, TINY), float(TINY)
        return numbers, least


def lowest(numbers: Row, count: int) -> Int:
    """Returns the ids [count] of the smallest of exponential random numbers [V], smallest first."""
    # Numbers below x are about 1 - exp(-x) of all: a threshold that a few more than `count` pass spares a partition.
    share = (count + 6 * math.sqrt(count) + 8) / len(numbers)
    few = np.flatnonzero(numbers < -math.log1p(-share)) if share < 1 else np.arange(len(numbers))
    if len(few) < count:
        few = np.arange(len(numbers))
    return few[np.argsort(numbers[few])[:count]].astype(np.int64, copy=False)


@cache
def workers() -> ThreadPoolExecutor:
    """The threads that make numbers ahead; NumPy does so without the interpreter's lock."""
    return ThreadPoolExecutor(2, "eagle-noise")


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=workers.cache_clear)  # a copy of the process has none of these threads


class Noise:
    """The numbers of one seed. A drafter reads those of a position some passes before they decide a draw, so they are
    kept until `forget`. Used by one thread."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._most_drawn = max(4, min(KEPT_DRAWN, KEPT_BYTES // (8 * vocab_size)))
        self._kept: dict[int, Numbers | Future[Numbers]] = {}  # those that were read last are last
        self._lowest: dict[tuple[int, int], Int] = {}

    @cached_property
    def _stream(self) -> Stream:
        return Stream(self._seed)

    def at(self, position: int) -> Row:
        """Returns the numbers [V] of an absolute position."""
        return self._read(position)[0]

    def least(self, position: int) -> float:
        """Returns the smallest number of an absolute position."""
        return self._read(position)[1]

    def _read(self, position: int) -> Numbers:
        kept = self._kept.pop(position, None)
        if isinstance(kept, Future):
            kept = None if kept.cancel() else kept.result()  # one that has not begun is made here
        numbers = self._stream.at(position, self._vocab_size) if kept is None else kept
        self._keep(position, numbers)
        return numbers

    def lowest(self, position: int, count: int) -> Int:
        """Returns the ids [count] of the smallest numbers of an absolute position, smallest first."""
        key = position, count
        if key not in self._lowest:
            self._lowest[key] = lowest(self.at(position), count)
        return self._lowest[key]

    def prepare(self, positions: Iterable[int]) -> None:
        """Begin to make the numbers of positions on another thread."""
        for position in positions:
            if position not in self._kept:
                try:
                    future = workers().submit(Stream(self._seed).at, position, self._vocab_size)
                except RuntimeError:  # the interpreter ends, and this is another thread than the main one
                    return
                self._keep(position, future)

    def forget(self, before: int) -> None:
        """Drop numbers of positions before this one, whose tokens are drawn, until few positions are left."""
        while len(self._kept) > self._most_drawn and (oldest := min(self._kept)) < before:
            del self._kept[oldest]
        while len(self._lowest) > self._most_drawn and (least := min(self._lowest))[0] < before:
            del self._lowest[least]

    def _keep(self, position: int, numbers: Numbers | Future[Numbers]) -> None:
        self._kept[position] = numbers
        if len(self._kept) > KEPT_POSITIONS:
            del self._kept[next(iter(self._kept))]
