"""From logits to scores: a request's bias, constraint, penalties, temperature and filters, in Hugging Face's order.

Shapes: V vocabulary, n tokens. Rows are float64 [V]; -inf marks a token that cannot be drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.tree import Float, Int
from eagle_runtime.sampling.grammar_matcher import Matcher
from eagle_runtime.sampling.params import SamplingParams

Row = npt.NDArray[np.float64]
# A larger bias counts as this one: a token with it wins or loses against all without, and fp32 tells two of them apart.
MOST_BIAS = 1e3


def apply_repetition_penalty(scores: Row, seen: npt.NDArray[np.bool_], penalty: float) -> Row:
    """Divide positive and multiply negative scores of tokens already seen (CTRL, arXiv 1909.05858; HF)."""
    return np.where(seen, np.where(scores < 0, scores * penalty, scores / penalty), scores)


def keep_top_k(scores: Row, k: int) -> Row:
    """Drop scores below the k-th best; tokens tied with it stay, as in HF."""
    if k >= len(scores):
        return scores
    threshold = np.partition(scores, len(scores) - k)[len(scores) - k]
    return np.where(scores < threshold, -np.inf, scores)


def keep_top_p(scores: Row, p: float) -> Row:
    """Drop the least likely tokens as long as their joint mass is at most 1 - p; the best one always stays."""
    probs = softmax(scores)
    # Tokens below (1 - p) / V weigh less than 1 - p together, so they go without being sorted.
    ranked = np.flatnonzero(probs >= (1 - p) / len(probs))
    ranked = ranked[np.argsort(probs[ranked], kind="stable")]
    below = max(0.0, 1.0 - float(probs[ranked].sum()))
    dropped = below + np.cumsum(probs[ranked]) <= 1 - p
    dropped[-1] = False
    kept = ranked[~dropped]
    out = np.full_like(scores, -np.inf)
    out[kept] = scores[kept]
    return out


def keep_min_p(scores: Row, min_p: float) -> Row:
    """Drop tokens less likely than min_p times the best (arXiv 2407.01082)."""
    # p_i < min_p * p_max  <=>  s_i - s_max < log(min_p): no normaliser needed
    return np.where(scores - scores.max() < math.log(min_p), -np.inf, scores)


def softmax(scores: Row) -> Row:
    """Returns the probabilities [V] of scores [V] that have at least one finite entry."""
    weights = np.exp(scores - scores.max())
    out: Row = weights / weights.sum()
    return out


class Scores:
    """The scores of one position after another, and the history, which penalties need.

    position: absolute, of the next token. seen [V]: tokens of prompt and output; counts [V]: of the output. late: that
    cannot come before position `late_until`. special [V]: tokens with a bias, a penalty, or a first position. raw:
    whether logits are only divided by the temperature and filtered; takes_highest: whether every token is the one with
    the highest logit, whatever came before."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        late: Iterable[int] = (),
        least: int = 0,
        matcher: Matcher | None = None,
    ) -> None:
        for token in params.logit_bias:
            if token >= vocab_size:
                raise RequestError(
                    f"logit_bias names token {short_repr(token)}, outside the vocabulary of {vocab_size}"
                )
        self.params, self.matcher = params, matcher
        self.position = len(prompt)
        self.late_until = len(prompt) + least
        self.seen = np.zeros(vocab_size, np.bool_)
        self.seen[list(prompt)] = True
        self.counts = np.zeros(vocab_size, np.int64)
        self._with_history = params.repetition_penalty != 1 or bool(params.presence_penalty or params.frequency_penalty)
        known_late = np.array([token for token in late if token < vocab_size and least > 0], np.int64)
        self.special = self.seen.copy() if params.repetition_penalty != 1 else np.zeros(vocab_size, np.bool_)
        # What is added to each logit before the rest, first while `late` tokens cannot come, then later.
        self._added = self._added_early = np.zeros(vocab_size if len(known_late) or params.logit_bias else 0)
        if len(self._added):
            biased = np.array(list(params.logit_bias), np.int64)
            bias = np.array(list(params.logit_bias.values()))
            self._added[biased] = np.where(np.isfinite(bias), np.clip(bias, -MOST_BIAS, MOST_BIAS), bias)
            self._added_early = self._added.copy()
            self._added_early[known_late] = -np.inf
            self.special[biased] = self.special[known_late] = True
        self.raw = matcher is None and len(self._added) == 0 and not self._with_history
        self.takes_highest = self.raw and params.temperature == 0

    def add(self, token: int) -> None:
        """The token of the position is drawn."""
        self.seen[token] = True
        self.counts[token] += 1
        if self._with_history:
            self.special[token] = True
        self.position += 1
        if self.matcher is not None:
            self.matcher.consume(token)

    @np.errstate(over="ignore", invalid="ignore")  # what overflows is refused by the caller
    def adjusted(self, logits: Float) -> Float:
        """Logits [V] -> those [V] that temperature and filters begin with: with bias, constraint and penalties (HF's
        order), in fp32; the same array where nothing changes."""
        if self.raw:
            return logits
        row = logits.copy()
        if self.matcher is not None:
            row[~self.matcher.mask()] = -np.inf
        tokens = np.flatnonzero(self.special)
        row[tokens] = self.of_tokens(row[tokens], tokens)
        return row

    @np.errstate(over="ignore", invalid="ignore")
    def of_tokens(self, logits: Float, tokens: Int) -> Float:
        """As `adjusted`, for tokens [n] with their logits [n], without the constraint. A higher logit of a token never
        gets a lower one."""
        params = self.params
        scores = logits.astype(np.float64)
        if len(self._added):
            scores += (self._added_early if self.position < self.late_until else self._added)[tokens]
        if params.repetition_penalty != 1:
            scores = apply_repetition_penalty(scores, self.seen[tokens], params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            counts = self.counts[tokens]
            scores -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        return scores.astype(np.float32)

    @np.errstate(over="ignore")  # what overflows is refused
    def filtered(self, adjusted: Float) -> Row:
        """Adjusted logits [V] -> scores [V] whose softmax is the distribution of the next token, at a temperature above
        0."""
        params = self.params
        scores = adjusted.astype(np.float64) / params.temperature
        self.check(scores.max())
        if params.top_k > 0:
            scores = keep_top_k(scores, params.top_k)
        if params.top_p < 1:
            scores = keep_top_p(scores, params.top_p)
        if params.min_p > 0:
            scores = keep_min_p(scores, params.min_p)
        return scores

    def check(self, highest: np.floating[Any]) -> None:
        """Raises RequestError unless the highest score is that of a token that can be drawn."""
        if not np.isfinite(highest):
            raise RequestError(
                f"no token is left to draw at position {self.position}; loosen logit_bias, penalties or temperature"
            )
