"""Tokens to text, piece by piece: together the pieces say what decoding all tokens at once says.

What text a token stands for depends on its neighbours: some decoders drop the space before a text's first word, and
characters may be split over tokens. So a window of the last tokens is decoded again and again, and what it says beyond
what it said before is new. Two kinds of text wait until it is certain:

- the last U+FFFD of a byte-level decoder, which may be a character of which some bytes are still to come;
- a run of byte tokens, <0x0A> and the like, of which byte-fallback decoders make characters if the whole run is UTF-8,
  and one U+FFFD for every byte if it is not. A run is not held back for ever: after HELD tokens without a mistake its
  whole characters go out, and count as a run that ended well.

The text of an output is what it adds to its prompt: characters belong to the token that completes them. So one that the
prompt began and the output completes is the output's, and a U+FFFD for bytes of the prompt is not.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Sequence
from typing import TYPE_CHECKING

from eagle_runtime.base.errors import RequestError, is_panic

if TYPE_CHECKING:
    import tokenizers

CONTEXT = 8  # tokens before the new ones that are decoded along; a split character has at most three
WINDOW = 4 * CONTEXT  # tokens after which it is cut down to CONTEXT; chosen
HELD = 48  # byte tokens of a run that are held back; chosen: 12 characters of four bytes
UNKNOWN = "\N{REPLACEMENT CHARACTER}"
BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")


class Vocabulary:
    """What a tokenizer's ids stand for. Decoding leaves out special tokens and ids that the tokenizer has not."""

    def __init__(self, tokenizer: tokenizers.Tokenizer, name: str = "the tokenizer") -> None:
        """name: of the tokenizer, for errors."""
        self._tokenizer = tokenizer
        self._name = name
        self._tokens: dict[int, str | None] = {}  # of ids that were asked for
        added = tokenizer.get_added_tokens_decoder().values()
        self._special = frozenset(token.content for token in added if token.special)
        decoder = tokenizer.decoder
        self.has_bytes = decoder is not None and decoder.decode(["<0x41>"]) == "A"  # whether it falls back to bytes

    def token(self, token_id: int) -> str | None:
        """The token of an id that has part in a text; None for others."""
        if token_id not in self._tokens:
            try:
                token: str | None = self._tokenizer.id_to_token(token_id)
            except OverflowError:  # negative, or of more than 32 bits
                return None
            self._tokens[token_id] = None if token in self._special else token
        return self._tokens[token_id]

    def special(self, token_id: int) -> str | None:
        """The special token of an id; None for others."""
        token: str | None = self._tokenizer.id_to_token(token_id)
        return token if token in self._special else None

    def byte(self, token: str) -> int | None:
        """The byte that a token of a byte-fallback tokenizer stands for; None for others."""
        match = BYTE.fullmatch(token) if self.has_bytes else None
        return int(match[1], 16) if match else None

    def decode(self, token_ids: Sequence[int]) -> str:
        """All at once. Raises RequestError if the tokenizer cannot."""
        try:
            return str(self._tokenizer.decode(token_ids))
        except BaseException as error:
            if not (isinstance(error, Exception) or is_panic(error)):  # the library raises bare Exception, and panics
                raise
            raise RequestError(f"{self._name} cannot decode its tokens ({error}); export the bundle again") from None


class TextStream:
    """Turns the tokens of one output into text as they come. What one token costs does not depend on how many came
    before."""

    def __init__(self, vocabulary: Vocabulary, prompt: Sequence[int]) -> None:
        """prompt: the ids before the output."""
        self._vocabulary = vocabulary
        self._ids: list[int] = []  # the window
        self._run: _Run | None = None  # of byte tokens at the window's end that may go on
        self._said = ""  # what the window says of what is out already
        self._news = False  # whether the window says more than it said; never while a run is held back
        self._cut = False  # whether the window ends with a character that may be incomplete
        self._begin(prompt)

    def feed(self, tokens: Sequence[int]) -> str:
        """The text that these tokens complete. Raises RequestError if the tokenizer cannot decode them."""
        return "".join([self._add(token) for token in tokens]) + self._new_text()

    @property
    def pending(self) -> bool:
        """Whether some of the text of the tokens so far is held back, since it is not certain."""
        run = self._run
        return self._cut or (run is not None and not run.broken and len(run.values) > run.said_bytes)

    def finish(self) -> str:
        """What is still held back when no more tokens come: U+FFFD for characters that stayed incomplete."""
        self._close_run()
        return self._beyond_said(self._vocabulary.decode(self._ids))

    def _begin(self, prompt: Sequence[int]) -> None:
        """Fill the window with the prompt's last tokens: those of an open run, and CONTEXT before them."""
        tail: list[int] = []
        values: list[int] = []
        before = 0
        for token_id in reversed(prompt):
            if (token := self._vocabulary.token(token_id)) is None:
                continue
            value = self._vocabulary.byte(token) if before == 0 else None
            if value is not None:
                values.append(value)
            else:
                before += 1
            tail.append(token_id)
            if before == CONTEXT:
                break
        self._ids = tail[::-1]
        self._said = self._vocabulary.decode(self._ids)
        if values:
            start = len(self._ids) - len(values)
            run = self._run = _Run(start, said_before=self._vocabulary.decode(self._ids[:start]))
            for value in reversed(values):
                run.add(value)
            if not run.broken:
                run.say(len(values), self._vocabulary.decode(self._ids[: start + run.whole]))

    def _add(self, token_id: int) -> str:
        """Take a token into the window; returns new text only where the window must not grow."""
        if (token := self._vocabulary.token(token_id)) is None:
            return ""
        value = self._vocabulary.byte(token)
        if value is None:
            self._close_run()
            self._ids.append(token_id)
            self._news = True
            return ""
        piece = ""
        if self._run is None:
            piece = self._new_text()
            self._run = _Run(len(self._ids), said_before=self._said)
        run = self._run
        if run.broken:  # for good: every further byte is one U+FFFD more, and need not be remembered
            return self._new_text() + UNKNOWN
        self._ids.append(token_id)
        run.add(value)
        if run.broken:
            self._said = run.said_if_broken
            self._news = True
        elif len(run.values) - run.said_bytes >= HELD:
            piece += self._release_run(run)
        return piece

    def _new_text(self) -> str:
        """What the window certainly says and has not said yet."""
        if not self._news:
            return ""
        self._news = False
        certain = self._certain(self._ids)
        piece = "" if self._said.startswith(certain) else self._beyond_said(certain)
        if len(self._ids) > WINDOW and self._said == certain and self._run is None:
            del self._ids[:-CONTEXT]
            self._said = self._certain(self._ids)
        return piece

    def _certain(self, ids: Sequence[int]) -> str:
        """The text of tokens, without a last character that may be incomplete."""
        text = self._vocabulary.decode(ids)
        self._cut = not self._vocabulary.has_bytes and text.endswith(UNKNOWN)
        return text.removesuffix(UNKNOWN) if self._cut else text

    def _beyond_said(self, text: str) -> str:
        """What `text`, of the window, adds to what was said, which becomes all of it."""
        said, self._said = self._said, text
        if text.startswith(said):
            return text[len(said) :]
        # Usually only the last of what was said is another now: a U+FFFD, in whose place a character has come.
        return text[next((i for i, (a, b) in enumerate(zip(said, text, strict=False)) if a != b), len(text)) :]

    def _close_run(self) -> None:
        """End the run. Its bytes are UTF-8 as a whole or they are not; the text that stands is the one of that case."""
        run, self._run = self._run, None
        if run is not None and not run.broken:
            self._said = run.said if run.whole == len(run.values) else run.said_if_broken
            self._news = True

    def _release_run(self, run: _Run) -> str:
        """Say the whole characters of a run, and forget all of it but the last, as if it began there."""
        self._said = run.said
        piece = self._beyond_said(self._vocabulary.decode(self._ids[: run.start + run.whole]))
        first = max(0, run.start - CONTEXT)
        before = self._ids[first : run.start]
        self._ids = before + self._ids[run.start + run.last_whole :]
        rest = self._run = _Run(len(before), said_before=self._vocabulary.decode(before))
        for value in run.values[run.last_whole :]:
            rest.add(value)
        rest.say(rest.whole, self._vocabulary.decode(self._ids[: rest.start + rest.whole]))
        return piece


class _Run:
    """Byte tokens in a row at the window's end. said: the text of the window that is out if the run is UTF-8;
    said_if_broken: if it is not. Without bytes that were said, both are the text before the run."""

    def __init__(self, start: int, said_before: str) -> None:
        """start: of the run in the window."""
        self.start = start
        self.said_bytes = 0
        self.said = self._said_before = said_before
        self.values: list[int] = []
        self.whole = 0  # bytes in whole characters
        self.last_whole = 0  # where the last of these begins
        self.broken = False  # whether no further bytes can make it UTF-8
        self._decoder = codecs.getincrementaldecoder("utf-8")()

    @property
    def said_if_broken(self) -> str:
        return self._said_before + self.said_bytes * UNKNOWN

    def say(self, count: int, text: str) -> None:
        """The first `count` bytes are out, and `text` is what the window says with the whole characters."""
        self.said_bytes, self.said = count, text

    def add(self, value: int) -> None:
        self.values.append(value)
        if self.broken:
            return
        try:
            complete = self._decoder.decode(bytes([value]))
        except UnicodeDecodeError:
            self.broken = True
            return
        if complete:
            self.last_whole, self.whole = self.whole, len(self.values)
