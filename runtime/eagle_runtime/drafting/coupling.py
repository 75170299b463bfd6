"""Ranking a head's proposals by the chance that each token is emitted, given the random numbers of the position.

At temperature T > 0 the sampler draws with the Gumbel-max trick (see sampling.py): a seed fixes the random numbers of
every position, and the token with the highest probability / number is emitted. A drafter does not know the target's
probabilities, but it knows the numbers: the head's probabilities divided by the same numbers are a better proposal of
the token that will be drawn than the head's likeliest tokens (Daliri et al., arXiv 2408.07978). Drafts never change
what is emitted, so this is lossless like any other way to choose them.

How much the numbers help depends on the head. Where it is unsure because the target is, the numbers decide; where it is
unsure because it does not know what the target knows, they say little. Hence a weight w, NOISE_WEIGHT: token i with
probability q_i and number e_i is drawn with chance (q_i / e_i^w) / sum_j (q_j / e_j^w).

At temperature 0 the target's likeliest token is emitted. If the head's errors are Gumbel noise of scale s on its
logits, that is token i with chance q_i^(1/s) / sum_j q_j^(1/s), and this bounds how sure proposals are at any low
temperature: s is HEAD_NOISE.

Shapes: R rows, k candidates per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_runtime.base.tree import Float, Int
from eagle_runtime.core.head import DraftHead, Proposal, Ranker, States, WrappedHead
from eagle_runtime.core.session import SharedPass, Weights
from eagle_runtime.drafting.head import NEVER
from eagle_runtime.sampling.sampler import Sampler
from eagle_runtime.sampling.scores import Row

EULER = 0.5772156649  # mean of a Gumbel variable, such as -log(number); Euler's constant
# Scale of the head's errors (s above). Measured on 2600 tokens of 48 prompts that the heads of tools/demo_pair
# proposed: the mean log-likelihood of the emitted token is -0.94 (EAGLE-1) and -0.96 (EAGLE-3) at 1, and -0.56 and
# -0.65 at 0.5, within 0.01 of the best scale for either.
HEAD_NOISE = 0.5
# Exponent of the random numbers (w above): 0 for the head's chances alone, 1 for a head whose only errors are Gumbel
# noise. One that followed the text gave 0 to 2 % fewer tokens per second (docs/dev/sampling.md).
NOISE_WEIGHT = 0.8
ROUNDING = 1e-5  # of the sum of a row's probabilities, in fp32


class RankedHead(WrappedHead):
    """A head with its cache whose proposals are reordered and scored by a ranker."""

    def __init__(self, head: DraftHead, ranker: Ranker) -> None:
        super().__init__(head)
        self._ranker = ranker

    def reading(self, tokens: Sequence[int]) -> SharedPass | None:
        return self._head.reading(tokens)

    def catch_up(self, tokens: Sequence[int], ranker: Ranker | None = None, rows: int | None = None) -> Proposal:
        """As in DraftHead; the ranker is this head's own."""
        return self._ranked(self._head.catch_up(tokens, self._ranker, rows))

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        return self._ranked(self._head.feed(tokens, hidden, parents, committed, depth))

    def _ranked(self, proposal: Proposal) -> Proposal:
        ranked = self._ranker.rank(proposal.tokens, proposal.log_probs, proposal.position)
        return Proposal(*ranked, proposal.hidden, proposal.position)


class GreedyRanker(Ranker):
    """For temperature 0: the chance that the target holds a token likeliest."""

    def rank(self, tokens: Int, log_probs: Float, position: int) -> tuple[Int, Float]:
        """As in Ranker; the order stays."""
        # As log_softmax of at_temperature in half as many steps: probabilities to the power 1 / HEAD_NOISE, normalised.
        wide = log_probs.astype(np.float64)
        probs = np.exp(wide)
        left = 1 - probs.sum(1, keepdims=True)
        others = (left > ROUNDING) * left * probs[:, -1:] ** (1 / HEAD_NOISE - 1)
        total = (probs ** (1 / HEAD_NOISE)).sum(1, keepdims=True) + others
        log_chances = wide / HEAD_NOISE - np.log(total)
        return tokens, np.minimum(np.maximum(log_chances, NEVER), 0).astype(np.float32)

    def weights(self, position: int, levels: int, known: Int | None) -> Weights:
        return Weights(np.array([1 / HEAD_NOISE, 1, 1 / HEAD_NOISE - 1, 0, 1], np.float32))


class GumbelRanker(Ranker):
    """For temperatures above 0: the chance that a token is drawn. One object per generation."""

    def __init__(self, sampler: Sampler, weight: float = NOISE_WEIGHT) -> None:
        """sampler: draws the tokens, at a temperature above 0. weight: of the random numbers."""
        self._sampler = sampler
        self._weight = weight

    def rank(self, tokens: Int, log_probs: Float, position: int) -> tuple[Int, Float]:
        """As in Ranker. The temperature and the filters apply to the candidates as they will to the target's
        logits; penalties and biases do not. All other tokens together count as one, with a mean winner's number."""
        scores = self._filtered(log_probs.astype(np.float64))
        mean = np.full((len(tokens), 1), EULER)
        noise = np.concatenate([-np.log(self._sampler.exponential_noise(position)[tokens]), mean], 1)
        if (scale := self._sampler.params.temperature / HEAD_NOISE) < 1:
            scores, noise = scale * scores, scale * noise
        log_chances = log_softmax(scores + self._weight * noise)[:, :-1]
        order = np.argsort(-log_chances, axis=1, kind="stable")
        rows = np.arange(len(tokens))[:, None]
        log_chances = np.maximum(log_chances[rows, order], NEVER)
        return tokens[rows, order], np.minimum(log_chances, 0).astype(np.float32)

    def weights(self, position: int, levels: int, known: Int | None) -> Weights:
        """As in Ranker, without the filters, which an engine does not know."""
        temperature, weight = self._sampler.params.temperature, self._weight
        scale = min(1.0, temperature / HEAD_NOISE)
        numbers = [scale / temperature, scale, (1 / temperature - 1) * scale, EULER * scale * weight, 1]
        clocks = np.stack([self._sampler.exponential_noise(position + level) for level in range(levels)])
        clocks = np.asarray(clocks if known is None else clocks[:, known], np.float32)
        return Weights(np.array(numbers, np.float32), np.log(clocks) * np.float32(-scale * weight))

    def _filtered(self, log_probs: Row) -> Row:
        """Returns log-weights [R, k + 1] of the candidates [R, k], and of all other tokens together, after temperature,
        top-k, top-p and min-p; -inf for what is filtered out."""
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
    """log_probs [R, k] of a row's likeliest tokens, best first -> their log-weights [R, k] at a temperature, and those
    [R, 1] of all other tokens together; -inf where nothing is left."""
    left = 1 - np.exp(log_probs).sum(1, keepdims=True)
    others = np.where(left > ROUNDING, np.log(np.maximum(left, ROUNDING)), -np.inf)
    if temperature != 1:
        # Each of the others weighs less than the last candidate, so together they weigh at most this (or, above
        # temperature 1, at least).
        others = others + (1 / temperature - 1) * log_probs[:, -1:]
    return log_probs / temperature, others


def log_softmax(scores: Row) -> Row:
    """Returns the log-softmax of every row of [R, k]; each row has a finite entry, or is all NaN."""
    shifted = scores - scores.max(1, keepdims=True)
    out: Row = shifted - np.log(np.exp(shifted).sum(1, keepdims=True))
    return out
