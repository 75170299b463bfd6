"""What a model says of a given text, token by token, and how far two models are apart in it.

Shapes: R rows, V vocabulary. Row i holds the logits of the token after tokens[i].
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
import numpy.typing as npt

from eagle_runtime.eagle_model import EagleModel
from eagle_runtime.tree import Float

Double = npt.NDArray[np.float64]


def score(model: EagleModel, tokens: Sequence[int], first: int = 0) -> Iterator[Float]:
    """The target's logits of rows first, first + 1, ... in pieces [R, V], each valid until the next.

    Takes the model as a generation does: one at a time. Raises RequestError for tokens it cannot take."""
    checked = model._checked_prompt(tokens)
    model._generation += 1
    turn = model._generation
    for logits in model._target.score(checked, first):
        yield logits
        model._check_turn(turn)


def log_softmax(logits: Float) -> Double:
    """logits [R, V] -> log-probabilities [R, V]."""
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(-1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(-1, keepdims=True))
    return shifted


def divergence(source: Double, other: Double) -> Double:
    """KL(source || other) of each row in nats [R], of log-probabilities [R, V]. Tokens that the source rules out
    (-inf) add nothing."""
    weights = np.exp(source)
    terms = np.multiply(weights, source - other, out=np.zeros_like(source), where=weights > 0)
    total: Double = np.maximum(terms.sum(-1), 0.0)  # rounding may fall below
    return total
