"""Where an output stands in its grammar: the tokens that may come next, and after tokens that were drafted (Lookahead).

Shapes: V vocabulary, k candidates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import takewhile
from typing import TYPE_CHECKING

import numpy as np

from eagle_runtime.base.errors import ConstraintError
from eagle_runtime.base.tree import Bool, Int

if TYPE_CHECKING:
    from llguidance import LLMatcher


class Matcher:
    """A grammar with the tokens of an output so far. The sampler owns one per turn and asks it for each token in turn,
    so that its answers depend on the output alone."""

    def __init__(self, matcher: LLMatcher, vocab_size: int, ends: frozenset[int], unknown: int | None) -> None:
        """matcher: used by this object alone. ends: tokens that end the output besides the grammar's end. unknown: the
        token for text that the tokenizer lacks, which says no text of a grammar."""
        self._matcher = matcher
        self._vocab_size = vocab_size
        self._ends = ends
        self._unknown = unknown
        self._ended = False

    def mask(self) -> Bool:
        """Returns which tokens [V] may come next, at least one. Raises ConstraintError where the grammar has become too
        costly, or where no token of the vocabulary goes on with it."""
        bits = np.frombuffer(self._matcher.compute_bitmask(), np.uint8)
        self._check()
        mask = np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)
        if self._unknown is not None and self.has_row(self._unknown):
            mask[self._unknown] = False
        if not mask.any():
            raise ConstraintError(
                "no token of the vocabulary goes on with the constraint; write it in the model's text"
            )
        return mask

    def consume(self, token: int) -> None:
        """Add a token that the mask allows. Raises ConstraintError."""
        self._matcher.consume_token(token)
        self._check()
        self._ended = token in self._ends

    def has_row(self, token: int) -> bool:
        """Returns whether the model has a row for a token; the tokenizer may have more tokens."""
        return token < self._vocab_size

    @property
    def finished(self) -> bool:
        """Whether the output ends here: nothing but its end may follow, or an ending token came."""
        return self._ended or self._matcher.is_stopped()

    def lookahead(self) -> LLMatcher:
        """Returns a copy of llguidance's own matcher, to try out what may follow."""
        return self._matcher.deep_copy()

    def _check(self) -> None:
        if self._matcher.is_error():
            raise ConstraintError(f"the constraint cannot be followed further ({one_line(self._matcher.get_error())})")


def one_line(message: str) -> str:
    """What a message of llguidance says, in one line, cut short, without the parser's state and the wrong text, which
    it shows."""
    text = re.split(r"<state>|<non-verbose/>|\n\s+\d+ \|", message)[0]
    if "regex parse error:" in text:
        text = f"regex: {text.rpartition('error: ')[2]}"
    text = " ".join(text.split())
    if text == "NoExtensionBias":
        text = "no text follows it"
    return text if len(text) <= 240 else f"{text[:240]}..."


class Lookahead:
    """The drafts of one cycle after the other, seen from a copy of the sampler's matcher. The sampler's own is only
    copied: what is drafted never changes what is emitted. Where the copy goes past a limit, nothing is allowed."""

    def __init__(self, matcher: Matcher) -> None:
        self.forced_tokens = 0  # drafted so far because they must follow
        self.pruned = 0  # drafts left out so far because they may not
        self._matcher = matcher
        self.begin()

    def begin(self, ahead: Sequence[int] = ()) -> None:
        """A new cycle begins: the root is the last token that the matcher has consumed, or the last of those that are
        forced after it."""
        self._copy, self._ahead = self._matcher.lookahead(), tuple(ahead)
        if ahead:
            self._copy.try_consume_tokens(list(ahead))

    def forced(self, most: int, path: Sequence[int] = ()) -> list[int]:
        """Returns the tokens that must follow a path under the root, often none, and at most `most`."""
        consumed = self._copy.try_consume_tokens(list(path)) if path else 0
        tokens: list[int] = []
        if consumed == len(path) and not self._copy.is_stopped():
            tokens = list(takewhile(self._matcher.has_row, self._copy.compute_ff_tokens()[:most]))
        if consumed and not self._copy.rollback(consumed):  # as after an end of sequence
            self.begin(self._ahead)
        self.forced_tokens += len(tokens)
        return tokens

    def cut(self, tokens: Sequence[int]) -> list[int]:
        """Returns the tokens of a chain under the root up to the first that is not allowed."""
        chain = list(tokens)
        count = self._copy.validate_tokens(chain)
        self.pruned += len(chain) - count
        return chain[:count]

    def allowed(self, path: Sequence[int], candidates: Int) -> Bool:
        """Returns which candidates [k] may follow a path under the root."""
        chain = list(path)
        consumed = self._copy.try_consume_tokens(chain)
        if consumed < len(chain) or self._copy.is_stopped():
            allowed = np.zeros(len(candidates), np.bool_)
        else:
            bits = np.frombuffer(self._copy.compute_bitmask(), np.uint8)
            allowed = (bits[candidates >> 3] >> (candidates & 7) & 1).astype(np.bool_)
        if not self._copy.rollback(consumed):  # as after an end of sequence
            self.begin(self._ahead)
        self.pruned += len(candidates) - int(allowed.sum())
        return allowed
