"""From logits to a token: a draw that a seed replays.

Every emitted token is drawn here, with or without a draft tree, so both ways of decoding agree by construction:
the random number depends only on (seed, absolute position), the distribution only on the logits and the history.

Shapes: V vocabulary.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from functools import cached_property

import numpy as np

from eagle_runtime.base.errors import EagleError
from eagle_runtime.base.tree import Float
from eagle_runtime.sampling.candidates import LogitRow
from eagle_runtime.sampling.device_draws import DeviceDraws
from eagle_runtime.sampling.grammar_matcher import Matcher
from eagle_runtime.sampling.noise import Noise
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.race import SLACK, drawn
from eagle_runtime.sampling.scores import Row, Scores

LogProbs = tuple[float, tuple[tuple[int, float], ...]]  # of the token drawn, and of the likeliest ones
NEAR = np.float32(8)  # below the highest logit: most often there are enough tokens; a partition takes ten times as long


def log_probs_of(logits: Float, token: int, count: int) -> LogProbs:
    """Returns the logarithm of a token's probability by logits [V], and the `count` likeliest tokens with theirs, best
    first, ties to the lower id. The exponentials are of fp32, as logits are, their sum is of fp64."""
    highest = logits.max()
    total = float(highest) + math.log(np.exp(logits - highest).sum(dtype=np.float64))
    best = np.flatnonzero(logits >= highest - NEAR)
    count = min(count, len(logits))
    if len(best) < count:
        best = np.flatnonzero(logits >= np.partition(logits, len(logits) - count)[len(logits) - count])
    best = best[np.argsort(-logits[best], kind="stable")][:count]
    return float(logits[token]) - total, tuple((int(index), float(logits[index]) - total) for index in best)


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
        self.params, self.matcher = params, matcher
        self.scores = Scores(params, prompt, vocab_size, late, least, matcher)
        self._noise = Noise(params.seed, vocab_size)
        self.exponential_noise = self._noise.at  # an absolute position -> its random numbers [V]
        self._num_log_probs = log_probs
        self._log_probs: list[LogProbs] = []

    @property
    def position(self) -> int:
        """The absolute position of the next token."""
        return self.scores.position

    @cached_property
    def on_device(self) -> DeviceDraws:
        """Draws from rows of logits that are not on the host."""
        return DeviceDraws(self.scores, self._noise)

    def next(self, logits: Float | LogitRow) -> int:
        """Draw the token of the next position from the target's logits and add it to the history. logits: [V], or a row
        that is not on the host, which is fetched only where its candidates do not decide."""
        token = None
        if not isinstance(logits, np.ndarray) and self._num_log_probs is None:
            token = self.on_device.decided(logits.candidates)
        if token is None:
            token = self._drawn(logits if isinstance(logits, np.ndarray) else logits.whole())
        self.scores.add(token)
        if self.params.temperature > 0:
            self._noise.forget(self.position)
            self._noise.prepare([self.position])
        return token

    def _drawn(self, logits: Float) -> int:
        likeliest = int(logits.argmax())
        if not math.isfinite(logits[likeliest]):  # NaN wins every maximum
            raise EagleError(
                f"the target's logits at position {self.position} are not finite; the model's weights or its "
                "precision do not fit (try fp32)"
            )
        if (row := self.scores.adjusted(logits)) is not logits:
            likeliest = int(row.argmax())
            self.scores.check(row[likeliest])
        token = likeliest if self.params.temperature == 0 else self._draw(row, likeliest)
        if self._num_log_probs is not None:
            self._log_probs.append(log_probs_of(logits, token, self._num_log_probs))
        return token

    @property
    def finished(self) -> bool:
        """Whether the constraint ends the output with the last token."""
        return self.matcher is not None and self.matcher.finished

    def taken_log_probs(self) -> list[LogProbs]:
        """Returns what was recorded since the last call, for each token that was drawn."""
        records, self._log_probs = self._log_probs, []
        return records

    def _draw(self, logits: Float, likeliest: int) -> int:
        """logits [V]: as Scores.adjusted returns them. likeliest: the token with the highest."""
        # The Gumbel-max trick: of exponential clocks with rates p, each rings first with probability p. Logits that
        # differ by rounding, as those of one token in different trees may, then draw another token with a chance of
        # about that difference (Daliri et al., arXiv 2408.07978). Inverting the cumulative distribution would do so
        # hundreds of times as often, since rounding shifts the edges of all tokens.
        numbers, smallest = self.exponential_noise(self.position), self._noise.least(self.position)
        params = self.params
        filters = params.top_k, params.top_p, params.min_p
        token = drawn(logits, likeliest, numbers, smallest, params.temperature, filters)
        return self._drawn_of_all(logits, numbers, smallest) if token is None else token

    def _drawn_of_all(self, logits: Float, numbers: Row, smallest: float) -> int:
        """As `drawn`, from the scores of all tokens."""
        scores = self.scores.filtered(logits)
        # The likeliest token rings at its number; to ring earlier, another needs this score, whatever its number.
        likeliest = int(np.argmax(scores))
        least = scores[likeliest] + math.log(smallest / numbers[likeliest]) - SLACK
        few = np.flatnonzero(scores >= least)
        return int(few[np.argmax(np.exp(scores[few] - scores[likeliest]) / numbers[few])])
