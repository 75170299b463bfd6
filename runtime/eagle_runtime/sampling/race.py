"""Which token a row of logits draws, decided by a few of its scores and bounds of all others.

A sampler that has the whole row computes a score for every token, filters them, and takes the token with the highest
exp(score) / number (see sampling.py). Here most scores are unknown, but none is above a bound, so the filters sort the
tokens in three: those that are surely kept, surely dropped, or undecided. The winner among the known tokens is the
row's if it is surely kept and no token that may be kept can reach it; otherwise there is no answer, and the caller
fetches the row. Comparisons that rounding could turn are left undecided, so an answer is always the whole row's.

Shapes: V vocabulary, n known tokens, b bounds.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from eagle_runtime.base.tree import Bool, Float, Int
from eagle_runtime.sampling.native_draws import native_draws
from eagle_runtime.sampling.scores import Row

ROUNDING = 1e-9  # of a share of the probability, and of a race's values against each other
NEAR = 1e-12  # scores closer than this, but not equal, may have probabilities in either order
SUM_ERROR = 2e-4  # relative, of the sum that a log-sum-exp stands for: twice what Candidates promises
FP32_ERROR = 2.0**-21  # of a log-sum-exp by its own size: its terms and itself are rounded to fp32
SLACK = 1e-6  # of a score, far above that of its logarithms
MOST_SCORE = 500.0  # that native_draws looks at, whose scores must stay below 1000
MOST_TEMPERATURE = 1e6  # and its inverse the least, at which different logits have different scores
ROUNDING_64 = 1e-14  # of a score by its own size, fp64
NEAR_P = 1e-4  # of top-p: a sum so near to it may be on either side; ten times the error of RowFilters._sum
TRIED = 8  # contenders whose filters are looked at, chosen; then all scores are made
FP32_MIN = float(np.finfo(np.float32).min)
LOG_VOCABULARY = 16.0  # at least the logarithm of any V


@dataclass(frozen=True, slots=True)
class Known:
    """What is known of the scores [V] of a row, before filters.

    tokens [n]: each once, ascending. scores, numbers [n]: theirs, exactly; numbers are the position's exponential
    random numbers, all above 0. bounds [b]: upper bounds of the scores of all other tokens: the last b - 1 are of one
    token each, the first is of all that are left. bound_numbers [b]: lower bounds of their numbers. rest: how many
    tokens the first bound stands for. mass: bounds of the sum of exp(score - the highest of `scores`) over these."""

    tokens: Int
    scores: Row
    numbers: Row
    bounds: Row
    bound_numbers: Row
    rest: int
    mass: tuple[float, float] = (0.0, math.inf)

    @property
    def vocab_size(self) -> int:
        """V."""
        return len(self.tokens) + len(self.bounds) - 1 + self.rest


@dataclass(frozen=True, slots=True)
class Kept:
    """What filters have left. sure [n]: known tokens that are surely kept. possible [n]: those that may be. others [b]:
    whether tokens of a bound may be."""

    sure: Bool
    possible: Bool
    others: Bool


def highest(known: Known) -> int | None:
    """Returns the token with the highest score, the lowest id on a tie; None where it is not known."""
    best = known.scores.max()
    if not (math.isfinite(best) and best > known.bounds.max(initial=-math.inf)):  # NaN compares false
        return None
    return int(known.tokens[known.scores == best].min())


@np.errstate(over="ignore", invalid="ignore")  # infinite bounds decide nothing, and NaN compares false
def decide(known: Known, top_k: int, top_p: float, min_p: float) -> int | None:
    """Returns the token that wins the race of exp(score) / number after the filters (as in SamplingParams), or None
    where what is known does not tell."""
    best = known.scores.max()
    if not math.isfinite(best) or np.isnan(known.bounds).any():
        return None
    everything = np.ones(len(known.scores), np.bool_)
    kept = Kept(everything, everything, known.bounds > -math.inf)
    filtered = 0 < top_k < known.vocab_size
    if filtered:
        kept = after_top_k(known, kept, top_k)
    if top_p < 1:
        narrowed = after_top_p(known, kept, top_p, 0.0 if filtered else known.mass[0])
        if narrowed is None:
            return None
        kept = narrowed
    if min_p > 0:
        kept = after_min_p(known, kept, min_p)
    return winner(known, kept)


def drawn(
    logits: Float,
    likeliest: int,
    numbers: Row,
    smallest: float,
    temperature: float,
    filters: tuple[int, float, float],
) -> int | None:
    """Returns the token of a whole row [V] that wins the race of exp(logit / temperature) / number after the filters
    top_k, top_p, min_p (as in SamplingParams), or None where that takes the scores of all. likeliest: has the highest
    logit. numbers [V]: random numbers, all above 0, the smallest of them `smallest`."""
    best = float(logits[likeliest]) / temperature
    if not (math.isfinite(best) and 1 / MOST_TEMPERATURE < temperature < MOST_TEMPERATURE):
        return None
    few = contenders(logits, numbers, smallest, likeliest, temperature)
    scores = logits[few].astype(np.float64) / temperature
    values = np.exp(scores - best) / numbers[few]
    if filters == (0, 1, 0):
        return int(few[values.argmax()])
    row = RowFilters(logits, logits[likeliest], temperature, *filters)
    for place in np.argsort(-values, kind="stable")[:TRIED].tolist():
        if (kept := row.keep(float(logits[few[place]]))) is None:
            return None
        if kept:
            return int(few[place])
    return None


class RowFilters:
    """Says of single tokens of a row of logits [V] whether the filters keep them. highest: of the logits."""

    def __init__(
        self, logits: Float, highest: np.float32, temperature: float, top_k: int, top_p: float, min_p: float
    ) -> None:
        self._logits, self._highest, self._temperature = logits, highest, temperature
        self._top_k = top_k if top_k < len(logits) else 0
        self._top_p, self._min_p = top_p, min_p

    def keep(self, logit: float) -> bool | None:
        """Returns whether a token with this logit is kept; None where the sum of what is more likely is too close to
        top-p to tell, or others are so close to it that rounding decides their order."""
        temperature = self._temperature
        score, best = logit / temperature, float(self._highest) / temperature
        if self._min_p > 0 and score - best < math.log(self._min_p):
            return False
        if not self._top_k and self._top_p == 1:
            return True
        near = (NEAR + ROUNDING_64 * abs(best)) * temperature
        reached = self._logits[self._logits >= np.float32(logit - near)]
        if 0 < self._top_k <= np.count_nonzero(reached > np.float32(logit)):
            return False
        if self._top_p == 1 or len(reached) == 1:
            return True
        weights = np.exp(reached.astype(np.float64) / temperature - best)
        most = float(weights.sum()) - math.exp(score - best)
        if most < (self._top_p - NEAR_P) * self._sum:
            return True
        least = float(weights[reached > np.float32(logit + near)].sum())
        return False if least >= (self._top_p + NEAR_P) * self._sum else None

    @cached_property
    def _sum(self) -> float:
        """The sum of exp(score - the highest) of what top-k keeps, within a hundred thousandth of itself."""
        logits = self._logits
        if self._top_k:
            place = len(logits) - self._top_k
            logits = logits[logits >= np.partition(logits, place)[place]]
        with np.errstate(over="ignore"):  # of logits that weigh nothing
            scores = (logits - self._highest) * np.float32(1 / self._temperature)
        return float(np.exp(scores).sum())


def contenders(logits: Float, numbers: Row, smallest: float, likeliest: int, temperature: float) -> Int:
    """Returns tokens of a row without filters, in ascending order: all that may have the highest
    exp(logit / temperature) / number, and some others. numbers [V]: random numbers, all above 0, the smallest of them
    `smallest`; likeliest: the token with the highest logit, whose score is finite."""
    best = float(logits[likeliest]) / temperature
    # The likeliest token rings at its number. To ring earlier, another needs a higher value,
    value = best - math.log(numbers[likeliest]) - SLACK
    if (native := native_draws()) is not None and abs(best) < MOST_SCORE and temperature > 1 / MOST_SCORE:
        return native.may_win(logits, numbers, temperature, value)
    # so at least this score whatever its number. A logit is in fp32, so that rounding to it excludes none.
    return np.flatnonzero(logits >= np.float32(max((value + math.log(smallest)) * temperature, FP32_MIN)))


def winner(known: Known, kept: Kept) -> int | None:
    """Returns the token that wins the race of what is kept, or None."""
    best = known.scores.max()
    values = np.where(kept.possible, np.exp(known.scores - best) / known.numbers, 0.0)
    first = int(values.argmax())
    value, values[first] = values[first], 0.0
    others = np.exp(known.bounds[kept.others] - best) / known.bound_numbers[kept.others]
    rival = max(values.max(), others.max(initial=0.0))
    return int(known.tokens[first]) if kept.sure[first] and value * (1 - ROUNDING) > rival else None


def after_top_k(known: Known, kept: Kept, k: int) -> Kept:
    """A token is kept where fewer than k have a higher score."""
    ones, counts = np.ones(len(known.scores)), np.ones(len(known.bounds))
    counts[0] = known.rest
    higher = sum_above(known.scores, ones, known.scores)
    sure = higher + sum_above(known.bounds, counts, known.scores) < k
    others = sum_above(known.scores, ones, known.bounds) < k
    return Kept(kept.sure & sure, kept.possible & (higher < k), kept.others & others)


def after_top_p(known: Known, kept: Kept, p: float, least_rest: float) -> Kept | None:
    """A token is kept where the tokens before it weigh less than p of all; of equal scores the higher id comes first.
    least_rest: what the first bound's tokens that are kept so far weigh at least, in the unit of `mass`. Returns None
    where scores are too close to be put in an order."""
    order = np.argsort(known.scores, kind="stable")  # as the whole row is ordered, since ids ascend
    scores, sure, possible = known.scores[order], kept.sure[order], kept.possible[order]
    gaps = np.diff(scores[possible])
    if ((gaps > 0) & (gaps < NEAR)).any():
        return None
    best = scores[-1]
    weights = np.exp(scores - best)
    least, most = weights * sure, weights * possible  # that each known token may weigh
    rest = np.where(kept.others, np.exp(known.bounds - best), 0.0)  # that each bound's tokens may weigh at most
    if kept.others[0]:
        rest[0] = min(rest[0] * known.rest, known.mass[1])
    below_least, below_most = np.cumsum(least), np.cumsum(most)  # up to a token, with its own
    above_least, above_most = below_least[-1] - below_least, below_most[-1] - below_most
    above_least[-1] = above_most[-1] = 0.0
    above_most += sum_above(known.bounds, rest, np.nextafter(scores - NEAR, -math.inf))
    below_least += np.where(known.bounds[0] < scores - NEAR, least_rest, 0.0)
    # The share of what comes before a token rises with that and falls with the others' weight.
    surely = (above_most == 0) | (above_most < (p - ROUNDING) * (above_most + below_least))
    never = above_least >= (p + ROUNDING) * (above_least + below_most + rest.sum())
    above_bound = sum_above(scores, least, known.bounds + NEAR)
    below_bound = below_most[-1] - sum_above(scores, most, known.bounds + NEAR) + rest.sum()
    never_other = above_bound >= (p + ROUNDING) * (above_bound + below_bound)
    back = np.empty_like(order)
    back[order] = np.arange(len(order))
    return Kept((sure & surely)[back], (possible & ~never)[back], kept.others & ~never_other)


def after_min_p(known: Known, kept: Kept, min_p: float) -> Kept:
    """A token is kept where its score is at most -log(min_p) below the best that is kept."""
    best = known.scores.max()
    highest_best = max(best, known.bounds[kept.others].max(initial=-math.inf))
    # Of tokens nearly as good as the best, top-p may have kept another.
    lowest_best = best - NEAR
    least = math.log(min_p)
    return Kept(
        kept.sure & (known.scores - highest_best >= least),
        kept.possible & ~(known.scores - lowest_best < least),
        kept.others & ~(known.bounds - lowest_best < least),
    )


def sum_above(scores: Row, weights: Row, at: Row) -> Row:
    """Returns, for each number of `at`, the sum of the weights of scores above it."""
    if len(scores) == 1:
        return np.where(scores > at, weights, 0.0)
    order = np.argsort(scores)
    sums = np.append(0.0, np.cumsum(weights[order][::-1]))
    out: Row = sums[len(scores) - np.searchsorted(scores[order], at, "right")]
    return out


@np.errstate(over="ignore", invalid="ignore")
def rest_of_mass(log_sum_exp: float, scores: Row, best: float, excluded: float) -> tuple[float, float]:
    """Bounds of the sum of exp(score - best) over tokens of a row without some that are known.

    log_sum_exp: of all scores of the row, in fp32 (see Candidates). scores: of the known tokens. excluded: at most the
    sum of others that shall not count."""
    error = SUM_ERROR + FP32_ERROR * (abs(log_sum_exp) + LOG_VOCABULARY)
    known = float(np.exp(scores - best).sum())
    slack = ROUNDING * known
    least = float(np.exp(log_sum_exp - error - best)) - known - slack - excluded
    most = float(np.exp(log_sum_exp + error - best)) - known + slack
    # Where the second argument is NaN, as infinity less infinity is, max and min return the first.
    return max(0.0, least), max(0.0, min(math.inf, most))


def contains(ascending: Int, ids: Int) -> Bool:
    """Returns which of `ids` are among ids in ascending order, of which there is one at least."""
    places = np.minimum(np.searchsorted(ascending, ids), len(ascending) - 1)
    out: Bool = ascending[places] == ids
    return out
