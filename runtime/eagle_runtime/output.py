"""Where an answer ends, and when its tokens may be shown.

    output = Output(decoder, End(limit=20, strings=("\\n\\n",)))
    output.add(Token(id, "", drafted=True))     # until output.stop says why it ended
    output.release()                            # the tokens whose text is certain by now

A token waits while its text is a part of a character, or may be the beginning of a stop string. The tokens that are
released, one piece after another, have the text of the whole answer.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from eagle_runtime.result import Stop, StopKind, Token
from eagle_runtime.text.detokenizer import TextStream


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


class Output:
    """The tokens of one answer. token_ids: all of them; text: of those that were released; kept: how many of them lie
    wholly before the stop string; stop: why the answer ended, None before."""

    def __init__(self, decoder: TextStream | None, end: End) -> None:
        """decoder: of the tokens after the prompt; None without a tokenizer."""
        self.token_ids: list[int] = []
        self.text = ""
        self.stop: Stop | None = None
        self._decoder = decoder
        self._end = end
        self._held: list[Token] = []
        self._tail = ""  # their text
        self._certain = 0  # of them are not part of a character that goes on
        self._cut: int | None = None  # where in the tail a stop string begins
        self._kept: int | None = None

    def add(self, token: Token, *, complete: bool = False) -> bool:
        """Take the next token, whose text is not known yet. complete: whether it ends what a constraint allows. Returns
        whether the answer goes on after it."""
        before = len(self._tail)
        if self._decoder is not None:
            token = dataclasses.replace(token, text=self._decoder.feed([token.id]))
        self._hold(token)
        end, count = self._end, len(self.token_ids)
        if token.id in end.eos:
            self.stop = Stop("eos", token.id)
        elif token.id in end.stop_ids:
            self.stop = Stop("stop_token", token.id)
        elif count > end.least and (match := self._stop_string(before)) is not None:
            self._cut, string = match
            self._kept = count - len(self._held) + self._before(self._cut)
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
        """Number of tokens whose text lies wholly before the stop string; all of them where none ended the answer."""
        return len(self.token_ids) if self._kept is None else self._kept

    def release(self) -> tuple[Token, ...]:
        """Returns the tokens whose text is certain; all that are left once the answer has ended, cut where its text
        ends."""
        if self.stop is not None:
            return self._last()
        boundary = len(self._tail) - self._partial()
        whole = boundary == len(self._tail)
        count = self._certain if whole else self._before(boundary)
        released, self._held = self._held[:count], self._held[count:]
        self._certain -= count
        return self._said(released)

    def _hold(self, token: Token) -> None:
        self.token_ids.append(token.id)
        self._held.append(token)
        self._tail += token.text
        if self._decoder is None or not self._decoder.pending:
            self._certain = len(self._held)

    def _stop_string(self, before: int) -> tuple[int, str] | None:
        """The stop string that the tail's text after `before` completes first, and where it begins."""
        matches = []
        for string in self._end.strings:
            place = self._tail.find(string, max(0, before + 1 - len(string)))
            if place >= 0:
                matches.append((place + len(string), place, string))
        return min(matches)[1:] if matches else None

    def _partial(self) -> int:
        """Characters at the tail's end that a stop string may begin with."""
        longest = 0
        for string in self._end.strings:
            for count in range(min(len(string) - 1, len(self._tail)), longest, -1):
                if self._tail.endswith(string[:count]):
                    longest = count
                    break
        return longest

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

    def _last(self) -> tuple[Token, ...]:
        if self._cut is None and self._decoder is not None and self._held:
            rest = self._decoder.finish()
            last = self._held[-1]
            self._held[-1] = dataclasses.replace(last, text=last.text + rest)
        left, tokens = len(self._tail) if self._cut is None else self._cut, []
        for token in self._held:
            text = token.text if self._cut is None else token.text[:left]
            left = max(0, left - len(token.text))
            tokens.append(token if text == token.text else dataclasses.replace(token, text=text))
        self._held, self._certain, self._tail = [], 0, ""
        self.text += "".join(token.text for token in tokens)
        return tuple(tokens)

    def _said(self, released: list[Token]) -> tuple[Token, ...]:
        text = "".join(token.text for token in released)
        self._tail = self._tail[len(text) :]
        self.text += text
        return tuple(released)
