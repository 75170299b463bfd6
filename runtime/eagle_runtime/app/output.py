"""Where an answer ends, and when its tokens may be shown.

    output = Output(decoder, End(limit=20, strings=("\\n\\n",)))
    output.add(id, drafted=True)     # until output.stop says why it ended
    output.release()                 # a piece of the tokens whose text is certain by now

A token waits while its text is a part of a character, or may be the beginning of a stop string. The tokens that are
released, one piece after another, have the text of the whole answer. Where messages with heads make an answer, its text
has their markers, stop strings are looked for outside of heads, and what is shown is the content alone.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from eagle_runtime.app.result import FinishReason, Piece, Stop, StopKind, Token
from eagle_runtime.app.settings import Settings
from eagle_runtime.base.arguments import checked_ids, checked_int, short_repr
from eagle_runtime.base.errors import RequestError
from eagle_runtime.sampling.sampler import LogProbs
from eagle_runtime.text.answer_reader import AnswerReader, begun_marks
from eagle_runtime.text.detokenizer import TextStream
from eagle_runtime.text.tokenizer import Text

MOST_NEW_TOKENS = 256  # where a caller names no number; chosen
# Stop strings of a request, and characters of one; OpenAI's API takes four strings.
MOST_STRINGS, LONGEST_STRING = 16, 256


@dataclass(frozen=True, slots=True)
class End:
    """What ends an answer. limit: tokens, at which it ends as `limit_kind`. least: tokens before which stop strings do
    not count (the sampler draws no stop token before)."""

    limit: int
    limit_kind: StopKind = "max_new_tokens"
    eos: frozenset[int] = frozenset()
    stop_ids: frozenset[int] = frozenset()
    strings: tuple[str, ...] = ()
    least: int = 0


def end_of(settings: Settings, room: int, eos_token_ids: Iterable[int], text: Text) -> End:
    """Returns what ends an answer. room: tokens that the context holds of it; eos_token_ids: the model's. Raises
    RequestError."""
    limit = checked_int("max_new_tokens", settings.get("max_new_tokens", MOST_NEW_TOKENS), 1)
    least = checked_int("min_new_tokens", settings.get("min_new_tokens", 0), 0, limit)
    stop = settings.get("stop")
    strings, special = _stop_strings(() if stop is None else stop, text)
    eos = frozenset(() if settings.get("ignore_eos") else eos_token_ids)
    stop_ids = frozenset({*checked_ids("stop_token_ids", settings.get("stop_token_ids", ())), *special})
    return End(min(limit, room), "max_new_tokens" if limit <= room else "context_full", eos, stop_ids, strings, least)


def _stop_strings(stop: str | Sequence[str], text: Text) -> tuple[tuple[str, ...], list[int]]:
    """Returns the stop strings, and the ids of those that are special tokens, which no text shows. Raises
    RequestError."""
    given = [stop] if isinstance(stop, str) else list(stop) if isinstance(stop, Sequence) else None
    if given is None or not all(isinstance(string, str) for string in given):
        raise RequestError(f"stop is {short_repr(stop)}, but must be a string or a list of strings")
    if len(given) > MOST_STRINGS:
        raise RequestError(f"stop has {len(given)} strings, but at most {MOST_STRINGS} can be looked for")
    for string in given:
        if not 1 <= len(string) <= LONGEST_STRING:
            raise RequestError(
                f"the stop string {short_repr(string)} has {len(string)} characters, but must have 1 to "
                f"{LONGEST_STRING}"
            )
    if given and not text.available:
        raise RequestError("stop takes strings, but the bundle has no tokenizer; use stop_token_ids")
    special = {string: text.special_id(string) for string in given}
    strings = tuple(dict.fromkeys(string for string in given if special[string] is None))
    return strings, [token for token in special.values() if token is not None]


class Output:
    """The tokens of one answer. token_ids: all of them; text: of those that were released; stop: why the answer ended,
    None before."""

    def __init__(self, decoder: TextStream | None, end: End, reader: AnswerReader | None = None) -> None:
        """decoder: of the tokens after the prompt; None without a tokenizer. reader: takes the answer to a chat
        apart; None where it is text alone."""
        self.token_ids: list[int] = []
        self.text = ""
        self.stop: Stop | None = None
        self._decoder = decoder
        self._end = end
        self._reader = reader
        self._heads = None if reader is None else reader.heads
        self._held: list[Token] = []
        self._tail = ""  # their text
        self._certain = 0  # of them are not part of a character that goes on
        self._cut: int | None = None  # where in the tail a stop string begins
        self._kept: int | None = None
        self._head = 0  # characters of the text after those of kept tokens

    def add(self, token_id: int, drafted: bool, log_probs: LogProbs | None = None, *, complete: bool = False) -> bool:
        """Take the next token. drafted, log_probs: as in Token; complete: whether it ends what a constraint allows.
        Returns whether the answer goes on after it."""
        before = len(self._tail)
        self._hold(token_id, drafted, log_probs)
        end, count = self._end, len(self.token_ids)
        if token_id in end.eos:
            self.stop = Stop("eos", token_id)
        elif token_id in end.stop_ids:
            self.stop = Stop("stop_token", token_id)
        elif count > end.least and (match := self._stop_string(before)) is not None:
            self._cut, string = match
            whole = self._before(self._cut)
            self._kept = count - len(self._held) + whole
            self._head = self._cut - sum(len(token.text) for token in self._held[:whole])
            self.stop = Stop("stop_string", string)
        elif complete:
            self.stop = Stop("constraint_end")
        elif count >= end.limit:
            self.stop = Stop(end.limit_kind)
        return self.stop is None

    def finish(self, kind: StopKind) -> None:
        """End the answer, if it has not ended."""
        self.stop = self.stop or Stop(kind)

    @property
    def kept(self) -> int:
        """Number of tokens whose text lies wholly before the stop string, or before a character of which the rest did
        not come; else all of them."""
        return len(self.token_ids) if self._kept is None else self._kept

    @property
    def kept_text(self) -> str:
        """The text of these tokens, once the answer has ended and all was released."""
        return self.text[: len(self.text) - self._head]

    def release(self) -> Piece:
        """Returns the tokens whose text is certain, with what of it is for the reader, and the parts of the answer that
        they have completed; all that are left once the answer has ended, cut where its text ends."""
        tokens, text = self._certain_tokens() if self.stop is None else self._last()
        self.text += text
        if self._reader is None:
            return Piece(tokens, text)
        parts = [*self._reader.feed(tokens), *(() if self.stop is None else self._reader.end())]
        content = "".join(part.text for part in parts if part.kind == "content")
        return Piece(tokens, text if self._heads is None else content, parts=tuple(parts))

    @property
    def shown_text(self) -> str | None:
        """All that was shown; None without a tokenizer."""
        if self._decoder is None:
            return None
        return self.text if self._heads is None or self._reader is None else self._reader.content

    @property
    def message(self) -> dict[str, Any]:
        """What was released, as a message of a chat."""
        return {"role": "assistant", "content": self.text} if self._reader is None else self._reader.message

    @property
    def kept_message(self) -> dict[str, Any]:
        """The message without a call that was cut off, with which a chat can go on."""
        return self.message if self._reader is None else self._reader.kept_message

    @property
    def finish_reason(self) -> FinishReason:
        """Why the answer ended, as OpenAI's API names it. An answer that ends within a call has none to be made."""
        assert self.stop is not None
        calls = self._reader is not None and self._reader.calls and not self._reader.within_call
        return "tool_calls" if calls and self.stop.reason == "stop" else self.stop.reason

    def _hold(self, token_id: int, drafted: bool, log_probs: LogProbs | None) -> None:
        decoder, (logprob, top) = self._decoder, log_probs or (None, ())
        text = "" if decoder is None else self._marker(token_id) or decoder.feed([token_id])
        self.token_ids.append(token_id)
        self._held.append(Token(token_id, text, drafted, logprob, top))
        self._tail += text
        if decoder is None or not decoder.pending:
            self._certain = len(self._held)

    def _marker(self, token_id: int) -> str | None:
        """The text of a marker of heads that does not end the answer; None for other tokens."""
        if self._heads is None or token_id in self._end.eos or token_id in self._end.stop_ids:
            return None
        return self._heads.take(token_id)

    def _stop_string(self, before: int) -> tuple[int, str] | None:
        """The stop string that the tail's text after `before` completes first, and where it begins; none in heads."""
        matches = []
        for string in () if self._heads is not None and self._heads.within else self._end.strings:
            place = self._tail.find(string, max(0, before + 1 - len(string)))
            if place >= 0:
                matches.append((place + len(string), place, string))
        return min(matches)[1:] if matches else None

    def _before(self, boundary: int) -> int:
        """How many certain tokens are up to the last one with text that ends at `boundary` of the tail or before."""
        count = place = 0
        for number, token in enumerate(self._held[: self._certain]):
            place += len(token.text)
            if place > boundary:
                break
            if token.text:
                count = number + 1
        return count

    def _certain_tokens(self) -> tuple[tuple[Token, ...], str]:
        partial = begun_marks(self._tail, self._end.strings) if self._end.strings else 0
        count = self._before(len(self._tail) - partial) if partial else self._certain
        if count == len(self._held):
            released, text, self._held, self._tail = self._held, self._tail, [], ""
        else:
            released, self._held = self._held[:count], self._held[count:]
            text = "".join([token.text for token in released])
            self._tail = self._tail[len(text) :]
        self._certain -= count
        return tuple(released), text

    def _last(self) -> tuple[tuple[Token, ...], str]:
        if self._cut is None and self._decoder is not None and self._held:
            rest = self._decoder.finish()
            if "\ufffd" in rest:  # a character that was cut
                self._kept, self._head = len(self.token_ids) - len(self._held) + self._certain, len(rest)
            last = self._held[-1]
            self._held[-1] = dataclasses.replace(last, text=last.text + rest)
        left, tokens = len(self._tail) if self._cut is None else self._cut, []
        for token in self._held:
            text = token.text if self._cut is None else token.text[:left]
            left = max(0, left - len(token.text))
            tokens.append(token if text == token.text else dataclasses.replace(token, text=text))
        self._held, self._certain, self._tail = [], 0, ""
        return tuple(tokens), "".join(token.text for token in tokens)
