"""Drafting with the target's own dice.

A seed fixes the random numbers of every position before its token is drawn (see sampling): the token with the highest
probability / number wins. The drafter does not know the target's probabilities, but it may know the numbers: what the
head holds likely, divided by the same numbers, is a better proposal of the one token that will be drawn than the head's
likeliest tokens are (Daliri et al., arXiv 2408.07978). Drafts never change what is emitted, so this is lossless like
any other way to choose them.

How much better depends on the head. Where it is unsure because the target is, the numbers decide; where it is unsure
because it does not know what the target knows, they say little. Hence a weight w between 0 and 1, learned as text is
emitted: of tokens with probability q_i and number e_i, i is drawn with chance (q_i / e_i^w) / sum_j (q_j / e_j^w).

At temperature 0 the target's likeliest token wins, which a head would know that knew the target's probabilities. Its
errors do not shrink with the temperature: if they are Gumbel noise of scale s on its logits, i wins with chance
q_i^(1/s) / sum_j q_j^(1/s), so chances are never surer than those of temperature s = SUREST. Measured on 2600 tokens of
48 prompts that the heads of tools/demo_pair proposed: the mean log-likelihood of what came is -0.94 (EAGLE-1) and -0.96
(EAGLE-3) by what the head says, -0.56 and -0.65 at 0.5, within 0.01 of the best for either.

Shapes: T rows, K candidates per row, W weights.
"""

from __future__ import annotations

from typing import Protocol

import numpy as np

from eagle_runtime.sampling import Row, Sampler
from eagle_runtime.tree import Float, Int

EULER = 0.5772156649  # mean of a Gumbel variable, such as -log(number)
SUREST = 0.5  # temperature that a head's proposal is never surer than at
NEVER = -60.0  # log-chance of a token that cannot be drawn; finite, so that sums and differences stay numbers
WEIGHTS = np.linspace(0, 1, 6)
PRIOR = -2 * np.abs(WEIGHTS - 0.5)  # log-likelihoods before any text
SURPRISE = -6.0  # least log-likelihood that one token counts with
ROUNDING = 1e-5  # of the sum of a row's probabilities
FADE = 0.98  # per verification: a text changes as it goes on


class Trust:
    """Which weight has predicted the emitted tokens best of late."""

    def __init__(self) -> None:
        self._log_likelihoods = PRIOR.copy()

    @property
    def weight(self) -> float:
        return float(WEIGHTS[self._log_likelihoods.argmax()])

    def learn(self, log_likelihoods: Row) -> None:
        """log_likelihoods [W]: of one emitted token, by each weight."""
        if np.isfinite(log_likelihoods).all():  # a head that computes NaN teaches nothing
            self._log_likelihoods = FADE * self._log_likelihoods + np.maximum(log_likelihoods, SURPRISE)


class Ranker(Protocol):
    """Turns what a head holds likely into what will be emitted."""

    def decide(self, tokens: Int, log_probs: Float, position: int, *, awaited: bool = False) -> tuple[Int, Float]:
        """A head's candidates for the token of `position` [T, K], best first -> the same candidates and the
        log-chances that they will stand there, best first. awaited: the next call of `learn` tells the first row's
        outcome."""

    def learn(self, token: int) -> None:
        """The token that was emitted where the last awaited proposal was of."""


class Greedy:
    """Of decoding at temperature 0: what the target will hold likeliest."""

    def decide(self, tokens: Int, log_probs: Float, position: int, *, awaited: bool = False) -> tuple[Int, Float]:
        # As log_softmax of at_temperature, in half as many steps: probabilities to the power 1 / SUREST, by their sum.
        said = log_probs.astype(np.float64)
        likely = np.exp(said)
        left = 1 - likely.sum(1, keepdims=True)
        others = (left > ROUNDING) * left * likely[:, -1:] ** (1 / SUREST - 1)
        total = (likely ** (1 / SUREST)).sum(1, keepdims=True) + others
        chances = said / SUREST - np.log(total)
        return tokens, np.minimum(np.maximum(chances, NEVER), 0).astype(np.float32)

    def learn(self, token: int) -> None:
        """Nothing depends on it."""


class Coupling:
    """Of decoding at a temperature above 0: what will be drawn. One object per generation."""

    def __init__(self, sampler: Sampler, trust: Trust) -> None:
        """sampler: draws the tokens, at a temperature above 0. trust: learns from this generation."""
        self._sampler = sampler
        self._trust = trust
        self._open: tuple[Int, Row, Row] | None = None  # tokens, scores, numbers of a proposal whose outcome is awaited

    def decide(self, tokens: Int, log_probs: Float, position: int, *, awaited: bool = False) -> tuple[Int, Float]:
        """As in Ranker. The temperature and the filters apply to the candidates as they will to the target's
        logits; penalties and biases do not. All other tokens together count as one, its number being that of a mean
        winner."""
        scores = self._filtered(log_probs.astype(np.float64))
        mean = np.full((len(tokens), 1), EULER)
        numbers = np.concatenate([-np.log(self._sampler.exponential_noise(position)[tokens]), mean], 1)
        if (sure := self._sampler.params.temperature / SUREST) < 1:
            scores, numbers = sure * scores, sure * numbers
        if awaited:
            self._open = tokens[0], scores[0], numbers[0]
        chances = log_softmax(scores + self._trust.weight * numbers)[:, :-1]
        order = np.argsort(-chances, axis=1, kind="stable")
        chances = np.maximum(np.take_along_axis(chances, order, 1), NEVER)
        return np.take_along_axis(tokens, order, 1), np.minimum(chances, 0).astype(np.float32)

    def learn(self, token: int) -> None:
        """The token that was emitted where the last awaited proposal was of."""
        if self._open is None:
            return
        tokens, scores, numbers = self._open
        found = np.flatnonzero(tokens == token)
        drawn = found[0] if len(found) else len(tokens)
        self._trust.learn(log_softmax(scores + WEIGHTS[:, None] * numbers)[:, drawn])
        self._open = None

    def _filtered(self, log_probs: Row) -> Row:
        """log_probs [T, K] -> log-weights [T, K + 1] of the candidates, and of all other tokens together, after
        temperature, top-k, top-p and min-p; -inf where nothing is left."""
        params, count = self._sampler.params, log_probs.shape[1]
        scores, others = at_temperature(log_probs, params.temperature)
        if params.top_k > 0:
            scores[:, params.top_k :] = -np.inf
            if params.top_k <= count:
                others = np.full_like(others, -np.inf)
        if params.top_p < 1:
            weights = np.exp(np.concatenate([scores, others], 1) - scores[:, :1])
            before = np.cumsum(weights, 1) - weights
            dropped = before >= params.top_p * weights.sum(1, keepdims=True)
            scores, others = np.where(dropped[:, :-1], -np.inf, scores), np.where(dropped[:, -1:], -np.inf, others)
        if params.min_p > 0:
            least = scores[:, :1] + np.log(params.min_p)
            others = np.where(scores[:, -1:] < least, -np.inf, others)
            scores = np.where(scores < least, -np.inf, scores)
        return np.concatenate([scores, others], 1)


def at_temperature(log_probs: Row, temperature: float) -> tuple[Row, Row]:
    """log_probs [T, K] of a row's likeliest tokens, best first -> log-weights [T, K] of these at a temperature, and
    [T, 1] of all other tokens together; -inf where nothing is left."""
    left = 1 - np.exp(log_probs).sum(1, keepdims=True)
    others = np.where(left > ROUNDING, np.log(np.maximum(left, ROUNDING)), -np.inf)
    if temperature != 1:
        # Each of the others weighs less than the last candidate, so together they weigh at most this (or, above
        # temperature 1, at least).
        others = others + (1 / temperature - 1) * log_probs[:, -1:]
    return log_probs / temperature, others


def log_softmax(scores: Row) -> Row:
    """Of every row of [T, K], each with a finite entry or NaN throughout."""
    shifted = scores - scores.max(1, keepdims=True)
    out: Row = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return out
