"""Takes an answer apart whose calls have keywords; keyword_values.py says what they look like."""

from __future__ import annotations

import json
import re

from eagle_runtime.text.answer_reader import Part
from eagle_runtime.text.keyword_values import WORDS, string_read
from eagle_runtime.text.members_reader import MembersReader
from eagle_runtime.text.quoted_values import word_read

IN_STRING = re.compile(r"([^'\\]|\\.)*", re.DOTALL)
WORD_END = re.compile(r"[,)]")


class KeywordReader(MembersReader):
    """The parts of one answer, in a format with keywords. Strings, lists and objects come piece by piece."""

    def _member(self) -> list[Part]:
        """A name, or the end of the arguments."""
        begun = self._buffer.lstrip(" \n,")
        if begun.startswith(self._call[2]):
            return self._closed(begun)
        name, sign, rest = begun.partition("=")
        if not sign:
            return []
        self._buffer, self._inside = rest, self._value
        return self._argued(self._named(self._plain(name)))

    def _value(self) -> list[Part]:
        """The first sign of a string, a list or an object, or a whole word."""
        begun = self._buffer.lstrip()
        if begun.startswith("'"):
            self._buffer, self._inside = begun[1:], self._string
            return self._argued('"')
        if begun.startswith(('"', "[", "{")):
            self._buffer, self._inside = begun, self._nested
            return []
        end = WORD_END.search(begun)
        if end is None and not self._ended:
            return []
        word = begun if end is None else begun[: end.start()]
        self._buffer, self._inside = begun[len(word) :], self._member
        word = self._plain(word).rstrip()
        if end is None:  # of a call that was cut off
            return self._argued(next((own[: len(word)] for name, own in WORDS.items() if name.startswith(word)), word))
        return self._argued(word_read(WORDS.get(word, word)))

    def _string(self) -> list[Part]:
        found = IN_STRING.match(self._buffer)
        assert found is not None
        text, self._buffer = found[0], self._buffer[found.end() :]
        ended = self._buffer.startswith("'")
        if ended:
            self._buffer, self._inside = self._buffer[1:], self._member
        said = json.dumps(string_read(self._plain(text)), ensure_ascii=False)[1:-1]
        return self._argued(said + '"' * ended)

    def _nested(self) -> list[Part]:
        text, ended = self._json()
        if ended:
            self._inside = self._member
        return self._argued(text)
