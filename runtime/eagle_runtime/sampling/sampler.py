"""From logits to a token: penalties and filters in Hugging Face's order, and a draw that a seed replays.

Every emitted token is drawn here, with or without a draft tree, so both ways of decoding agree by construction:
the random number depends only on (seed, absolute position), the distribution only on the logits and the history.

Shapes: V vocabulary. Rows are float64 [V]; -inf marks a token that cannot be drawn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.arguments import checked_finite, checked_float, checked_int, short_repr
from eagle_runtime.base.errors import EagleError, RequestError
from eagle_runtime.base.tree import Bool, Int
from eagle_runtime.sampling.candidates import Candidates, LogitRow
from eagle_runtime.sampling.filters import Row, apply_repetition_penalty, keep_min_p, keep_top_k, keep_top_p
from eagle_runtime.sampling.grammar_matcher import Matcher
from eagle_runtime.sampling.noise import Noise
from eagle_runtime.sampling.race import SLACK, Known, contains, decide, drawn, highest, rest_of_mass

LogProbs = tuple[float, tuple[tuple[int, float], ...]]  # of the token drawn, and of the likeliest ones
AHEAD = 8  # positions whose random numbers are made while the target's forward pass runs, at most


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


def bias_of_json(bias: Any) -> Any:
    """A bias whose tokens are strings, since JSON has no other keys, with the digits among them as numbers."""
    if not isinstance(bias, dict):
        return bias
    return {int(key) if key.isdecimal() and len(key) < 20 else key: value for key, value in bias.items()}


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
        self._noise = Noise(params.seed, vocab_size)
        self.exponential_noise = self._noise.at  # an absolute position -> its random numbers [V]
        repeats_cost = params.repetition_penalty != 1
        self._history_counts = repeats_cost or params.presence_penalty != 0 or params.frequency_penalty != 0
        # The tokens that are not scored as others are, as ids and marks [V], and what is added to each logit before
        # the rest, first while `late` tokens cannot come, then later.
        raised = [token for token, value in params.logit_bias.items() if value > 0]
        self._raised = np.array(sorted(raised, key=params.logit_bias.__getitem__, reverse=True), np.int64)
        special = {*params.logit_bias, *self._late.tolist(), *(prompt if repeats_cost else ())}
        self._special = np.array(sorted(special), np.int64)
        self._is_special = np.zeros(vocab_size, np.bool_)
        self._is_special[self._special] = True
        self._added = self._added_early = np.zeros(vocab_size if len(special) else 0)
        if len(special):
            self._added[self._bias_ids] = self._bias
            self._added_early = self._added.copy()
            self._added_early[self._late] = -np.inf
        self._raw_scores = (
            matcher is None
            and len(self._bias_ids) == 0
            and (least == 0 or len(self._late) == 0)
            and not self._history_counts
        )

    def next(self, logits: npt.NDArray[np.float32] | LogitRow) -> int:
        """Draw the token of the next position from the target's logits and add it to the history. logits: [V], or a row
        that is not on the host, which is fetched only where its candidates do not decide."""
        token = None if isinstance(logits, np.ndarray) else self._decided(logits.candidates)
        if token is None:
            token = self._drawn(logits if isinstance(logits, np.ndarray) else logits.whole())
        self._add(token)
        return token

    def _drawn(self, logits: npt.NDArray[np.float32]) -> int:
        likeliest = int(logits.argmax())
        if not math.isfinite(logits[likeliest]):  # NaN wins every maximum
            raise EagleError(
                f"the target's logits at position {self.position} are not finite; the model's weights or its "
                "precision do not fit (try fp32)"
            )
        token = likeliest if self.takes_highest else self._draw(logits, likeliest)
        if self._num_log_probs is not None:
            self._log_probs.append(log_probs_of(logits, token, self._num_log_probs))
        return token

    def _add(self, token: int) -> None:
        self._seen[token] = True
        self._counts[token] += 1
        if self._history_counts and not self._is_special[token]:
            self._is_special[token] = True
            self._special = np.append(self._special, token)
        self.position += 1
        if self.params.temperature > 0:
            self._noise.forget(self.position)
        if self.matcher is not None:
            self.matcher.consume(token)

    @property
    def finished(self) -> bool:
        """Whether the constraint ends the output with the last token."""
        return self.matcher is not None and self.matcher.finished

    def taken_log_probs(self) -> list[LogProbs]:
        """Returns what was recorded since the last call, for each token that was drawn."""
        records, self._log_probs = self._log_probs, []
        return records

    def _draw(self, logits: npt.NDArray[np.float32], likeliest: int) -> int:
        """likeliest: the token with the highest logit."""
        params = self.params
        if params.temperature == 0:
            return int(np.argmax(self.process(logits)))
        # The Gumbel-max trick: of exponential clocks with rates p, each rings first with probability p. Logits that
        # differ by rounding, as those of one token in different trees may, then draw another token with a chance of
        # about that difference (Daliri et al., arXiv 2408.07978). Inverting the cumulative distribution would do so
        # hundreds of times as often, since rounding shifts the edges of all tokens.
        numbers, smallest = self.exponential_noise(self.position), self._noise.least(self.position)
        if self._raw_scores:
            filters = params.top_k, params.top_p, params.min_p
            token = drawn(logits, likeliest, numbers, smallest, params.temperature, filters)
            if token is not None:
                return token
        scores = self.process(logits)
        # The likeliest token rings at its number; to ring earlier, another needs this score, whatever its number.
        likeliest = int(np.argmax(scores))
        least = scores[likeliest] + math.log(smallest / numbers[likeliest]) - SLACK
        few = np.flatnonzero(scores >= least)
        return int(few[np.argmax(np.exp(scores[few] - scores[likeliest]) / numbers[few])])

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
        scores = self._penalised(scores, slice(None))
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

    def _penalised(self, scores: Row, tokens: Int | slice) -> Row:
        """Scores of tokens -> with penalties and temperature. A higher score of a token never gets a lower one."""
        params = self.params
        if params.repetition_penalty != 1:
            scores = apply_repetition_penalty(scores, self._seen[tokens], params.repetition_penalty)
        if params.presence_penalty or params.frequency_penalty:
            counts = self._counts[tokens]
            scores -= params.presence_penalty * (counts > 0) + params.frequency_penalty * counts
        if params.temperature > 0:
            scores /= params.temperature
        return scores

    @property
    def inverse_temperature(self) -> float:
        """What logits are multiplied by for `Candidates.log_sum_exp`; 1 at temperature 0."""
        return 1 / self.params.temperature if self.params.temperature > 0 else 1.0

    @property
    def takes_highest(self) -> bool:
        """Whether every token is the one with the highest logit, whatever came before."""
        return self._raw_scores and self.params.temperature == 0

    def watched(self, positions: Int, count: int) -> Int:
        """Returns the tokens [n, count] to be watched where tokens of absolute positions [n] are drawn: those that a
        bias raises, and those that win without being likely, as their random numbers are smallest; zeros fill up.
        Numbers of positions that follow are made from now on, on another thread."""
        out = np.zeros((len(positions), count), np.int64)
        raised = self._raised[: count // 2]
        out[:, : len(raised)] = raised
        drawn = sorted(set(positions.tolist())) if self.params.temperature > 0 else []
        for position in drawn:
            least = self._noise.lowest(position, count + 1)[: count - len(raised)]
            out[positions == position, len(raised) : len(raised) + len(least)] = least
        if drawn:
            after = drawn[-1] + 1
            self._noise.prepare(range(after, after + min(AHEAD, after - drawn[0])))
        return out

    def _decided(self, row: Candidates) -> int | None:
        """Returns the token that a whole row draws, or None where its candidates do not tell."""
        params = self.params
        if self._num_log_probs is not None or not math.isfinite(row.log_sum_exp):
            return None
        if self.takes_highest:
            best = row.logits.max()
            decided = len(row.ids) == len(self._seen) or best > row.logits.min()
            return int(row.ids[row.logits == best].min()) if decided else None
        known = self._known(row)
        if params.temperature == 0:
            return highest(known)
        return decide(known, params.top_k, params.top_p, params.min_p)

    @np.errstate(over="ignore", invalid="ignore")  # what overflows decides nothing
    def _known(self, row: Candidates) -> Known:
        """What a row's candidates say of its scores."""
        tokens, first = np.unique(np.concatenate([row.ids, row.watched_ids]), return_index=True)
        logits = np.concatenate([row.logits, row.watched_logits])[first].astype(np.float64)
        floor = float(row.logits.min())  # no other logit is higher
        mask = None if self.matcher is None else self.matcher.mask()
        special = self._special
        if len(special):
            special = special[~contains(tokens, special)]
        rest = len(self._seen) - len(tokens) - len(special)
        temperature = self.params.temperature
        plain = floor / temperature if temperature > 0 else floor
        scores = self._scores_of(tokens, logits, mask)
        bounds = np.append(plain if rest else -math.inf, self._scores_of(special, np.full(len(special), floor), mask))
        if temperature == 0:
            return Known(tokens, scores, scores, bounds, bounds, rest)
        noise = self.exponential_noise(self.position)
        least = self._noise.lowest(self.position, len(row.watched_ids) + 1)
        free = ~contains(tokens, least) & ~self._is_special[least]
        if mask is not None:
            free &= mask[least]
        smallest = noise[least[free.argmax()] if free.any() else least[-1]]
        mass = (0.0, math.inf)
        if self.params.top_p < 1:
            best = scores.max()
            excluded = len(special) * np.exp(plain - best) if mask is None else math.inf
            mass = rest_of_mass(row.log_sum_exp, logits / temperature, best, excluded)
        return Known(tokens, scores, noise[tokens], bounds, np.append(smallest, noise[special]), rest, mass)

    def _scores_of(self, tokens: Int, logits: Row, mask: Bool | None) -> Row:
        """As `process` before its filters, for some tokens with their logits."""
        scores = logits.copy()
        if len(self._added):
            scores += (self._added_early if self.position < self._late_until else self._added)[tokens]
        if mask is not None:
            scores[~mask[tokens]] = -np.inf
        return self._penalised(scores, tokens)
