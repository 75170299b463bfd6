"""What passes cost on this machine: measured once, kept in the user's cache folder, used to size draft trees.

A pass over n rows that see P rows before them takes about a(n) + P * b(n): measured for some n at two lengths of
context, and in between taken as straight lines.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from eagle_runtime.cache import Cache
from eagle_runtime.model import Features, Head, Target
from eagle_runtime.tree import Tree
from eagle_runtime.user_cache import machine_key, read_json, write_json

Seconds = npt.NDArray[np.float64]

LARGEST = 64  # nodes of a tree whose size follows the costs
TARGET_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, LARGEST)
HEAD_ROWS = (1, 4, 10, 32)
FIRST_ROWS = (1, 4, 16, LARGEST)  # verified rows that the head reads: many behind a rest
BEFORE = 4  # rows of the head in the pass before a verification
CONTEXTS = (64, 2048)  # rows before a pass; less where the model serves less
ROUNDS = 4  # at least
ENOUGH_S = 2.0  # further rounds are begun before this, as short passes need
MAX_S = 20.0  # no further round is begun after this
MEASURED = "sampled drafts and rests, in four turns, medians of shares"  # to be changed with what is timed


@dataclass(frozen=True, slots=True)
class Timings:
    """seconds[c][r]: of a pass over rows[r] rows behind contexts[c] others."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, context: int) -> Seconds:
        """[LARGEST + 1] seconds of a pass over 0, 1, 2 ... rows behind `context` others."""
        near, slope = _line(self)
        seconds: Seconds = near + slope * max(0, context - self.contexts[0])
        return seconds


@functools.lru_cache(maxsize=16)
def _line(timings: Timings) -> tuple[Seconds, Seconds]:
    """[LARGEST + 1] seconds of passes behind the shorter context, and seconds more for each row before them."""
    counts = np.arange(LARGEST + 1)
    # A pass over more rows never takes less; where it seems to, the smaller one was disturbed.
    near, *far = (np.interp(counts, timings.rows, np.minimum.accumulate(line[::-1])[::-1]) for line in timings.seconds)
    if not far:
        return near, np.zeros_like(near)
    short, long = timings.contexts
    return near, np.maximum(far[0] - near, 0) / (long - short)


@dataclass(frozen=True, slots=True)
class Costs:
    """Of verifying a tree, and of growing one by a level; None without a head. Both with the host's own work.

    A pass takes less behind one of the same graph than behind the other, whose threads and weights come in between.
    plain: of verifications of one row that follow each other; None: as in `target`. first: of the pass of the head that
    follows a verification, and reads the rows that it accepted; None: as in `head`."""

    target: Timings
    head: Timings | None
    plain: Timings | None = None
    first: Timings | None = None

    def plain_at(self, context: int) -> float:
        """Seconds of a token without drafts."""
        return float((self.plain or self.target).at(context)[1])


class Drafting(Protocol):
    """What drafting does beside the verification, as often as asked, so that it can be timed."""

    @property
    def head(self) -> Head: ...

    def read(self, rows: int) -> None:
        """The first level of a tree, from `rows` verified ones: the pass of the head and the host's work."""

    def level(self, rows: int) -> None:
        """A level of a tree below `rows` nodes, likewise."""

    def tree(self) -> None:
        """The host's work on a tree, whatever its size."""


def measure(target: Target, rehearse: Callable[[Features], Drafting] | None) -> Costs:
    """Time passes of both graphs and the work between them; the caches are empty afterwards. Takes about 150
    verifications.

    rehearse: begins drafting from any features [1, Hd]; None without a head."""
    _, features = target.prefill([0])

    def verify(rows: int) -> None:
        parents = np.zeros(rows, np.int64)
        parents[0] = -1
        target.verify(Tree(np.zeros(rows, np.int64), parents, np.zeros(rows, np.float32)))

    if rehearse is None:
        alone = _Series(target.cache, verify, TARGET_ROWS, lambda: verify(1))
        found = Costs(_measured([alone])[0], None)
    else:
        drafting = rehearse(features)
        head = drafting.head
        rows = tuple(count for count in HEAD_ROWS if count <= head.scratch)
        before = min(BEFORE, head.scratch)

        def verify_tree(rows: int) -> None:
            drafting.tree()
            verify(rows)

        behind = _Series(target.cache, verify_tree, TARGET_ROWS, lambda: drafting.level(before))
        levels = _Series(head.cache, drafting.level, rows, lambda: drafting.level(before))
        plain = _Series(target.cache, verify, (1,), lambda: verify(1))
        first = _Series(head.cache, drafting.read, FIRST_ROWS, lambda: verify(1))
        found = Costs(*_measured([behind, levels, plain, first]))
        head.cache.truncate(0)
    target.cache.truncate(0)
    return found


class _Series:
    """Passes over several numbers of rows, at both ends of a cache."""

    def __init__(
        self, cache: Cache, one_pass: Callable[[int], None], rows: tuple[int, ...], before: Callable[[], None]
    ) -> None:
        """before: what comes before each pass in use; it is not timed."""
        self._cache = cache
        self._pass = one_pass
        self._before = before
        room = cache.capacity - max(rows)
        self._contexts = tuple(sorted({min(context, room) for context in CONTEXTS if room > 0} or {0}))
        self._rows = tuple(count for count in rows if count <= cache.capacity)

    def run(self) -> Seconds:
        """[contexts, rows] seconds of a pass."""
        seconds = np.zeros((len(self._contexts), len(self._rows)))
        for c, context in enumerate(self._contexts):
            self._cache.pretend(context)
            for r, count in enumerate(self._rows):
                self._before()
                begun = time.perf_counter()
                self._pass(count)
                seconds[c, r] = time.perf_counter() - begun
        return seconds

    def timings(self, seconds: Seconds) -> Timings:
        return Timings(self._rows, self._contexts, tuple(tuple(line) for line in seconds.tolist()))


def _measured(series: Sequence[_Series]) -> list[Timings]:
    """Rounds of all series in turns. Of a pass counts the median of its shares in the rounds' time, since a machine
    that is slower in one round than in the next is so for all passes."""
    rounds: list[list[Seconds]] = []
    started = time.perf_counter()
    for number in itertools.count():
        spent = time.perf_counter() - started
        if (number > ROUNDS and spent > ENOUGH_S) or (number > 1 and spent > MAX_S):
            break
        found = [one.run() for one in series]
        if number > 0:  # the first round warms up
            rounds.append(found)
    stacks = [np.stack(mine) for mine in zip(*rounds, strict=True)]  # of each series [rounds, contexts, rows]
    totals = np.sum([stack.sum((1, 2), keepdims=True) for stack in stacks], axis=0)
    usual = np.median(totals)
    return [one.timings(usual * np.median(stack / totals, axis=0)) for one, stack in zip(series, stacks, strict=True)]


def fingerprint(facts: Iterable[str]) -> str:
    """What measured costs are kept under: equal for equal facts on a machine that looks the same."""
    return machine_key([MEASURED, *facts])


def read_costs(key: str) -> Costs | None:
    """What was measured before under a fingerprint; None if nothing was, or it cannot be read."""
    data = read_json(f"costs-{key}.json")
    try:
        names = ("head", "plain", "first")
        return Costs(_from_json(data["target"]), *(None if data[n] is None else _from_json(data[n]) for n in names))
    except (ValueError, KeyError, TypeError):
        return None


def write_costs(key: str, costs: Costs) -> None:
    """Keep costs for later runs."""
    write_json(f"costs-{key}.json", dataclasses.asdict(costs))


def _from_json(data: dict[str, Any]) -> Timings:
    found = Timings(
        tuple(int(count) for count in data["rows"]),
        tuple(int(context) for context in data["contexts"]),
        tuple(tuple(float(second) for second in line) for line in data["seconds"]),
    )
    shaped = len(found.seconds) == len(found.contexts) and all(len(line) == len(found.rows) for line in found.seconds)
    if not shaped or not found.rows or len(found.contexts) not in (1, 2) or not np.all(np.array(found.seconds) > 0):
        raise ValueError
    return found
