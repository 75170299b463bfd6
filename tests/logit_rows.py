"""Rows of logits as an engine on a GPU returns them, made from rows in NumPy."""

from __future__ import annotations

import numpy as np

from eagle_runtime.base.tree import Float, Int
from eagle_runtime.sampling.candidates import Candidates

SUM_ERROR = 5e-5  # of log_sum_exp, half of what Candidates allows


class HostRow:
    """A row that counts how often it is fetched. Equal logits come in a random order, the sum with an error."""

    def __init__(
        self, row: Float, count: int, watched_ids: Int, inverse_temperature: float, rng: np.random.Generator
    ) -> None:
        """row [V]. count: K. watched_ids [M]."""
        self._row = row
        self.fetches = 0
        shuffled = rng.permutation(len(row))
        ids = shuffled[np.argsort(-row[shuffled], kind="stable")][:count]
        total = log_sum_exp(row * np.float64(inverse_temperature)) + rng.uniform(-SUM_ERROR, SUM_ERROR)
        self.candidates = Candidates(ids, row[ids], float(np.float32(total)), watched_ids, row[watched_ids])

    def whole(self) -> Float:
        """The row."""
        self.fetches += 1
        return self._row


def log_sum_exp(scores: np.ndarray[tuple[int], np.dtype[np.float64]]) -> float:
    """Of [V]; NaN where a score is NaN or infinite, or all are -infinite."""
    with np.errstate(invalid="ignore", divide="ignore"):
        best = scores.max()
        return float(best + np.log(np.exp(scores - best).sum()))
