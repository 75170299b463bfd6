"""Takes an answer of messages with heads apart as it comes; channels.py says what they look like.

Whatever a head says, no text is lost: what is neither reasoning nor a call of a tool that was offered is content, and
so is text where a head should be.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Literal

from eagle_runtime.text.answer_form import AnswerForm
from eagle_runtime.text.answer_reader import AnswerReader, Part, begun_marks
from eagle_runtime.text.channels import JOINT, Heads
from eagle_runtime.text.keyword_reader import KeywordReader
from eagle_runtime.text.quoted_reader import QuotedReader
from eagle_runtime.text.tagged_reader import TaggedReader

TO = "to="  # begins a head that names a recipient first


def reader_of(form: AnswerForm, specials: Mapping[str, int]) -> AnswerReader:
    """Returns the reader of an answer. specials: those texts of the form that are special tokens, with their ids."""
    if form.format.channels is not None:
        return ChannelReader(form, specials)
    if form.use is not None and form.format.tagged is not None:
        return TaggedReader(form, specials)
    if form.use is not None and form.format.keywords:
        return KeywordReader(form, specials)
    return (QuotedReader if form.use is not None and form.format.quote else AnswerReader)(form, specials)


class ChannelReader(AnswerReader):
    """The parts of one answer. Texts of several messages that are one part are joined by an empty line."""

    def __init__(self, form: AnswerForm, specials: Mapping[str, int]) -> None:
        """form: of a format with channels; specials: as in reader_of."""
        super().__init__(form, specials)
        channels = form.format.channels
        assert channels is not None
        self.heads = Heads(channels, specials)
        self._channels = channels
        self._tools = frozenset(tool.name for tool in form.use.tools) if form.use is not None else None
        self._message = self._marked(channels.message)
        self._over = [self._marked(marker) for marker in (channels.end, *channels.ends)]
        self._begin = [self._marked(marker) for marker in (channels.start, channels.channel)]
        self._in_head = [self._message, *self._begin, self._marked(channels.constrain), *self._over, TO]
        self._state = self._head

    def end(self) -> list[Part]:
        """Returns what was held back, when no more comes."""
        parts = self._parts()
        rest = self._plain(self._buffer)
        if self._state == self._reason:
            parts += self._said("reasoning", rest)
        elif self._state == self._text or (self._state == self._head and rest and TO.startswith(rest)):
            parts += self._said("content", rest)
        elif self._state == self._arguments:
            parts += self._argued(rest)
            if _is_json(self.calls[-1].arguments):  # only the marker after them is missing
                self._go(self._head)
        self._buffer = ""
        return parts

    def _said(self, kind: Literal["reasoning", "content"], text: str) -> list[Part]:
        before = self.reasoning if kind == "reasoning" else self.content
        return super()._said(kind, f"{JOINT}{text}" if text and before and self._fresh else text)

    # States; each takes what it can off the buffer.

    def _head(self) -> list[Part]:
        """From the end of a message to the text of the next one."""
        begun = self._buffer.lstrip()
        if begun and not any(begun.startswith(text) or text.startswith(begun) for text in self._in_head):
            self._go(self._text)
            return []
        place, marker = self._first([self._message, *self._over])
        if not marker:
            return []
        head, used = self._buffer[:place], place + len(marker)
        if marker != self._message:  # it has no text
            self._go(self._head, used)
            return []
        channel, recipient = self._channels.parse_head(head)
        if (name := self._tool(recipient)) is not None:
            self._go(self._arguments, used)
            return [self._called(name)]
        self._go(self._reason if channel == self._channels.reasoning else self._text, used)
        return []

    def _tool(self, recipient: str) -> str | None:
        """The name of the tool that a recipient is; None where it is none."""
        if self._tools is None or not recipient:
            return None
        name = recipient.removeprefix(self._channels.prefix)
        return name if name != recipient or name in self._tools else None

    def _reason(self) -> list[Part]:
        return self._said("reasoning", self._spoken())

    def _text(self) -> list[Part]:
        return self._said("content", self._spoken())

    def _arguments(self) -> list[Part]:
        return self._argued(self._spoken())

    def _spoken(self) -> str:
        """The text of a message as far as it is certain."""
        marks = [*self._over, *self._begin]
        place, marker = self._first(marks)
        if marker and place == 0:
            self._go(self._head, len(marker) if marker in self._over else 0)
            return ""
        certain = place if marker else len(self._buffer) - begun_marks(self._buffer, marks)
        text, self._buffer = self._buffer[:certain], self._buffer[certain:]
        return self._plain(text)

    def _first(self, marks: Sequence[str]) -> tuple[int, str]:
        """The place of the first of some texts in the buffer, and which it is; "" where there is none."""
        return min(((place, mark) for mark in marks if (place := self._buffer.find(mark)) >= 0), default=(0, ""))


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except (ValueError, RecursionError):
        return False
    return True
