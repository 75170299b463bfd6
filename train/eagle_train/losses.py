"""Losses and acceptance figures as pure functions.

Shapes: ... any leading dimensions, V vocabulary, Vd draft vocabulary, H hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

CROSS_ENTROPY = 0.3  # weight of the cross-entropy; the rest is that of the total variation


def masked_mean(values: Tensor, mask: Tensor) -> Tensor:
    """Returns the mean of values [...] where mask [...] is set; 0 if it is nowhere set."""
    return (values * mask).sum() / mask.sum().clamp(min=1)


def soft_cross_entropy(logits: Tensor, teacher: Tensor) -> Tensor:
    """Returns the cross-entropy [...] of logits [..., V] against probabilities [..., V]."""
    return -(teacher * logits.log_softmax(-1)).sum(-1)


def shared(logits: Tensor, teacher: Tensor) -> Tensor:
    """Returns sum_v min(p, q) [...] of logits [..., V] and probabilities [..., V]: the probability that a token sampled
    from the draft is accepted."""
    return torch.minimum(teacher, logits.softmax(-1)).sum(-1)


def total_variation(logits: Tensor, teacher: Tensor) -> Tensor:
    """Returns 1 - shared [...]: the probability that a token sampled from the draft is rejected."""
    return 1 - shared(logits, teacher)


def distribution_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Returns 0.3 cross-entropy + 0.7 total variation [...], as above (DeepSpec: 0.1 and 0.9)."""
    return CROSS_ENTROPY * soft_cross_entropy(logits, teacher) + (1 - CROSS_ENTROPY) * total_variation(logits, teacher)


def restricted_teacher(logits: Tensor, kept: Tensor | None) -> Tensor:
    """Returns the probabilities [..., Vd] of target logits [..., V] over the kept ids [Vd], renormalised; None: all
    ids."""
    return (logits if kept is None else logits.index_select(-1, kept)).softmax(-1)


def eagle1_loss(
    hidden: Tensor, features: Tensor, logits: Tensor, teacher: Tensor, mask: Tensor, weight: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns (total, regression, classification): smooth L1 (beta 1, mean over H) and soft cross-entropy, each the
    mean over masked rows, and regression + weight * classification.

    hidden [..., H] approximates features [..., H]. logits [..., V]: of hidden. teacher [..., V]: probabilities of
    features. mask [...]."""
    regression = masked_mean(functional.smooth_l1_loss(hidden, features, reduction="none").mean(-1), mask)
    classification = masked_mean(soft_cross_entropy(logits, teacher), mask)
    return regression + weight * classification, regression, classification


def overlap(logits: Tensor, target_logits: Tensor, kept: Tensor | None) -> Tensor:
    """Returns what draft logits [..., Vd] and target logits [..., V] share [...]. The target's probability outside the
    draft vocabulary counts as not shared."""
    p = target_logits.softmax(-1)
    return shared(logits, p if kept is None else p.index_select(-1, kept))
