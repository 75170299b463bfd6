"""Takes an answer apart whose calls have their arguments one by one, not as a JSON object."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from eagle_runtime.text.answer_form import AnswerForm
from eagle_runtime.text.answer_reader import AnswerReader, Part


class MembersReader(AnswerReader):
    """The parts of one answer. Arguments come out as a JSON object. What of a call comes next is `_inside`: at first
    `_member`, which reads a name or finds the end."""

    def __init__(self, form: AnswerForm, specials: Mapping[str, int]) -> None:
        """specials: as in reader_of."""
        super().__init__(form, specials)
        self._inside: Callable[[], list[Part]] = self._member
        self._count = 0

    def _called(self, name: str, own_id: str = "") -> Part:
        self._inside, self._count = self._member, 0
        return super()._called(name, own_id)

    def _arguments(self) -> list[Part]:
        """All of a call after its name."""
        return self._inside()

    def _member(self) -> list[Part]:
        raise NotImplementedError

    def _named(self, name: str) -> str:
        """The JSON text up to a member's value."""
        self._count += 1
        return f"{'{' if self._count == 1 else ', '}{json.dumps(name, ensure_ascii=False)}: "

    def _closed(self, rest: str) -> list[Part]:
        """The end of the arguments. rest: what follows them."""
        self._buffer = rest
        self._go(self._after)
        return self._argued("}" if self._count else "{}")
