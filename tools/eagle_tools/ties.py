"""Detects texts that differ only by rounding. In fp16, and rarely in fp32, the logits of two tokens are equal up to
their last bits, which depend on the number of rows in a forward pass."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_calib.replay import forced_logits
from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import Manifest
from eagle_runtime.sampling.noise import exponential_noise

NEAR = {"float32": 1e-5, "float16": 2**-8}  # maximum difference by rounding, as a share of the largest logit


def first_difference(one: Sequence[int], other: Sequence[int]) -> int:
    """Returns the index of the first different token, or the shorter length."""
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def is_quantised(manifest: Manifest) -> bool:
    """Whether a target's weights are in bytes or less. On CPUs its rows are then equal to the bit alone and in trees,
    while other kernels may round it otherwise."""
    return manifest.precision["target"] not in ("fp32", "fp16")


def computes_in(model: EagleModel) -> str:
    """Returns the type of the target's activations, a key of NEAR."""
    return model.manifest.target.graph.inputs["tree_mask"].dtype


def is_tie(
    model: EagleModel,
    prompt: Sequence[int],
    one: Sequence[int],
    other: Sequence[int],
    *,
    temperature: float = 0.0,
    seed: int = 0,
) -> bool:
    """Returns whether the first two different tokens of two answers have the same score up to rounding.

    The score of a token is its logit; of a sampled token the logit - temperature * log(noise), of which the highest is
    sampled (see eagle_runtime.sampling.sampler). False if one answer is the beginning of the other."""
    at = first_difference(one, other)
    if at == min(len(one), len(other)):
        return False
    logits = forced_logits(model, prompt, one[: at + 1])[-1]
    scores = logits.astype(np.float64)
    if temperature > 0:
        scores -= temperature * np.log(exponential_noise(seed, len(prompt) + at, len(scores)))
    near = NEAR[computes_in(model)] * float(np.abs(logits).max())
    return abs(float(scores[one[at]] - scores[other[at]])) <= near
