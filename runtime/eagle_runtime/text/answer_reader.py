"""Takes an answer apart as it comes: reasoning, text, and calls of tools.

reader = reader_of(form, specials)  # of channel_reader.py
for piece in turn: parts = reader.feed(piece.tokens)
parts = reader.end()
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from eagle_runtime.text.answer_form import ALPHABET, AnswerForm
from eagle_runtime.text.channels import Heads

SPECIAL = "\0"  # stands before a special token's text, which no text of the model is
ID_LENGTH = 9  # letters and digits, which every template takes


class Spoken(Protocol):
    """A token with the text that it completes."""

    @property
    def id(self) -> int: ...

    @property
    def text(self) -> str: ...


@dataclass(frozen=True, slots=True)
class ToolCall:
    """A call. arguments: JSON text, which lacks its end where the answer was cut."""

    id: str
    name: str
    arguments: str


@dataclass(frozen=True, slots=True)
class Part:
    """A part of an answer: reasoning, content, the beginning of call number `index`, or more of its arguments. text: of
    a call its name."""

    kind: Literal["reasoning", "content", "call", "arguments"]
    text: str
    index: int = 0
    id: str = ""


class AnswerReader:
    """The parts of one answer, which tags separate. reasoning, content, calls: all so far. heads: of messages in it,
    whose text nobody is shown; None where there are none."""

    heads: Heads | None = None

    def __init__(self, form: AnswerForm, specials: Mapping[str, int]) -> None:
        """specials: those texts of the form that are special tokens, with their ids."""
        self.reasoning = self.content = ""
        self.calls: list[ToolCall] = []
        self._format = form.format if form.use is not None else None
        self._shown = {token: SPECIAL + text for text, token in specials.items()}
        self._specials = sorted(specials, key=len, reverse=True)
        marked = self._marked
        self._open, self._close = (marked(tag) for tag in form.format.thought)
        self._trigger, self._begins = marked(form.format.trigger), [marked(text) for text in form.format.begins]
        self._call = [marked(text) for text in form.format.call]
        self._id_mark = marked(form.format.id_mark)
        self._between, self._end = marked(form.format.between or ""), marked(form.format.end)
        self._buffer = ""
        self._state = self._reason if form.thinking else self._start if form.thinks else self._answer
        self._fresh = True  # nothing of this state was given out
        self._depth, self._quoted, self._escaped = 0, False, False
        self._ended = False

    @property
    def message(self) -> dict[str, Any]:
        """The answer as a message of a chat."""
        message: dict[str, Any] = {"role": "assistant", "content": self.content}
        if self.reasoning:
            message["reasoning_content"] = self.reasoning
        if self.calls:
            message["content"] = self.content or None
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
                for call in self.calls
            ]
        return message

    @property
    def within_call(self) -> bool:
        """Whether the arguments of the last call lack their end."""
        return bool(self.calls) and self._state == self._arguments

    @property
    def kept_message(self) -> dict[str, Any]:
        """The message without a call that was cut off, with which a chat can go on."""
        message = self.message
        if self.within_call:
            del message["tool_calls"][-1]
            if not message["tool_calls"]:
                del message["tool_calls"]
                message["content"] = self.content
        return message

    def feed(self, tokens: Iterable[Spoken]) -> list[Part]:
        """Returns the parts that have become certain with more tokens."""
        self._buffer += "".join([self._shown.get(token.id) or token.text for token in tokens])
        return self._parts()

    def end(self) -> list[Part]:
        """Returns what was held back, when no more comes. Of a call without its whole name nothing is."""
        self._ended = True
        parts = self._parts()
        rest = self._plain(self._buffer)
        if rest and self._state in (self._start, self._answer, self._gap, self._text):
            parts += self._said("content", rest)
        elif rest and self._state == self._reason:
            parts += self._said("reasoning", rest.strip("\n") if self._fresh else rest.rstrip("\n"))
        self._buffer = ""
        return parts

    def _parts(self) -> list[Part]:
        parts: list[Part] = []
        while True:
            state, size = self._state, len(self._buffer)
            parts += self._state()
            if self._state == state and len(self._buffer) == size:
                return parts

    def _go(self, state: Any, used: int = 0) -> None:
        self._buffer = self._buffer[used:]
        self._state, self._fresh = state, True

    def _said(self, kind: Literal["reasoning", "content"], text: str) -> list[Part]:
        if not text:
            return []
        self._fresh = False
        if kind == "reasoning":
            self.reasoning += text
        else:
            self.content += text
        return [Part(kind, text)]

    # States; each takes what it can off the buffer.

    def _start(self) -> list[Part]:
        begun = self._buffer.lstrip("\n ")
        if begun.startswith(self._open):
            self._go(self._reason, len(self._buffer) - len(begun) + len(self._open))
        elif not self._open.startswith(begun):
            self._go(self._answer)
        return []

    def _reason(self) -> list[Part]:
        text, end = self._until(self._close)
        if self._fresh:
            text = text.lstrip("\n")
        if not end:
            return self._all_but_held("reasoning", text, self._close)
        parts = self._said("reasoning", text.rstrip("\n"))
        self._go(self._gap, len(end))
        return parts

    def _gap(self) -> list[Part]:
        self._buffer = self._buffer.lstrip("\n")
        if self._buffer:
            self._go(self._answer)
        return []

    def _answer(self) -> list[Part]:
        """The beginning of what is not reasoning."""
        if self._format is None or self._trigger:
            self._go(self._text)
        else:
            begun = self._buffer.lstrip("\n ")
            options = [begin + self._call[0] for begin in self._begins]
            if any(begun.startswith(option) for option in options):
                self._go(self._first_call, len(self._buffer) - len(begun))
            elif not any(option.startswith(begun) for option in options):
                self._go(self._text)
        return []

    def _text(self) -> list[Part]:
        mark = "" if self._format is None else self._trigger
        text, begun = self._until(mark)
        if not begun:
            return self._all_but_held("content", text, mark)
        parts = self._said("content", text.rstrip())
        self._go(self._first_call)
        return parts

    def _until(self, mark: str) -> tuple[str, str]:
        """Takes the text before a mark off the buffer, all of it where there is none. Returns it without special
        tokens, and the mark if it is there."""
        text, found, rest = self._buffer.partition(mark) if mark else (self._buffer, "", "")
        self._buffer = found + rest
        return self._plain(text), found

    def _all_but_held(self, kind: Literal["reasoning", "content"], text: str, mark: str) -> list[Part]:
        """What of a text can be no beginning of a mark, without white space before it, which goes with it."""
        said = text[: len(text) - begun_marks(text, [mark])]
        if mark:
            said = said.rstrip()
        self._buffer = text[len(said) :]
        return self._said(kind, said)

    def _marked(self, text: str) -> str:
        """A text of the form as the buffer has it: with SPECIAL before the special tokens in it."""
        for special in self._specials:
            text = text.replace(special, SPECIAL + special)
        return text

    def _plain(self, text: str) -> str:
        """A text without special tokens, as the answer's own."""
        for special in self._shown.values():
            text = text.replace(special, "")
        return text

    def _first_call(self) -> list[Part]:
        return self._expect([begin + self._call[0] for begin in self._begins], [self._name] * len(self._begins))

    def _name(self) -> list[Part]:
        middle = self._call[1]
        place = self._buffer.find(middle)
        if place < 0:
            return []
        name, own_id = self._buffer[:place], ""
        if self._id_mark:
            name, _, own_id = name.partition(self._id_mark)
        self._go(self._arguments, place + len(middle))
        self._depth, self._quoted, self._escaped = 0, False, False
        return [self._called(name, own_id)]

    def _called(self, name: str, own_id: str = "") -> Part:
        """A call begins. own_id: which the answer gives it, if any."""
        call = ToolCall(own_id or "".join(secrets.choice(ALPHABET) for _ in range(ID_LENGTH)), name, "")
        self.calls.append(call)
        return Part("call", name, len(self.calls) - 1, call.id)

    def _argued(self, text: str) -> list[Part]:
        """More of the last call's arguments."""
        if not text:
            return []
        call = self.calls[-1]
        self.calls[-1] = ToolCall(call.id, call.name, call.arguments + text)
        return [Part("arguments", text, len(self.calls) - 1)]

    def _string_until(self, mark: str) -> tuple[str, bool]:
        """Takes what is certain of a string of arguments off the buffer, with the mark that ends it. Returns that as
        JSON text without the first quote, and whether the string ended."""
        text, end, rest = self._buffer.partition(mark)
        held = 0 if end else begun_marks(text, [mark])
        self._buffer = rest or text[len(text) - held :]
        said = self._plain(text[: len(text) - held])
        return json.dumps(said, ensure_ascii=False)[1:-1] + '"' * bool(end), bool(end)

    def _arguments(self) -> list[Part]:
        """A JSON object, up to its last bracket."""
        text, ended = self._json()
        if ended:
            self._go(self._after)
        return self._argued(text)

    def _json(self) -> tuple[str, bool]:
        """Takes what is there of an object, a list or a string in JSON off the buffer. Returns it, and whether it
        ended."""
        ended, used = False, len(self._buffer)
        for place, char in enumerate(self._buffer):
            if self._quoted:
                self._quoted = self._escaped or char != '"'
                self._escaped = char == "\\" and not self._escaped
                ended = not self._quoted and self._depth == 0
            elif char == '"':
                self._quoted = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                ended = self._depth == 0
            if ended:
                used = place + 1
                break
        text, self._buffer = self._buffer[:used], self._buffer[used:]
        return text, ended

    def _after(self) -> list[Part]:
        return self._expect([self._call[2]], [self._next_call])

    def _next_call(self) -> list[Part]:
        assert self._format is not None
        options, states = [self._end], [self._done]
        if self._format.between is not None:
            options, states = [self._between + self._call[0], *options], [self._name, *states]
        return self._expect(options, states)

    def _done(self) -> list[Part]:
        self._buffer = ""
        return []

    def _expect(self, options: Sequence[str], states: Sequence[Any]) -> list[Part]:
        """Go to the state of the option that the buffer begins with; to text where it can be none any more."""
        possible = [option for option in options if option.startswith(self._buffer) and option != self._buffer]
        if possible and not self._ended:
            return []
        for option, state in zip(options, states, strict=True):
            if self._buffer.startswith(option):
                self._go(state, len(option))
                return []
        if not possible:
            self._go(self._text)
            self._format = None
        return []


def begun_marks(text: str, marks: Sequence[str]) -> int:
    """Returns how many characters at a text's end are the beginning of a mark, and not all of it."""
    longest = min(len(text), max(map(len, marks)) - 1)
    return next((n for n in range(longest, 0, -1) if any(mark[:-1].startswith(text[-n:]) for mark in marks)), 0)
