"""Drafts that cost no model: what followed the last time these tokens were seen (prompt lookup, arXiv 2304.04487)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_runtime.accept import Step
from eagle_runtime.errors import RequestError
from eagle_runtime.target import Features
from eagle_runtime.tree import MAX_DEPTH, Tree, root_only

SHORTEST = 2  # tokens that a match must have
LONGEST = 16  # a longer match is not told from one of this length
REMEMBERED = 8  # latest places of a pair of tokens that are looked at


class Suffixes:
    """An index of a growing text: where its last tokens stood before."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, int], list[int]] = {}  # a pair of tokens -> where what followed it stands

    def extend(self, tokens: Sequence[int]) -> None:
        """tokens: the whole text so far, of which this object has seen the beginning."""
        seen = self._tokens
        for token in tokens[len(seen) :]:
            if len(seen) >= SHORTEST:  # what follows a pair is known once it has come
                self._places.setdefault((seen[-2], seen[-1]), []).append(len(seen))
            seen.append(token)

    def match(self) -> tuple[int, int]:
        """The place in the text whose tokens before it match the text's end best, and how many do: the latest of the
        longest. (0, 0) if there is none."""
        seen = self._tokens
        best = (0, 0)
        for place in reversed(self._places.get((seen[-2], seen[-1]), [])[-REMEMBERED:] if len(seen) > 1 else []):
            length = SHORTEST
            while length < min(LONGEST, place) and seen[place - 1 - length] == seen[-1 - length]:
                length += 1
            if length > best[1]:
                best = (place, length)
        return best

    def continuation(self, place: int, count: int) -> list[int]:
        """At most `count` tokens from a place on. Where they reach the text's end they go on from the place again: the
        text may be a loop."""
        following = self._tokens[place : place + count]
        while following and len(following) < count:
            following += following[: count - len(following)]
        return following


class LookupDrafter:
    """A chain of what followed the longest earlier match. One object per generation."""

    def __init__(self, num_drafted: int = 10) -> None:
        if not 1 <= num_drafted <= MAX_DEPTH:
            raise RequestError(f"{num_drafted} tokens cannot be drafted by lookup; it must be 1 to {MAX_DEPTH}")
        self._num_drafted = num_drafted
        self._suffixes = Suffixes()

    def grow(self, tokens: Sequence[int], features: Features, max_nodes: int) -> Tree:
        self._suffixes.extend(tokens)
        place, length = self._suffixes.match()
        if length == 0:
            return root_only(tokens[-1])
        return chain_of(tokens[-1], self._suffixes.continuation(place, min(self._num_drafted, max_nodes - 1)))

    def learn(self, step: Step) -> None:
        """The next call of `grow` gets the whole text, and needs nothing else."""


def chain_of(root: int, drafted: Sequence[int]) -> Tree:
    """A tree without branches whose drafted tokens are all taken for certain."""
    count = 1 + len(drafted)
    return Tree(np.array([root, *drafted], np.int64), np.arange(-1, count - 1), np.zeros(count, np.float32))
