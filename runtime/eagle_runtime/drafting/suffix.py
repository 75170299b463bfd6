"""A suffix automaton of a growing text (Blumer et al. 1985; as a drafter: SAM-Decoding, arXiv 2411.10666). It finds the
longest end of the text that occurred before, in constant time per token on average.

A state stands for all substrings that end at the same places; its link leads to the longest end of these that occurs at
more places.
"""

from __future__ import annotations

from collections.abc import Sequence

HOPS = 16  # links of a new token's state whose latest place is brought up to date: bounds the work [0.0 %, 0.0 %]


def following_tokens(tokens: list[int], place: int, count: int) -> list[int]:
    """Returns at most `count` tokens of a text from a position on. Where they reach the text's end they go on from the
    position again: the text may be a loop."""
    following = tokens[place : place + count]
    while following and len(following) < count:
        following += following[: count - len(following)]
    return following


class SuffixAutomaton:
    """The text so far, and where its end occurred before."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._next: list[dict[int, int]] = [{}]  # of a state: token -> state
        self._link = [-1]
        self._length = [0]  # of a state's longest substring
        self._place = [0]  # the position after the latest known occurrence
        self._last = 0  # the state of the whole text
        self._match = (0, 0)

    def extend(self, tokens: Sequence[int]) -> None:
        """Add new tokens. tokens: the whole text so far, which begins with the text that was added before."""
        for token in tokens[len(self._tokens) :]:
            self._add(token)

    def match(self) -> tuple[int, int]:
        """Returns the position after an earlier occurrence of the text's longest end that has one, and the length of
        that end; (0, 0) if there is none. The occurrence is the latest one, or an older one after many repetitions."""
        return self._match

    def continuation(self, place: int, count: int) -> list[int]:
        """As in following_tokens."""
        return following_tokens(self._tokens, place, count)

    def _add(self, token: int) -> None:
        self._tokens.append(token)
        state = self._new({}, -1, len(self._tokens), len(self._tokens))
        above, self._last = self._last, state
        while above >= 0 and token not in self._next[above]:
            self._next[above][token] = state
            above = self._link[above]
        self._link[state] = 0 if above < 0 else self._exact(above, token)
        link = self._link[state]
        self._match = (self._place[link], self._length[link]) if link else (0, 0)
        for _ in range(HOPS):
            if link <= 0:
                break
            self._place[link] = len(self._tokens)
            link = self._link[link]

    def _exact(self, above: int, token: int) -> int:
        """Returns the state of the longest substring of state `above` with the token after it, made if it shares one
        with longer substrings."""
        shared = self._next[above][token]
        if self._length[shared] == self._length[above] + 1:
            return shared
        own = self._new(dict(self._next[shared]), self._link[shared], self._length[above] + 1, self._place[shared])
        while above >= 0 and self._next[above].get(token) == shared:
            self._next[above][token] = own
            above = self._link[above]
        self._link[shared] = own
        return own

    def _new(self, following: dict[int, int], link: int, length: int, place: int) -> int:
        self._next.append(following)
        self._link.append(link)
        self._length.append(length)
        self._place.append(place)
        return len(self._link) - 1
