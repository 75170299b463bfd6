"""What passes cost on this machine: measured once, kept in the user's cache folder, used to size draft trees.

A pass over n rows that see P rows before them takes about a(n) + P * b(n): measured for some n at two lengths of
context, and in between taken as straight lines.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from eagle_runtime.cache import Cache
from eagle_runtime.model import Features, Head, Target
from eagle_runtime.tree import Tree

Seconds = npt.NDArray[np.float64]

LARGEST = 64  # nodes of a tree whose size follows the costs
TARGET_ROWS = (1, 2, 4, 8, 16, 24, 32, 48, LARGEST)
HEAD_ROWS = (1, 4, 10, 32)
BEFORE = 4  # rows of the head in the pass before a verification
CONTEXTS = (64, 2048)  # rows before a pass; less where the model serves less
ROUNDS = 2  # of which the fastest counts: what else the machine does only ever adds
MEASURED = "levels and trees"  # to be changed with what is timed
MAX_S = 20.0  # no further round is begun after this


@dataclass(frozen=True, slots=True)
class Timings:
    """seconds[c][r]: of a pass over rows[r] rows behind contexts[c] others."""

    rows: tuple[int, ...]
    contexts: tuple[int, ...]
    seconds: tuple[tuple[float, ...], ...]

    def at(self, context: int) -> Seconds:
        """[LARGEST + 1] seconds of a pass over 0, 1, 2 ... rows behind `context` others."""
        counts = np.arange(LARGEST + 1)
        # A pass over more rows never takes less; where it seems to, the smaller one was disturbed.
        lines = [np.interp(counts, self.rows, np.minimum.accumulate(line[::-1])[::-1]) for line in self.seconds]
        if len(lines) == 1:
            return lines[0]
        (short, long), (near, far) = self.contexts, lines
        slope = np.maximum(far - near, 0) / (long - short)
        seconds: Seconds = near + slope * max(0, context - short)
        return seconds


@dataclass(frozen=True, slots=True)
class Costs:
    """Of verifying a tree, and of growing one by a level; None without a head. Both with the host's own work.

    plain: of verifications of one row that follow each other, which take less than behind a pass of the head, whose
    threads and weights come in between; None: as in `target`."""

    target: Timings
    head: Timings | None
    plain: Timings | None = None

    def plain_at(self, context: int) -> float:
        """Seconds of a token without drafts."""
        return float((self.plain or self.target).at(context)[1])


class Drafting(Protocol):
    """What drafting does beside the verification, as often as asked, so that it can be timed."""

    @property
    def head(self) -> Head: ...

    def level(self, rows: int) -> None:
        """A level of a tree below `rows` nodes: the pass of the head and the host's work."""

    def tree(self) -> None:
        """The host's work on a tree, whatever its size."""


def measure(target: Target, rehearse: Callable[[Features], Drafting] | None) -> Costs:
    """Time passes of both graphs and the work between them; the caches are empty afterwards. Takes about 60
    verifications.

    rehearse: begins drafting from any features [1, Hd]; None without a head."""
    _, features = target.prefill([0])

    def verify(rows: int) -> None:
        parents = np.zeros(rows, np.int64)
        parents[0] = -1
        target.verify(Tree(np.zeros(rows, np.int64), parents, np.zeros(rows, np.float32)))

    if rehearse is None:
        found = Costs(_timings(target.cache, verify, TARGET_ROWS), None)
    else:
        drafting = rehearse(features)
        head = drafting.head

        def verify_tree(rows: int) -> None:
            drafting.tree()
            verify(rows)

        rows = tuple(count for count in HEAD_ROWS if count <= head.scratch)
        plain = _timings(target.cache, verify, (1,))
        before = min(BEFORE, head.scratch)
        behind = _timings(target.cache, verify_tree, TARGET_ROWS, before=lambda: drafting.level(before))
        found = Costs(behind, _timings(head.cache, drafting.level, rows), plain)
        head.cache.truncate(0)
    target.cache.truncate(0)
    return found


def _timings(
    cache: Cache, one_pass: Callable[[int], None], rows: tuple[int, ...], before: Callable[[], None] = lambda: None
) -> Timings:
    """before: what comes before each pass in use; it is not timed."""
    room = cache.capacity - max(rows)
    contexts = tuple(sorted({min(context, room) for context in CONTEXTS if room > 0} or {0}))
    rows = tuple(count for count in rows if count <= cache.capacity)
    best = np.full((len(contexts), len(rows)), np.inf)
    started = time.perf_counter()
    for number in range(1 + ROUNDS):
        if number > 1 and time.perf_counter() - started > MAX_S:
            break
        for c, context in enumerate(contexts):
            cache.truncate(0)
            cache.advance(context)  # whatever these rows hold, they take the same time
            for r, count in enumerate(rows):
                before()
                begun = time.perf_counter()
                one_pass(count)
                if number > 0:  # the first round warms up
                    best[c, r] = min(best[c, r], time.perf_counter() - begun)
    return Timings(rows, contexts, tuple(tuple(line) for line in best.tolist()))


def fingerprint(facts: Iterable[str]) -> str:
    """What measured costs are kept under: equal for equal facts on a machine that looks the same."""
    machine = [MEASURED, sys.platform, processor_name(), str(os.cpu_count())]
    return hashlib.sha256("\n".join([*machine, *facts]).encode()).hexdigest()[:32]


def processor_name() -> str:
    """As the system calls it; the mere architecture where it does not say."""
    import platform

    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
        return next(line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def cache_folder() -> Path:
    """Where this user's programs keep what can be made again: EAGLE_CACHE, or the platform's own place."""
    if named := os.environ.get("EAGLE_CACHE"):
        return Path(named)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "eagle-edge"


def read_costs(key: str) -> Costs | None:
    """What was measured before under a fingerprint; None if nothing was, or it cannot be read."""
    try:
        data = json.loads((cache_folder() / f"costs-{key}.json").read_text(encoding="utf-8"))
        head, plain = (None if data[name] is None else _from_json(data[name]) for name in ("head", "plain"))
        return Costs(_from_json(data["target"]), head, plain)
    except (OSError, ValueError, KeyError, TypeError):
        return None


def write_costs(key: str, costs: Costs) -> None:
    """Keep costs for later runs. A folder that cannot be written only means that they measure again."""
    folder = cache_folder()
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8", suffix=".new", delete=False) as file:
            json.dump(dataclasses.asdict(costs), file)
        Path(file.name).replace(folder / f"costs-{key}.json")
    except OSError:
        return


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
