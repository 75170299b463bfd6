"""Draws from rows of logits that stay on the GPU: what the engine shall look at, and what its candidates decide.

Shapes: V vocabulary, n positions or tokens.
"""

from __future__ import annotations

import math

import numpy as np

from eagle_runtime.base.tree import Bool, Float, Int
from eagle_runtime.sampling.candidates import Candidates
from eagle_runtime.sampling.noise import Noise
from eagle_runtime.sampling.race import Known, contains, decide, highest, rest_of_mass
from eagle_runtime.sampling.scores import Row, Scores

AHEAD = 8  # positions whose random numbers are made while the target's forward pass runs, at most; chosen


class DeviceDraws:
    """Of one sampler, whose scores and random numbers it shares. inverse_temperature: what logits are multiplied by for
    `Candidates.log_sum_exp`; 1 at temperature 0."""

    def __init__(self, scores: Scores, noise: Noise) -> None:
        self._scores, self._noise, self._vocab_size = scores, noise, len(scores.seen)
        self.inverse_temperature = 1 / scores.params.temperature if scores.params.temperature > 0 else 1.0
        bias = scores.params.logit_bias
        raised = [token for token, value in bias.items() if value > 0]
        self._raised = np.array(sorted(raised, key=bias.__getitem__, reverse=True), np.int64)

    def watched(self, positions: Int, count: int) -> Int:
        """Returns the tokens [n, count] to be watched where tokens of absolute positions [n] are drawn: those that a
        bias raises, and those that win without being likely, as their random numbers are smallest; zeros fill up.
        Numbers of positions that follow are made from now on, on another thread."""
        out = np.zeros((len(positions), count), np.int64)
        raised = self._raised[: count // 2]
        out[:, : len(raised)] = raised
        drawn = sorted(set(positions.tolist())) if self._scores.params.temperature > 0 else []
        for position in drawn:
            least = self._noise.lowest(position, count + 1)[: count - len(raised)]
            out[positions == position, len(raised) : len(raised) + len(least)] = least
        if drawn:
            after = drawn[-1] + 1
            self._noise.prepare(range(after, after + min(AHEAD, after - drawn[0])))
        return out

    def decided(self, row: Candidates) -> int | None:
        """Returns the token that a whole row draws, or None where its candidates do not tell."""
        params = self._scores.params
        if not math.isfinite(row.log_sum_exp):
            return None
        if self._scores.takes_highest:
            best = row.logits.max()
            decided = len(row.ids) == self._vocab_size or best > row.logits.min()
            return int(row.ids[row.logits == best].min()) if decided else None
        known = self._known(row)
        if params.temperature == 0:
            return highest(known)
        return decide(known, params.top_k, params.top_p, params.min_p)

    @np.errstate(over="ignore", invalid="ignore")  # what overflows decides nothing
    def _known(self, row: Candidates) -> Known:
        """What a row's candidates say of its scores."""
        tokens, first = np.unique(np.concatenate([row.ids, row.watched_ids]), return_index=True)
        logits = np.concatenate([row.logits, row.watched_logits])[first]
        floor = row.logits.min()  # no other logit is higher
        mask = None if self._scores.matcher is None else self._scores.matcher.mask()
        is_special = self._scores.special
        special = np.flatnonzero(is_special)
        special = special[~contains(tokens, special)]
        rest = self._vocab_size - len(tokens) - len(special)
        temperature = self._scores.params.temperature
        plain = float(floor) / temperature if temperature > 0 else float(floor)
        scores = self._scores_of(tokens, logits, mask)
        bounds = np.append(plain if rest else -math.inf, self._scores_of(special, np.full(len(special), floor), mask))
        if temperature == 0:
            return Known(tokens, scores, scores, bounds, bounds, rest)
        noise = self._noise.at(self._scores.position)
        least = self._noise.lowest(self._scores.position, len(row.watched_ids) + 1)
        free = ~contains(tokens, least) & ~is_special[least]
        if mask is not None:
            free &= mask[least]
        smallest = noise[least[free.argmax()] if free.any() else least[-1]]
        mass = (0.0, math.inf)
        if self._scores.params.top_p < 1:
            best = scores.max()
            excluded = len(special) * np.exp(plain - best) if mask is None else math.inf
            mass = rest_of_mass(row.log_sum_exp, logits.astype(np.float64) / temperature, best, excluded)
        return Known(tokens, scores, noise[tokens], bounds, np.append(smallest, noise[special]), rest, mass)

    def _scores_of(self, tokens: Int, logits: Float, mask: Bool | None) -> Row:
        """As Scores.filtered without filters, for some tokens with their logits."""
        if mask is not None:
            logits = np.where(mask[tokens], logits, np.float32(-np.inf))
        scores = self._scores.of_tokens(logits, tokens).astype(np.float64)
        temperature = self._scores.params.temperature
        return scores / temperature if temperature > 0 else scores
