"""From logits to scores: a request's bias, constraint, penalties, temperature and filters, in Hugging Face's order.

Shapes: V vocabulary, n tokens. Rows are float64 [V]; -inf marks a token that cannot be drawn.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.arguments import short_repr
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.tree import Int
from eagle_runtime.sampling.grammar_matcher import Matcher
from eagle_runtime.sampling.params import SamplingParams

Row = npt.NDArray[np.float64]


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
    cannot come before position `late_until`. with_history: whether scores depend on what came before; raw: whether
    they are the logits, but for temperature and filters."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        late: Iterable[int] = (),
        least: int = 0,
        matcher: Matcher | None = None,
    ) -> None:
        """As in Sampler."""
        for token in params.logit_bias:
            if token >= vocab_size:
                raise RequestError(
                    f"logit_bias names token {short_repr(token)}, outside the vocabulary of {vocab_size}"
                )
        self.params, self.matcher = params, matcher
        self.position = len(prompt)
        self.late = np.array([token for token in late if token < vocab_size], np.int64)
        self.late_until = len(prompt) + least
        self.seen = np.zeros(vocab_size, np.bool_)
        self.seen[list(prompt)] = True
        self.counts = np.zeros(vocab_size, np.int64)
        self.bias_ids = np.array(list(params.logit_bias), np.int64)
        self.bias = np.array(list(params.logit_bias.values()), np.float64)
        self.with_history = params.repetition_penalty != 1 or bool(params.presence_penalty or params.frequency_penalty)
        has_late = least > 0 and len(self.late) > 0
        self.raw = matcher is None and len(self.bias_ids) == 0 and not has_late and not self.with_history

    def add(self, token: int) -> None:
        """The token of the position is drawn."""
        self.seen[token] = True
        self.counts[token] += 1
        self.position += 1
        if self.matcher is not None:
            self.matcher.consume(token)

    @property
    def takes_highest(self) -> bool:
        """Whether every token is the one with the highest logit, whatever came before."""
        return self.raw and self.params.temperature == 0

    @np.errstate(over="ignore", invalid="ignore")  # what overflows is refused below
    def of_row(self, logits: npt.NDArray[np.float32]) -> Row:
        """Logits [V] -> scores [V] whose softmax is the distribution of the next token (HF's order of steps)."""
        params = self.params
        scores = logits.astype(np.float64)
        if len(self.bias_ids):
            scores[self.bias_ids] += self.bias
        if self.matcher is not None:
            scores[~self.matcher.mask()] = -np.inf
        if self.position < self.late_until:
            scores[self.late] = -np.inf
        scores = self.penalised(scores, slice(None))
        if not np.isfinite(scores.max()):
            raise RequestError(
                f"no token is left to draw at position {self.position}; loosen logit_bias, penalties or temperature"
            )
        if params.temperature == 0:
            return scores
        if params.top_k > 0:
            scores = keep_top_k(scores, params.top_k)
        if params.top_p < 1:
            scores = keep_top_p(scores, params.top_p)
        if params.min_p > 0:
            scores = keep_min_p(scores, params.min_p)
        return scores

    def penalised(self, scores: Row, tokens: Int | slice) -> Row:
        """Scores of tokens -> with penalties and temperature. A higher score of a token never gets a lower one."""
        params = self.params
        if params.repetition_penalty != 1:
            scores = apply_repetition_penalty(scores, self.seen[tokens], params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            counts = self.counts[tokens]
            scores -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        if params.temperature > 0:
            scores /= params.temperature
        return scores
