"""Takes an answer apart whose calls have strings between marks; quoted_values.py says what they look like."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping

from eagle_runtime.text.answer_form import AnswerForm
from eagle_runtime.text.answer_reader import AnswerReader, Part
from eagle_runtime.text.quoted_values import word_read

SIGNS = {"{": "{", "[": "[", "}": "}", "]": "]", ",": ", ", ":": ": "}  # as JSON has them
WORD_END = re.compile(r"[,}\]]")


class QuotedReader(AnswerReader):
    """The parts of one answer. Arguments come out as a JSON object: strings piece by piece, other values whole."""

    def __init__(self, form: AnswerForm, specials: Mapping[str, int]) -> None:
        """form: of a format with a quote; specials: as in reader_of."""
        super().__init__(form, specials)
        self._quote = self._marked(form.format.quote)
        self._within = ""  # the brackets that lack their end
        self._named = self._in_string = False  # whether a value's name has come; whether a string has begun

    def _name(self) -> list[Part]:
        parts = super()._name()
        if not parts:
            return []
        self._within, self._named, self._in_string = "{", False, False
        return [*parts, *self._argued("{")]

    def _arguments(self) -> list[Part]:
        """One sign, name or word after the brace that opens an object, or more of a string."""
        if self._in_string:
            text, ended = self._string_until(self._quote)
            self._in_string = not ended
            return self._argued(text)
        begun = self._buffer.lstrip()
        if begun.startswith(self._quote):
            self._buffer, self._in_string = begun.removeprefix(self._quote), True
            return self._argued('"')
        if self._quote.startswith(begun):
            return []
        if begun[0] in SIGNS:
            return self._sign(begun)
        if self._within.endswith("{") and not self._named:
            name, colon, _ = begun.partition(":")
            if colon or self._ended:
                self._buffer = begun[len(name) :]
                return self._argued(json.dumps(self._plain(name).rstrip(), ensure_ascii=False)[: None if colon else -1])
            return []
        end = WORD_END.search(begun)
        if end is not None or self._ended:
            word = begun[: end.start()] if end is not None else begun
            self._buffer = begun[len(word) :]
            word = self._plain(word).rstrip()
            return self._argued(word_read(word) if end is not None else word)
        return []

    def _sign(self, begun: str) -> list[Part]:
        sign = begun[0]
        if sign in "{[":
            self._within += sign
        elif sign in "}]":
            self._within = self._within[:-1]
        self._named = sign == ":"
        self._buffer = begun[1:]
        if not self._within:
            self._buffer = begun  # the last brace stands in the format
            self._go(self._after)
        return self._argued(SIGNS[sign])
