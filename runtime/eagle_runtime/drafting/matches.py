"""N-gram matches: earlier places that a text's last tokens match, and what followed there. They are searched for in the
text itself (NgramIndex, SuffixAutomaton), and in one that the application expects in the answer (PredictedText)."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

SHORTEST = 2  # tokens that a match must have: one alone matches everywhere
LONGEST = 16  # longer matches count as matches of this length [-0.9 %, +0.1 %]
PLACES = 8  # of a pair of tokens that are searched: the nearest, or of the output itself the latest [0.0 %, 0.0 %]
HOPS = 16  # links of a new token's state whose latest place is brought up to date: bounds the work [0.0 %, 0.0 %]


def _longest(text: Sequence[int], places: Iterable[int], last: Sequence[int]) -> tuple[int, int]:
    """Returns the first of the places before which most of the tokens `last` stand, and how many they are. places:
    after a pair that ends `last`; (0, 0) for none."""
    best = (0, 0)
    for place in places:
        length = SHORTEST
        while length < min(LONGEST, place, len(last)) and text[place - 1 - length] == last[-1 - length]:
            length += 1
        if length > best[1]:
            best = (place, length)
    return best


def following_tokens(tokens: list[int], place: int, count: int) -> list[int]:
    """Returns at most `count` tokens of a text from a position on. Where they reach the text's end they go on from the
    position again: the text may be a loop."""
    following = tokens[place : place + count]
    while following and len(following) < count:
        following += following[: count - len(following)]
    return following


class NgramIndex:
    """An index of a growing text: the places where its last tokens occurred before."""

    def __init__(self) -> None:
        self._tokens: list[int] = []
        self._places: dict[tuple[int, int], list[int]] = {}  # pair of tokens -> positions of the tokens after it

    def extend(self, tokens: Sequence[int]) -> None:
        """Add new tokens. tokens: the whole text so far, which begins with the text that was added before."""
        known = self._tokens
        for token in tokens[len(known) :]:
            if len(known) >= SHORTEST:  # the token after a pair is known once it has come
                self._places.setdefault((known[-2], known[-1]), []).append(len(known))
            known.append(token)

    def match(self) -> tuple[int, int]:
        """Returns the position after the longest earlier match of the text's end (the latest of equally long ones), and
        the match's length; (0, 0) if there is none."""
        known = self._tokens
        places = self._places.get((known[-2], known[-1]), [])[-PLACES:] if len(known) > 1 else []
        return _longest(known, reversed(places), known)

    def continuation(self, place: int, count: int) -> list[int]:
        return following_tokens(self._tokens, place, count)


class SuffixAutomaton:
    """The text so far, and where its longest end that occurred before did so. Takes constant time per token on average
    (Blumer et al. 1985; as a drafter: SAM-Decoding, arXiv 2411.10666).

    A state stands for all substrings that end at the same places; its link leads to the longest end of these that
    occurs at more places."""

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


class PredictedText:
    """A text that the application expects in the answer, such as the file that is to be changed, and how far the answer
    has followed it. One object per generation.

    An answer that repeats most of a text follows it, leaves it where something changes, and comes back to it. So the
    place where it left is remembered, and of all places that match its last tokens the one nearest to that counts."""

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
        place, length = _longest(self._text, near, tokens)
        if length:
            self._next = place
        return self._text[place : place + count] if length else [], length


EarlierText = NgramIndex | SuffixAutomaton


def longest_match(
    index: EarlierText | None, predicted: PredictedText | None, tokens: Sequence[int], count: int
) -> tuple[list[int], int]:
    """Returns at most `count` tokens after the longest match of the last tokens, and its length: in the predicted text,
    or where the match is longer in the text itself. tokens: the text. No tokens and 0 where nothing matches."""
    following, length = ([], 0) if predicted is None else predicted.continuation(tokens, count)
    if index is not None:
        index.extend(tokens)
        place, own_length = index.match()
        if own_length > length:
            return index.continuation(place, count), own_length
    return following, length
