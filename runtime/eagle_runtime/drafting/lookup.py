"""Drafts without a model: the tokens that followed the longest earlier match of the text's last tokens, an n-gram match
(prompt lookup, arXiv 2304.04487)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from eagle_runtime.accept import Step
from eagle_runtime.drafting.predicted import LONGEST, SHORTEST, PredictedText
from eagle_runtime.errors import RequestError
from eagle_runtime.target import Features
from eagle_runtime.tree import MAX_DEPTH, Tree, root_only

PLACES = 8  # latest places of a pair of tokens that are searched


class EarlierText(Protocol):
    """Finds where the end of a growing text occurred before: an NgramIndex, or a suffix.SuffixAutomaton."""

    def extend(self, tokens: Sequence[int]) -> None:
        """Add new tokens. tokens: the whole text so far, which begins with the text that was added before."""

    def match(self) -> tuple[int, int]:
        """Returns the position after an earlier match of the text's end, and its length; (0, 0) if there is none."""

    def continuation(self, place: int, count: int) -> list[int]:
        """Returns at most `count` tokens from a position on, as following_tokens does."""


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
        best = (0, 0)
        for place in reversed(self._places.get((known[-2], known[-1]), [])[-PLACES:] if len(known) > 1 else []):
            length = SHORTEST
            while length < min(LONGEST, place) and known[place - 1 - length] == known[-1 - length]:
                length += 1
            if length > best[1]:
                best = (place, length)
        return best

    def continuation(self, place: int, count: int) -> list[int]:
        """As in EarlierText."""
        return following_tokens(self._tokens, place, count)


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


class LookupDrafter:
    """Drafts a chain: the continuation of the longest n-gram match. One object per generation."""

    def __init__(self, num_drafted: int = 10, predicted: PredictedText | None = None) -> None:
        """num_drafted: tokens of the chain; RequestError unless it is 1 to MAX_DEPTH. predicted: is searched too."""
        if not 1 <= num_drafted <= MAX_DEPTH:
            raise RequestError(f"{num_drafted} tokens cannot be drafted by lookup; it must be 1 to {MAX_DEPTH}")
        self._num_drafted = num_drafted
        self._index = NgramIndex()
        self._predicted = predicted

    def grow(self, tokens: Sequence[int], features: Features, max_nodes: int) -> Tree:
        """As in Drafter."""
        count = min(self._num_drafted, max_nodes - 1)
        following, _ = longest_match(self._index, self._predicted, tokens, count)
        return chain_of(tokens[-1], following) if following else root_only(tokens[-1])

    def learn(self, step: Step) -> None:
        """The next call of `grow` gets the whole text, and needs nothing else."""


def chain_of(root: int, drafted: Sequence[int]) -> Tree:
    """Returns a tree without branches, whose scores are all 0."""
    count = 1 + len(drafted)
    return Tree(np.array([root, *drafted], np.int64), np.arange(-1, count - 1), np.zeros(count, np.float32))
