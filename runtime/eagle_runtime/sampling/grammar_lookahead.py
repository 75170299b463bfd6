"""What a grammar allows after tokens that were drafted, but not yet emitted.

Shapes: k candidates.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile

import numpy as np

from eagle_runtime.base.tree import Bool, Int
from eagle_runtime.sampling.grammar_matcher import Matcher


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
