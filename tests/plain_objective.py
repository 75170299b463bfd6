"""The objectives in their plain form, that training is compared with: every row computed at every step under one mask,
whole logits, gradients by autograd alone."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_export.heads.eagle3 import Eagle3Head
from eagle_train.config import DECAY
from eagle_train.losses import CROSS_ENTROPY, masked_mean, shared, soft_cross_entropy
from eagle_train.objective import Vocabulary
from eagle_train.taught import Batch
from eagle_train.ttt import unroll


def restricted_teacher(logits: Tensor, kept: Tensor | None) -> Tensor:
    """Returns the probabilities [..., Vd] of target logits [..., V] over the kept ids [Vd], renormalised; None: all."""
    return (logits if kept is None else logits.index_select(-1, kept)).softmax(-1)


def distribution_loss(logits: Tensor, teacher: Tensor) -> Tensor:
    """Returns 0.3 cross-entropy + 0.7 total variation [...] of logits [..., Vd] and probabilities [..., Vd]."""
    return CROSS_ENTROPY * soft_cross_entropy(logits, teacher) + (1 - CROSS_ENTROPY) * (1 - shared(logits, teacher))


def plain_eagle3(
    head: Eagle3Head,
    shape: HeadConfig,
    batch: Batch,
    features: Tensor,
    logits: Tensor,
    vocabulary: Vocabulary | None,
    steps: int,
    chosen: Tensor | None = None,
) -> tuple[Tensor, list[Tensor]]:
    """Returns the loss and that of each step. features [B, T, Hd]: after fc. logits [B, T, V]: the target's. chosen
    [B, T] bool: rows that count beyond the first step; None: all."""
    kept = None if vocabulary is None else vocabulary.ids
    teacher, best = restricted_teacher(logits, kept), logits.argmax(-1)
    teachable = torch.ones_like(batch.loss_mask) if vocabulary is None else vocabulary.member[best]
    losses = []
    for step, hidden in enumerate(unroll(head, shape, features, batch.ids, min(steps, batch.ids.shape[1] - 1))):
        counted = batch.counted(step)
        rows = counted & teachable[:, 1 + step :]
        if step and chosen is not None:
            rows = rows & chosen[:, : counted.shape[1]]
        draft = head.logits(hidden[:, : counted.shape[1]]).float()
        losses.append(masked_mean(distribution_loss(draft, teacher[:, 1 + step :]), rows))
    return torch.stack([DECAY**step * loss for step, loss in enumerate(losses)]).sum(), losses


def plain_eagle1(
    head: Eagle1Head, shape: HeadConfig, batch: Batch, features: Tensor, noise: Tensor, logits: Tensor, weight: float
) -> Tensor:
    """Returns the loss: smooth L1 (beta 1, mean over H), plus `weight` times the cross-entropy."""
    (hidden,) = unroll(head, shape, features + noise, batch.ids, 1)
    counted = batch.counted(0)
    missed = functional.smooth_l1_loss(hidden, features[:, 1:], reduction="none").mean(-1)
    entropy = soft_cross_entropy(head.logits(hidden), logits[:, 1:].softmax(-1))
    return masked_mean(missed, counted) + weight * masked_mean(entropy, counted)
