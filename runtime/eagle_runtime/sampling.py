"""From logits to a token: penalties and filters in Hugging Face's order, and a draw that a seed replays.

Every emitted token is drawn here, with or without a draft tree, so both ways of decoding agree by construction:
the random number depends only on (seed, absolute position), the distribution only on the logits and the history.

Shapes: V vocabulary. Rows are float64 [V]; -inf marks a token that cannot be drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache, partial

import numpy as np
import numpy.typing as npt

from eagle_runtime.arguments import checked_finite, checked_float, checked_int, short_repr
from eagle_runtime.constraints.matcher import Matcher
from eagle_runtime.errors import EagleError, RequestError

Row = npt.NDArray[np.float64]
TINY = np.finfo(np.float64).tiny
LogProbs = tuple[float, tuple[tuple[int, float], ...]]  # of the token drawn, and of the likeliest ones
KEPT = 16  # positions whose random numbers are kept: a drafter reads them some passes before they are used


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How tokens are drawn. The defaults are greedy decoding.

    temperature: 0 takes the highest score (lowest id on a tie); otherwise scores are divided by it.
    top_k: keep the k best (0: all). top_p: keep the smallest set of that mass (1: all). min_p: drop tokens less
    likely than min_p times the best (0: none). repetition_penalty: over prompt and output, as in HF (1: none).
    presence_penalty, frequency_penalty: over the output only, as in OpenAI's API (0: none).
    logit_bias: token id -> number added before anything else. seed: any 64-bit number. Raises RequestError for a
    value of a wrong type or range; NumPy's numbers are kept as Python's."""

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int = 0

    def __post_init__(self) -> None:
        checked: dict[str, object] = {
            "top_k": checked_int("top_k", self.top_k, 0),
            "seed": checked_int("seed", self.seed, 0, 2**64 - 1),
            "logit_bias": _checked_bias(self.logit_bias),
        }
        ranges: list[tuple[str, float, Callable[[float], bool], str]] = [
            ("temperature", self.temperature, lambda x: x >= 0, "0 or more"),
            ("top_p", self.top_p, lambda x: 0 < x <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p, lambda x: 0 <= x <= 1, "between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty, lambda x: x > 0, "above 0"),
            ("presence_penalty", self.presence_penalty, lambda x: True, "finite"),
            ("frequency_penalty", self.frequency_penalty, lambda x: True, "finite"),
        ]
        for name, value, holds, wanted in ranges:
            checked[name] = finite = checked_finite(name, value)
            if not holds(finite):
                raise RequestError(f"{name} is {finite}, but must be {wanted}")
        for name, result in checked.items():
            object.__setattr__(self, name, result)  # the class is frozen for others


def _checked_bias(bias: object) -> dict[int, float]:
    """token id -> number; raises RequestError."""
    if not isinstance(bias, Mapping):
        raise RequestError(f"logit_bias is {short_repr(bias)}, but must map token ids to numbers")
    checked = {}
    for token, value in bias.items():
        token_id = checked_int("a token of logit_bias", token, 0)
        added = checked_float(f"logit_bias of token {short_repr(token_id)}", value)
        if math.isnan(added) or added == math.inf:
            raise RequestError(f"logit_bias of token {short_repr(token_id)} is {added}, but must be a number or -inf")
        checked[token_id] = added
    return checked


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
    # Tokens below (1 - p) / V weigh at most 1 - p together, so they go without being sorted.
    ranked = np.flatnonzero(probs > (1 - p) / len(probs))
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


def exponential_noise(seed: int, position: int, count: int) -> Row:
    """Returns [count] exponential random numbers of an absolute position, one per token, all above 0, of Philox, a
    counter-based generator (Salmon et al. 2011)."""
    generator = np.random.Generator(np.random.Philox(counter=[0, 0, 0, position], key=seed))
    numbers: Row = generator.standard_exponential(count)
    return np.maximum(numbers, TINY)


def log_probs_of(logits: npt.NDArray[np.float32], token: int, count: int) -> LogProbs:
    """Returns the logarithm of a token's probability by logits [V], and the `count` likeliest tokens with theirs, best
    first, ties to the lower id. Sums are of fp64."""
    scores = logits.astype(np.float64)
    scores -= scores.max()
    scores -= math.log(np.exp(scores).sum())
    count = min(count, len(scores))
    least = np.partition(scores, len(scores) - count)[len(scores) - count] if count else math.inf
    best = np.flatnonzero(scores >= least)
    best = best[np.argsort(-scores[best], kind="stable")][:count]
    return float(scores[token]), tuple((int(index), float(scores[index])) for index in best)


class Sampler:
    """Draws tokens one position after another and keeps the history, which penalties need.

    Walking down a tree takes the same calls as decoding without drafts: each token drawn at a node is emitted."""

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        vocab_size: int,
        *,
        late: Iterable[int] = (),
        least: int = 0,
        log_probs: int | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """late: tokens that cannot be among the first `least`. log_probs: how many of the likeliest tokens to record
        for each position with their log-probabilities and that of the token drawn; None records nothing. matcher: of
        the output's constraint, at its beginning; used by this sampler alone."""
        self.params = params
        self.matcher = matcher
        self._late = np.array([token for token in late if token < vocab_size], np.int64)
        self._late_until = len(prompt) + least
        self._num_log_probs = log_probs
        self._log_probs: list[LogProbs] = []
        self.position = len(prompt)  # absolute position of the next token
        self._seen = np.zeros(vocab_size, np.bool_)
        self._seen[list(prompt)] = True
        self._counts = np.zeros(vocab_size, np.int64)  # output only
        for token in params.logit_bias:
            if token >= vocab_size:
                raise RequestError(
                    f"logit_bias names token {short_repr(token)}, outside the vocabulary of {vocab_size}"
                )
        self._bias_ids = np.array(list(params.logit_bias), np.int64)
        self._bias = np.array(list(params.logit_bias.values()), np.float64)
        # An absolute position -> its random numbers [V]; those of the last KEPT positions are kept.
        self.exponential_noise = lru_cache(maxsize=KEPT)(partial(exponential_noise, params.seed, count=vocab_size))
        self._raw_scores = (
            matcher is None
            and len(self._bias_ids) == 0
            and (least == 0 or len(self._late) == 0)
            and (params.repetition_penalty == 1 and params.presence_penalty == 0 and params.frequency_penalty == 0)
        )

    def next(self, logits: npt.NDArray[np.float32]) -> int:
        """Draw the token of the next position from the target's logits [V] and add it to the history."""
        likeliest = int(logits.argmax())
        if not math.isfinite(logits[likeliest]):  # NaN wins every maximum
            raise EagleError(
                f"the target's logits at position {self.position} are not finite; the model's weights or its "
                "precision do not fit (try fp32)"
            )
        token = likeliest if self._raw_scores and self.params.temperature == 0 else self._draw(logits)
        if self._num_log_probs is not None:
            self._log_probs.append(log_probs_of(logits, token, self._num_log_probs))
        self._seen[token] = True
        self._counts[token] += 1
        self.position += 1
        if self.matcher is not None:
            self.matcher.consume(token)
        return token

    @property
    def finished(self) -> bool:
        """Whether the constraint ends the output with the last token."""
        return self.matcher is not None and self.matcher.finished

    def taken_log_probs(self) -> list[LogProbs]:
        """Returns what was recorded since the last call, for each token that was drawn."""
        records, self._log_probs = self._log_probs, []
        return records

    def _draw(self, logits: npt.NDArray[np.float32]) -> int:
        scores = self.process(logits)
        if self.params.temperature == 0:
            return int(np.argmax(scores))
        # The Gumbel-max trick: of exponential clocks with rates p, each rings first with probability p. Logits that
        # differ by rounding, as those of one token in different trees may, then draw another token with a chance of
        # about that difference (Daliri et al., arXiv 2408.07978). Inverting the cumulative distribution would do so
        # hundreds of times as often, since rounding shifts the edges of all tokens.
        rates = np.exp(scores - scores.max())
        return int(np.argmax(rates / self.exponential_noise(self.position)))

    @np.errstate(over="ignore", invalid="ignore")  # what overflows is refused below
    def process(self, logits: npt.NDArray[np.float32]) -> Row:
        """Logits [V] -> scores [V] whose softmax is the distribution of the next token (HF's order of steps)."""
        params = self.params
        scores = logits.astype(np.float64)
        if len(self._bias_ids):
            scores[self._bias_ids] += self._bias
        if self.matcher is not None:
            scores[~self.matcher.mask()] = -np.inf
        if self.position < self._late_until:
            scores[self._late] = -np.inf
        if params.repetition_penalty != 1:
            scores = apply_repetition_penalty(scores, self._seen, params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            scores -= params.presence_penalty * (self._counts > 0) + params.frequency_penalty * self._counts
        if params.temperature > 0:
            scores /= params.temperature
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
