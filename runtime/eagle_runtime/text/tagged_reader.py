"""Takes an answer apart whose calls have values between tags; tagged_values.py says what they look like."""

from __future__ import annotations

from collections.abc import Mapping

from eagle_runtime.text.answer_form import AnswerForm
from eagle_runtime.text.answer_reader import Part, begun_marks
from eagle_runtime.text.members_reader import MembersReader
from eagle_runtime.text.tagged_values import Looked, Split, schema_at, split


class TaggedReader(MembersReader):
    """The parts of one answer. Arguments come out as a JSON object: strings piece by piece, other values whole."""

    def __init__(self, form: AnswerForm, specials: Mapping[str, int]) -> None:
        """form: of a format with tagged values; specials: as in reader_of."""
        super().__init__(form, specials)
        tags = form.format.tagged
        assert tags is not None
        self._before, self._middle, self._value_end = map(self._marked, (tags.before, tags.middle, tags.close))
        self._parameters = {tool.name: tool.parameters for tool in form.use.tools} if form.use is not None else {}
        self._split, self._looked = Split(), Looked()

    def _name(self) -> list[Part]:
        if self._call[1]:
            return super()._name()
        places = [
            place for mark in (self._before, self._call[2] or self._end) if (place := self._buffer.find(mark)) >= 0
        ]
        if not places:
            return []
        name = self._buffer[: min(places)]
        self._go(self._arguments, len(name))
        return [self._called(name)]

    def _member(self) -> list[Part]:
        """The name of a value, or the end of the arguments."""
        begun = self._buffer.lstrip()
        if begun.startswith(self._before):
            name, middle, rest = begun.removeprefix(self._before).partition(self._middle)
            if not middle:
                return []
            self._buffer = rest
            parameters = self._parameters.get(self.calls[-1].name, {})
            self._split = split(schema_at(parameters, name), parameters)
            raw = not self._split.others
            self._inside, self._looked = self._string if raw else self._value, Looked()
            head = self._named(name)
            return self._argued(f'{head}"' if raw else head)
        if self._before.startswith(begun):
            return []
        return self._closed(begun)

    def _string(self) -> list[Part]:
        text, ended = self._string_until(self._value_end)
        if ended:
            self._inside = self._member
        return self._argued(text)

    def _value(self) -> list[Part]:
        place, self._looked = self._split.end_of(self._buffer, self._value_end, self._looked)
        if place >= 0:
            text, self._buffer = self._buffer[:place], self._buffer[place + len(self._value_end) :]
            self._inside = self._member
            return self._argued(self._split.text_of(self._plain(text)))
        if not self._ended:
            return []
        text = self._buffer[: len(self._buffer) - begun_marks(self._buffer, [self._value_end])]
        self._buffer = ""
        return self._argued(self._split.begun_text_of(self._plain(text)) if text else "")  # of a call that was cut off
