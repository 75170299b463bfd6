"""N-gram matches: earlier places of a text that its last tokens match, and what followed there."""

from __future__ import annotations

from collections.abc import Sequence

from eagle_runtime.drafting.predicted import LONGEST, PLACES, SHORTEST, PredictedText
from eagle_runtime.drafting.suffix import SuffixAutomaton, following_tokens


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
        """As in following_tokens."""
        return following_tokens(self._tokens, place, count)


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
