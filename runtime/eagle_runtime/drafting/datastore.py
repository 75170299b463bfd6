"""Drafts from a user's own text, of any length (REST, arXiv 2311.08252): all places where the last tokens occur in it,
and a tree of what follows there, the most frequent first.

The index is a suffix array of the text read backwards, sorted by LONGEST tokens: the places that match the last one,
two, three ... tokens of a context are ranges of it, each within the one before.

Shapes: n tokens of the text with a mark between documents, m places that match, M nodes of a tree of continuations.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Float, Int, best_first
from eagle_runtime.drafting.matches import LONGEST, SHORTEST

MARK = -1  # before each document, and after the last: no token's id
PLACES = 512  # that are counted; of more, so many at equal distances in the index: a share is known to 2 points


class Continuations(NamedTuple):
    """What follows the longest match: a tree under the root. tokens, parents (-1 under the root), counts [M]: places
    that go on with the path down to each node; the parent comes first. places: that match; length: tokens that
    match."""

    tokens: Int
    parents: Int
    counts: Int
    places: int
    length: int

    def main_path(self) -> list[int]:
        """Returns the nodes of the path that takes the most frequent child everywhere."""
        path = [-1]
        while len(children := np.flatnonzero(self.parents == path[-1])):
            path.append(int(children[self.counts[children].argmax()]))
        return path[1:]

    def shares(self) -> Float:
        """Returns log-shares [M] of the places that go on with each node among those that reach its parent."""
        above = np.where(self.parents < 0, self.places, self.counts[self.parents])
        shares: Float = np.log(self.counts / above).astype(np.float32)
        return shares


NOTHING = Continuations(np.zeros(0, np.int64), np.zeros(0, np.int64), np.zeros(0, np.int64), 0, 0)


class Datastore:
    """The index; it never changes, and any thread may read it."""

    def __init__(self, documents: Sequence[Sequence[int]], report: Callable[[int, int], None] | None = None) -> None:
        """documents: token ids, which no match crosses. report: called with the sorting passes done, and
        all of them."""
        parts: list[npt.ArrayLike] = [[MARK]]
        for document in documents:
            parts += [document, [MARK]]
        text = np.concatenate([np.asarray(part, np.int32) for part in parts])[::-1]
        self._order = _sorted_suffixes(text, report or (lambda done, total: None))
        self._text = np.concatenate([text, np.full(LONGEST, MARK, np.int32)])

    def __len__(self) -> int:
        return len(self._order)

    def places(self, context: Sequence[int]) -> tuple[Int, int]:
        """Returns the places [m] in the backward text where the most of the context's last tokens occur, and how many
        they are; fewer than SHORTEST count as none."""
        low, high, length = 0, len(self._order), 0
        while length < min(LONGEST, len(context)):
            token = context[-1 - length]

            def at(place: int, depth: int = length) -> int:
                return int(self._text[place + depth])

            first = bisect_left(self._order, token, low, high, key=at)
            last = bisect_right(self._order, token, first, high, key=at)
            if first == last:
                break
            low, high, length = first, last, length + 1
        if length < SHORTEST:
            return np.zeros(0, np.int64), 0
        count = min(PLACES, high - low)
        return self._order[low + np.arange(count) * (high - low) // count].astype(np.int64), length

    def continuations(self, context: Sequence[int], nodes: int, depth: int, beyond: int = 0) -> Continuations:
        """Returns the most frequent `nodes` continuations, at most `depth` tokens deep, if more than `beyond` of the
        context's last tokens match."""
        places, length = self.places(context)
        if length <= beyond or nodes < 1 or depth < 1:
            return NOTHING
        steps = places[:, None] - 1 - np.arange(depth)
        following = np.where(steps >= 0, self._text[np.maximum(steps, 0)], MARK).astype(np.int64)
        above = np.full(len(places), -1)
        tokens: list[Int] = []
        parents: list[Int] = []
        counts: list[Int] = []
        size = 0
        for column in range(depth):
            goes_on = following[:, column] != MARK
            above, following = above[goes_on], following[goes_on]
            if len(above) == 0:
                break
            pairs, node_of, count = np.unique(
                (above + 1 << 32) + following[:, column], return_inverse=True, return_counts=True
            )
            tokens.append(pairs & 0xFFFFFFFF)
            parents.append((pairs >> 32) - 1)
            counts.append(count.astype(np.int64))
            above = size + node_of
            size += len(count)
        if size == 0:
            return NOTHING
        hits = [np.concatenate(part).astype(np.int64) for part in (tokens, parents, counts)]
        kept = np.sort(best_first(hits[2].astype(np.float32), nodes))
        number = np.full(size + 1, -1, np.int64)  # the last one serves parent -1
        number[kept] = np.arange(len(kept))
        return Continuations(hits[0][kept], number[hits[1][kept]], hits[2][kept], len(places), length)


def _sorted_suffixes(text: npt.NDArray[np.int32], report: Callable[[int, int], None]) -> npt.NDArray[np.int64]:
    """Returns the places of a text sorted by the LONGEST tokens from each on, by doubling what is compared."""
    rank = text.astype(np.int64) - MARK
    known, done, total = 1, 0, LONGEST.bit_length()
    order = np.argsort(rank, kind="stable")
    while known < LONGEST:
        report(done, total)
        next_rank = np.zeros_like(rank)
        next_rank[:-known] = rank[known:]
        pairs = rank * (int(next_rank.max()) + 1) + next_rank
        order = np.argsort(pairs, kind="stable")
        differs = np.diff(pairs[order]) != 0
        rank[order] = np.concatenate([[0], np.cumsum(differs)]) + 1
        known, done = 2 * known, done + 1
    report(total, total)
    return order.astype(np.int64)
