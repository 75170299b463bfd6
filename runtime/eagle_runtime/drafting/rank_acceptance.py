"""How often the target emits a drafter's first, second, third ... proposal after an accepted token, by the depth of
that token in the tree. Trees of the kind `sequoia` are planned from it (sequoia.py).

The counts are made while decoding: of every accepted node whose children were proposed, the token that the target
emitted there is looked for among all proposals, those that the tree left out too. So no rank has to be drafted to be
measured. They are kept in the user's cache folder, as costs are, and a bundle is never changed.

Shapes: L = LEVELS depths of a parent, the root's being 0; K = RANKS ranks of its proposals, best first.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from eagle_runtime.drafting.cost_model import Costs
from eagle_runtime.drafting.shapes import StaticTree
from eagle_runtime.machine.user_cache import machine_key, read_cached, write_cached

Chances = npt.NDArray[np.float64]  # [L, K]

LEVELS, RANKS = 10, 16  # as cost_aware.MAX_LEVELS; more than the ten children of a beam [of ranks +0.1 %, 0.0 %]
# Chances before any token was seen: those of CHILD_CHANCES in cost_aware.py for the first two ranks, then half of the
# rank before.
FIRST: Chances = np.concatenate([[0.6], 0.15 * 0.5 ** np.arange(RANKS - 1)])
PRIOR = 4.0  # counted tokens that FIRST weighs as much as, and all depths together in each one [+1.4 %, +2.0 %]
FADE = 0.998  # of all counts, per verification: texts change, and a tree is for the texts of late [0.0 %, +1.5 %]
# New verifications that are worth writing the file, when a model is closed and before; chosen: no more are lost.
SOME, MANY = 32, 512
FORMAT = "ranks 1"


class Key(NamedTuple):
    """Whose proposals are counted: of a method, drafted greedily or for samples, with a constraint or without."""

    method: str
    greedy: bool
    constrained: bool


@dataclass(frozen=True, slots=True)
class Plan:
    """A static tree. rows: choice -> number of the row of proposals for its children, in the order in which the head
    makes them: the root's, then those of nodes with children. spent: seconds of the head's passes for it."""

    tree: StaticTree
    rows: dict[tuple[int, ...], int]
    spent: float


class RankCounts:
    """The counts of one kind of drafts. plans: by the number of other texts that share the passes, the plan of late
    with the costs and the verifications that it was made of (sequoia.py)."""

    def __init__(self, tried: Chances | None = None, emitted: Chances | None = None) -> None:
        """tried [L]: accepted nodes whose proposals were compared; emitted [L, K]: of them, those after which the
        proposal of each rank came."""
        self._tried = np.zeros(LEVELS) if tried is None else tried
        self._emitted = np.zeros((LEVELS, RANKS)) if emitted is None else emitted
        self.plans: dict[int, tuple[Plan, Costs, float]] = {}
        self.verifications = float(self._tried[0])  # that were counted, earlier runs' as far as they have not faded

    def learn(self, ranks: Iterable[int | None]) -> None:
        """Count a verified tree. ranks: of the token that was emitted after the root among the root's proposals, then
        after the first accepted node among its own, and so on; None where it is not among them."""
        self._tried *= FADE
        self._emitted *= FADE
        for depth, rank in enumerate(ranks):
            if depth == LEVELS:
                break
            self._tried[depth] += 1
            if rank is not None and rank < RANKS:
                self._emitted[depth, rank] += 1
        self.verifications += 1

    def chances(self) -> Chances:
        """Returns [L, K] chances that a proposal is emitted after an accepted parent. Depths that were seldom reached
        take after the mean of all depths, which takes after FIRST."""
        mean = (self._emitted.sum(0) + PRIOR * FIRST) / (self._tried.sum() + PRIOR)
        chances: Chances = (self._emitted + PRIOR * mean) / (self._tried[:, None] + PRIOR)
        return chances

    def as_json(self) -> dict[str, Any]:
        """The counts, as `from_json` reads them."""
        return {"tried": self._tried.tolist(), "emitted": self._emitted.tolist()}


def from_json(data: Any) -> RankCounts:
    """Raises ValueError, KeyError or TypeError for what no counts are."""
    tried, emitted = (np.array(data[name], np.float64) for name in ("tried", "emitted"))
    shaped = tried.shape == (LEVELS,) and emitted.shape == (LEVELS, RANKS)
    most = 1 / (1 - FADE) + 1
    if not shaped or not (tried >= 0).all() or not (tried <= most).all() or not (emitted >= 0).all():
        raise ValueError  # NaN too
    if not (emitted.sum(1) <= tried + 1e-6).all():
        raise ValueError
    return RankCounts(tried, emitted)


class Ranks:
    """The counts of a loaded bundle, shared by its twins, and the file in the user's cache folder that keeps them."""

    def __init__(self, file: str | None = None) -> None:
        """file: None: nothing keeps them."""
        self._file = file
        self._counts = {} if file is None else _read(file)
        self._written = self._verifications

    def of(self, key: Key) -> RankCounts:
        """The counts of one kind of drafts, which learn."""
        return self._counts.setdefault(key, RankCounts())

    @property
    def _verifications(self) -> float:
        return sum(counts.verifications for counts in self._counts.values())

    def save(self, least: float = SOME) -> None:
        """Write the counts to the file, if `least` verifications were counted since it was read or written."""
        if self._file is None or self._verifications - self._written < least:
            return
        self._written = self._verifications
        counts = [[*key, one.as_json()] for key, one in self._counts.items()]
        write_cached(self._file, {"format": FORMAT, "counts": counts})


def file_of(facts: Iterable[str]) -> str:
    """Returns the name of the file for a bundle. facts: the hashes of its files, and those of its draft bundle's."""
    return f"ranks-{machine_key([FORMAT, *facts])}.json"


def _read(file: str) -> dict[Key, RankCounts]:
    """Returns what the file holds; nothing if there is no such file, or it cannot be used."""
    data = read_cached(file)
    try:
        if data["format"] != FORMAT:
            return {}
        return {
            Key(str(method), bool(greedy), bool(constrained)): from_json(counts)
            for method, greedy, constrained, counts in data["counts"]
        }
    except (ValueError, KeyError, TypeError, OverflowError):
        return {}
