"""The training objectives, EAGLE-1's next feature and EAGLE-3's training-time test, and how both heads are measured.

Row i reads token i + 1 and the target's state at i, and learns the target's state at i + 1, which predicts token i + 2.
The row counts if token i + 2 carries loss.

Shapes: B texts, T tokens, V vocabulary, W width of the target's features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad
from torch.utils.checkpoint import checkpoint

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_export.heads.eagle3 import Eagle3Head
from eagle_train.config import DECAY, Inputs, TrainConfig
from eagle_train.losses import distribution_loss, eagle1_loss, masked_mean, overlap, restricted_teacher
from eagle_train.metrics import Tally
from eagle_train.ttt import Head, unroll


@dataclass(frozen=True, slots=True)
class Batch:
    """ids [B, T], zero after the end of a text. loss_mask [B, T] bool: tokens to be predicted, False in the padding."""

    ids: Tensor
    loss_mask: Tensor

    def counted(self, step: int) -> Tensor:
        """Returns [B, T - 1 - step] bool: rows whose predicted token i + 2 + step carries loss. The last row has
        none."""
        return pad(self.loss_mask[:, 2 + step :], (0, 1))


@dataclass(frozen=True, slots=True)
class Taught:
    """The frozen target's outputs for a batch: features [B, T, W] (last hidden state, or the taps joined; as the head
    reads them, after fc, where the objectives get them), logits [B, T, V] in fp32 and, where the target's own modules
    computed them, last [B, T, H]: states after the last norm."""

    features: Tensor
    logits: Tensor
    last: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """A draft vocabulary. ids [Vd]: target ids, ascending. member [V] bool. None stands for the target's vocabulary."""

    ids: Tensor
    member: Tensor

    @staticmethod
    def of(ids: Tensor, vocab: int) -> Vocabulary:
        """Returns the draft vocabulary of the target ids [Vd], of `vocab` ids in all."""
        member = torch.zeros(vocab, dtype=torch.bool)
        member[ids] = True
        return Vocabulary(ids, member)

    def to(self, device: torch.device) -> Vocabulary:
        return Vocabulary(self.ids.to(device), self.member.to(device))


def eagle1_objective(
    head: Eagle1Head, shape: HeadConfig, batch: Batch, taught: Taught, noise: Tensor, config: TrainConfig, tally: Tally
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the loss and its parts. noise [B, T, H] is added to the features that the head reads, not to its
    targets."""
    offset = token_offset(config.inputs)
    (hidden,) = unroll(head, shape, taught.features + noise, batch.ids, 1, offset=offset)
    logits = head.logits(hidden).float()
    counted = batch.counted(0)
    next_features, next_logits = taught.features[:, 1:].float(), taught.logits[:, 1:]
    total, regression, classification = eagle1_loss(
        hidden.float(), next_features, logits, next_logits.softmax(-1), counted, config.classification
    )
    with torch.no_grad():
        tally.add(0, logits.argmax(-1) == next_logits.argmax(-1), torch.ones_like(counted), counted)
    return total, {"regression": regression.detach(), "classification": classification.detach()}


def eagle3_objective(
    head: Eagle3Head,
    shape: HeadConfig,
    batch: Batch,
    taught: Taught,
    vocabulary: Vocabulary | None,
    config: TrainConfig,
    tally: Tally,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the sum over steps of DECAY**j times the loss of step j (distribution_loss), and those losses.

    Rows whose likeliest target token is outside the draft vocabulary carry no loss: the distribution restricted to the
    draft vocabulary would teach a token that verification rejects."""
    kept = None if vocabulary is None else vocabulary.ids
    teacher, best = restricted_teacher(taught.logits, kept), taught.logits.argmax(-1)
    teachable = torch.ones_like(batch.loss_mask) if vocabulary is None else vocabulary.member[best]
    run = Matches(batch, best, kept, tally)

    def step_loss(hidden: Tensor, wanted: Tensor, rows: Tensor) -> tuple[Tensor, Tensor]:
        logits = head.logits(hidden).float()
        return masked_mean(distribution_loss(logits, wanted), rows), logits.argmax(-1)

    losses = []
    steps = min(config.ttt_steps, batch.ids.shape[1] - 1)
    for step, hidden in enumerate(unroll(head, shape, taught.features, batch.ids, steps, recompute=config.recompute)):
        counted = batch.counted(step)
        args = (hidden[:, : counted.shape[1]], teacher[:, 1 + step :], counted & teachable[:, 1 + step :])
        if config.recompute:  # logits of all steps at once are the largest part of the memory
            loss, proposal = checkpoint(step_loss, *args, use_reentrant=False)
        else:
            loss, proposal = step_loss(*args)
        losses.append(loss)
        run.count(step, proposal, counted)
    total = torch.stack([DECAY**step * loss for step, loss in enumerate(losses)]).sum()
    return total, {f"step{step}": loss.detach() for step, loss in enumerate(losses)}


@torch.no_grad()
def measure(
    head: Head,
    shape: HeadConfig,
    batch: Batch,
    taught: Taught,
    vocabulary: Vocabulary | None,
    config: TrainConfig,
    tally: Tally,
) -> None:
    """Unroll a head of either kind over a batch without noise, as decoding does, and count the accepted tokens."""
    kept = None if vocabulary is None else vocabulary.ids
    run = Matches(batch, taught.logits.argmax(-1), kept, tally)
    steps, offset = min(config.ttt_steps, batch.ids.shape[1] - 1), token_offset(config.inputs)
    for step, hidden in enumerate(unroll(head, shape, taught.features, batch.ids, steps, offset=offset)):
        counted = batch.counted(step)
        logits = head.logits(hidden[:, : counted.shape[1]]).float()
        shared = overlap(logits, taught.logits[:, 1 + step :], kept)
        run.count(step, logits.argmax(-1), counted, shared)


class Matches:
    """Counts at each step the rows whose proposal is the target's token, and keeps those right at every step so far."""

    def __init__(self, batch: Batch, best: Tensor, kept: Tensor | None, tally: Tally) -> None:
        """best [B, T]: the target's likeliest tokens. kept: draft id -> target id, or None where both are the same."""
        self._best, self._kept, self._tally = best, kept, tally
        self._earlier = torch.ones_like(batch.loss_mask)

    def count(self, step: int, proposal: Tensor, counted: Tensor, shared: Tensor | None = None) -> None:
        """proposal [B, rows]: draft ids; counted [B, rows]; shared: probability that head and target have in common."""
        right = (proposal if self._kept is None else self._kept[proposal]) == self._best[:, 1 + step :]
        earlier = self._earlier[:, : counted.shape[1]]
        self._tally.add(step, right, earlier, counted, shared)
        self._earlier = earlier & right & counted


def token_offset(inputs: Inputs) -> int:
    """Returns the offset of the token that a row reads: row i reads t[i + offset]."""
    return 0 if inputs == "feature+unshifted" else 1
