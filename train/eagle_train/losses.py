"""Losses and acceptance figures as pure functions.

Shapes: ... any leading dimensions, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

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
