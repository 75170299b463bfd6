"""Measures how far the predictions of two models for a text differ. Shapes: R rows, V vocabulary."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Float

Double = npt.NDArray[np.float64]


def log_softmax(logits: Float) -> Double:
    """Returns the log-probabilities [R, V] of logits [R, V]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def divergence(source: Double, other: Double) -> Double:
    """Returns KL(source || other) of each row [R] in nats, from log-probabilities [R, V]. Tokens of probability 0 in
    the source (-inf) add nothing."""
    weights = np.exp(source)
    terms = np.multiply(weights, source - other, out=np.zeros_like(source), where=weights > 0)
    total: Double = np.maximum(terms.sum(-1), 0.0)  # rounding may make it negative
    return total
