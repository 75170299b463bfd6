"""The exponential random numbers that decide draws, and what is kept of them.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache

import numpy as np

from eagle_runtime.filters import Row
from eagle_runtime.tree import MAX_DEPTH, Int

TINY = np.finfo(np.float64).tiny
KEPT = 2 * (MAX_DEPTH + 1)  # positions: those of a tree, and as many that were made ahead
# Positions that stay when their tokens are drawn. Were they dropped at once, the allocator would give their memory back
# to the system and take it again for the next: three times the time of making the numbers.
KEPT_DRAWN = 16


def exponential_noise(seed: int, position: int, count: int) -> Row:
    """Returns [count] exponential random numbers of an absolute position, one per token, all above 0, of Philox, a
    counter-based generator (Salmon et al. 2011)."""
    generator = np.random.Generator(np.random.Philox(counter=[0, 0, 0, position], key=seed))
    numbers: Row = generator.standard_exponential(count)
    # Not in place: with arrays freed in that order the allocator gives more memory back to the system between draws
    # (470 page faults per draw of 128,256 tokens, and twice the time; otherwise fewer than 50).
    return np.maximum(numbers, TINY)


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


class Noise:
    """The numbers of one seed. A drafter reads those of a position some passes before they decide a draw, so they are
    kept until `forget`. Used by one thread."""

    def __init__(self, seed: int, vocab_size: int) -> None:
        self._seed = seed
        self._vocab_size = vocab_size
        self._kept: dict[int, Row | Future[Row]] = {}  # the one that was read last is last
        self._lowest: dict[tuple[int, int], Int] = {}

    def at(self, position: int) -> Row:
        """Returns the numbers [V] of an absolute position."""
        kept = self._kept.pop(position, None)
        if isinstance(kept, Future):
            kept = None if kept.cancel() else kept.result()  # one that has not begun is made here
        numbers = exponential_noise(self._seed, position, self._vocab_size) if kept is None else kept
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
                future = workers().submit(exponential_noise, self._seed, position, self._vocab_size)
                self._keep(position, future)

    def forget(self, before: int) -> None:
        """Positions before this one have drawn their tokens: of these no more are kept than KEPT_DRAWN leaves room."""
        while len(self._kept) > KEPT_DRAWN and (oldest := min(self._kept)) < before:
            del self._kept[oldest]
        while len(self._lowest) > KEPT_DRAWN and (least := min(self._lowest))[0] < before:
            del self._lowest[least]

    def _keep(self, position: int, numbers: Row | Future[Row]) -> None:
        self._kept[position] = numbers
        if len(self._kept) > KEPT:
            del self._kept[next(iter(self._kept))]
