"""Takes an answer apart whose calls have keywords; keyword_values.py says what they look like."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping

from eagle_runtime.text.answer_form import AnswerForm
from eagle_runtime.text.answer_reader import AnswerReader, Part
from eagle_runtime.text.keyword_values import WORDS, string_read
from eagle_runtime.text.quoted_values import word_read

IN_STRING = re.compile(r"([^'\\]|\\.)*", re.DOTALL)
WORD_END = re.compile(r"[,)]")


class KeywordReader(AnswerReader):
    """The parts of one answer. Arguments come out as a JSON object: strings, lists and objects piece by piece."""

    def __init__(self, form: AnswerForm, specials: Mapping[str, int]) -> None:
        """form: of a format with keywords; specials: as in reader_of."""
        super().__init__(form, specials)
        self._inside: Callable[[], list[Part]] = self._keyword
        self._count = 0

    def _called(self, name: str, own_id: str = "") -> Part:
        self._inside, self._count = self._keyword, 0
        return super()._called(name, own_id)

    def _arguments(self) -> list[Part]:
        """All of a call after its name; what of it comes next is `_inside`."""
        return self._inside()

    def _keyword(self) -> list[Part]:
        """A name, or the end of the arguments."""
        begun = self._buffer.lstrip(" \n,")
        if begun.startswith(self._call[2]):
            self._buffer = begun
            self._go(self._after)
            return self._argued("}" if self._count else "{}")
        name, sign, rest = begun.partition("=")
        if not sign:
            return []
        self._buffer, self._inside = rest, self._value
        self._count += 1
        return self._argued(f"{'{' if self._count == 1 else ', '}{json.dumps(self._plain(name), ensure_ascii=False)}: ")

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
        self._buffer, self._inside = begun[len(word) :], self._keyword
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
            self._buffer, self._inside = self._buffer[1:], self._keyword
        said = json.dumps(string_read(self._plain(text)), ensure_ascii=False)[1:-1]
        return self._argued(said + '"' * ended)

    def _nested(self) -> list[Part]:
        text, ended = self._json()
        if ended:
            self._inside = self._keyword
        return self._argued(text)
