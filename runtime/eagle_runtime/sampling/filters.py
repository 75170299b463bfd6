"""The steps from scores to the distribution that is drawn from, in Hugging Face's rules.

Shapes: V vocabulary. Rows are float64 [V]; -inf marks a token that cannot be drawn.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

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
