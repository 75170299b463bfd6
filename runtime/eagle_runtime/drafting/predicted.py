"""Drafts from a text that the application expects in the answer, such as the file that is to be changed.

An answer that repeats most of a text follows it, leaves it where something changes, and comes back to it. So the place
where it left is remembered, and of all places that match its last tokens the one nearest to that counts.
"""

from __future__ import annotations

from collections.abc import Sequence

SHORTEST = 2  # tokens that a match must have: one alone matches everywhere
LONGEST = 16  # longer matches count as matches of this length [-0.9 %, +0.1 %]
PLACES = 8  # of a pair of tokens that are searched: the nearest, or of the output itself the latest [0.0 %, 0.0 %]


class PredictedText:
    """The expected text, and how far the answer has followed it. One object per generation."""

    def __init__(self, prompt: Sequence[int], tokens: Sequence[int]) -> None:
        """prompt: what the answer comes after; tokens: that are expected."""
        before = list(prompt[-LONGEST:])  # so that the beginning of the answer matches the beginning of the text
        self._text = [*before, *tokens]
        self._first = len(before)
        self._places: dict[tuple[int, int], list[int]] = {}  # pair of tokens -> positions of the tokens after it
        for place in range(max(SHORTEST, self._first), len(self._text)):
            self._places.setdefault((self._text[place - 2], self._text[place - 1]), []).append(place)
        self._seen = len(prompt)  # tokens of prompt and answer that were looked at
        self._next = self._first  # where the answer goes on if it follows the text
        self._followed: set[int] = set()  # positions that the answer has followed

    @property
    def accepted(self) -> int:
        """How many of the expected tokens the answer has."""
        return len(self._followed)

    @property
    def rejected(self) -> int:
        """How many it does not have."""
        return len(self._text) - self._first - len(self._followed)

    def follow(self, tokens: Sequence[int]) -> None:
        """Look at the new tokens of the answer. tokens: prompt and answer so far."""
        text = self._text
        following = True
        for token in tokens[self._seen :]:
            following = following and self._next < len(text) and text[self._next] == token
            if following:
                self._followed.add(self._next)
            self._next += 1
        self._seen = len(tokens)

    def continuation(self, tokens: Sequence[int], count: int) -> tuple[list[int], int]:
        """Returns at most `count` tokens that may come next, and how many of the last tokens match those before them.
        tokens: prompt and answer so far. No tokens and 0 where nothing matches."""
        self.follow(tokens)
        pair = (tokens[-2], tokens[-1]) if len(tokens) > 1 else (-1, -1)
        near = sorted(self._places.get(pair, []), key=lambda place: abs(place - self._next))[:PLACES]
        best = (0, 0)
        for place in near:
            length = SHORTEST
            while length < min(LONGEST, place, len(tokens)) and self._text[place - 1 - length] == tokens[-1 - length]:
                length += 1
            if length > best[1]:
                best = (place, length)
        place, length = best
        if length:
            self._next = place
        return self._text[place : place + count] if length else [], length
