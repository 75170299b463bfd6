"""Finds prompts that are the same as others, or have a long passage in common with held-out ones."""

from __future__ import annotations

import re
from collections.abc import Iterable

NGRAM = 8  # words in a row by which a prompt counts as a copy


class Seen:
    """What prompts may not repeat: their text up to case, spaces and punctuation, and any NGRAM words of held-out
    texts."""

    def __init__(self, held_out: Iterable[str] = ()) -> None:
        self._texts: set[str] = set()
        self._ngrams: set[tuple[str, ...]] = set()
        for text in held_out:
            words = words_of(text)
            self._texts.add(" ".join(words))
            self._ngrams.update(_ngrams(words))

    def is_new(self, text: str, core: str | None = None) -> bool:
        """Whether a prompt repeats nothing; it is remembered.

        core: the part of the text that may have no NGRAM words in common with another prompt's core either; None for
        prompts of templates, whose fixed words are in many."""
        words = words_of(text)
        joined, ngrams = " ".join(words), _ngrams(words)
        if joined in self._texts or not self._ngrams.isdisjoint(ngrams):
            return False
        self._texts.add(joined)
        if core is not None:
            self._ngrams.update(_ngrams(words_of(core)))
        return True


def words_of(text: str) -> list[str]:
    """Returns the words of a text in lower case, without punctuation."""
    return re.findall(r"\w+", text.lower())


def _ngrams(words: list[str]) -> set[tuple[str, ...]]:
    return {tuple(words[start : start + NGRAM]) for start in range(len(words) - NGRAM + 1)}
