"""What forward passes cost: tables that draft trees are sized by, and measuring them beforehand.

A pass over n rows that see P rows before them takes about a(n) + P * b(n): measured for some n at two lengths of
context, and in between taken as straight lines.
"""

from __future__ import annotations

import functools
import itertools
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import numpy.typing as npt

from eagle_runtime.cache import Cache
from eagle_runtime.machine.user_cache import machine_key
from eagle_runtime.model import Features, Head, Target
from eagle_runtime.tree import Tree

Seconds = npt.NDArray[np.float64]
HeadPass = Literal["head", "first"]  # a level of the head's tree below another, and the first level

LARGEST = 64  # nodes of a tree whose size follows the costs
TARGET_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, LARGEST)
HEAD_ROWS = (1, 4, 10, 32)
FIRST_ROWS = (1, 4, 16, LARGEST)  # verified rows that the head reads: many behind a rest
BEFORE = 4  # rows of the head in the pass before a verification
CONTEXTS = (64, 2048)  # rows before a pass; less where the model serves less
ROUNDS = 4  # at least
ENOUGH_S = 2.0  # further rounds are begun before this, as short passes need
MAX_S = 20.0  # no further round is begun after this
# Of a table that is read, what no measurement gives.
FAR = 1 << 30  # rows before a pass
SLOWEST_S = 1e6  # seconds of a pass
TIMED = "cycles with the host's work"  # to be changed with what is timed


@dataclass(frozen=True, slots=True)
class Timings:
    """seconds[c][r]: of a pass over rows[r] rows behind contexts[c] others."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, context: int) -> Seconds:
        """[LARGEST + 1] seconds of a pass over 0, 1, 2 ... rows behind `context` others."""
        near, slope = line_of(self)
        seconds: Seconds = near + slope * max(0, context - self.contexts[0])
        return seconds


@functools.lru_cache(maxsize=16)
def line_of(timings: Timings) -> tuple[Seconds, Seconds]:
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

    @property
    def now(self) -> Costs:
        """These, whatever comes: as CostSource."""
        return self

    @property
    def asks_for_plain(self) -> bool:
        """Fixed costs ask for nothing, and learn nothing."""
        return False

    def drafted(self, kind: HeadPass, rows: int, context: int, seconds: float) -> None:
        """A pass of the head, which changes nothing."""


class CostSource(Protocol):
    """Where trees take their costs from, and what is told of drafting: fixed Costs, or LearnedCosts."""

    @property
    def now(self) -> Costs: ...

    @property
    def asks_for_plain(self) -> bool:
        """Whether the next verification should be one without drafts."""

    def drafted(self, kind: HeadPass, rows: int, context: int, seconds: float) -> None:
        """A pass of the head with the host's work on it. rows: 0 if it was another kind of work, as reading a
        prompt."""


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
    verifications, so it is for those who ask for it (`eagle-bench --tune`), never part of a generation.

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


def file_name(facts: Iterable[str]) -> str:
    """The name of the file that costs are kept in: equal for equal facts on a machine that looks the same."""
    return f"costs-{machine_key([TIMED, *facts])}.json"


def costs_from_json(data: dict[str, Any]) -> Costs:
    """Costs as dataclasses.asdict told them. Raises ValueError, KeyError, TypeError or OverflowError for anything else,
    and for numbers that no table holds."""
    names = ("head", "plain", "first")
    return Costs(_from_json(data["target"]), *(None if data[n] is None else _from_json(data[n]) for n in names))


def _from_json(data: dict[str, Any]) -> Timings:
    found = Timings(
        tuple(int(count) for count in data["rows"]),
        tuple(int(context) for context in data["contexts"]),
        tuple(tuple(float(second) for second in line) for line in data["seconds"]),
    )
    shaped = len(found.seconds) == len(found.contexts) and all(len(line) == len(found.rows) for line in found.seconds)
    counted = all(0 < row <= LARGEST for row in found.rows) and all(0 <= rows < FAR for rows in found.contexts)
    rising = all(a < b for numbers in (found.rows, found.contexts) for a, b in itertools.pairwise(numbers))
    timed = all(0 < second < SLOWEST_S for line in found.seconds for second in line)
    if not (shaped and counted and rising and timed and found.rows and len(found.contexts) in (1, 2)):
        raise ValueError
    return found
