"""Texts that part where rounding alone decides: in fp16, and once in a long while in fp32, two tokens are as likely as
each other but for the last bits of their logits, which depend on the rows that share a pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_runtime import EagleModel
from eagle_runtime.replay import forced_logits
from eagle_runtime.sampling import exponential_noise

NEAR = {"float32": 1e-5, "float16": 2**-8}  # of the largest logit: two that rounding alone sets apart


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Index of the first token that differs, or the shorter length."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def computes_in(model: EagleModel) -> str:
    """Type of the target's activations: a key of NEAR."""
    return model.sessions[0].inputs["tree_mask"].dtype


def is_tie(
    model: EagleModel,
    prompt: Sequence[int],
    one: Sequence[int],
    other: Sequence[int],
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> bool:
    """Whether two answers to a prompt first differ in tokens that the target holds equal but for rounding.

    Sampled tokens are compared as they were drawn: the highest logit - temperature * log(the position's random number)
    wins (see eagle_runtime.sampling). False where one answer is the other's beginning."""
    at = first_difference(one, other)
    if at == min(len(one), len(other)):
        return False
    logits = forced_logits(model, prompt, one[: at + 1])[-1]
    scores = logits.astype(np.float64)
    if temperature > 0:
        scores -= temperature * np.log(exponential_noise(seed, len(prompt) + at, len(scores)))
    near = NEAR[computes_in(model)] * float(np.abs(logits).max())
    return abs(float(scores[one[at]] - scores[other[at]])) <= near
