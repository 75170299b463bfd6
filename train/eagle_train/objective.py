"""The training objectives, EAGLE-1's next feature and EAGLE-3's training-time test, and how both heads are measured.

Row i reads token i + 1 and the target's state at i, and learns the target's state at i + 1, which predicts token i + 2.
The row counts if token i + 2 carries loss.

Shapes: B texts, T tokens, V vocabulary, W width of the target's features.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.functional import pad

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_export.heads.eagle3 import Eagle3Head
from eagle_train.config import DECAY, Inputs, TrainConfig
from eagle_train.linear_loss import classification, linear_loss
from eagle_train.losses import shared as shared_with
from eagle_train.metrics import Tally
from eagle_train.rows import reaching, taken, unroll_rows
from eagle_train.taught import Batch, Taught
from eagle_train.ttt import Head, unroll

MEASURED = 256  # rows whose logits are held at a time while a head is measured


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
    counted = batch.counted(0)
    rows = _numbered(counted, batch)
    drafted = hidden.flatten(0, 1)[torch.nonzero(counted.flatten()).flatten()]
    next_features = taught.features.flatten(0, 1)[rows + 1].float()
    regression = functional.smooth_l1_loss(drafted.float(), next_features, reduction="none").mean(-1).sum()
    regression = regression / max(1, len(rows))
    classified, right = classification(head.lm_head_input(drafted), head.lm_head, taught.said, rows + 1)
    with torch.no_grad():
        Matches(batch.loss_mask, tally).add(0, _placed(right, counted), counted)
    total = regression + config.classification * classified
    return total, {"regression": regression.detach(), "classification": classified.detach()}


def eagle3_objective(
    head: Eagle3Head,
    shape: HeadConfig,
    batch: Batch,
    taught: Taught,
    vocabulary: Vocabulary | None,
    config: TrainConfig,
    tally: Tally,
    chosen: Tensor | None = None,
) -> tuple[Tensor, dict[str, Tensor]]:
    """Returns the sum over steps of DECAY**j times the loss of step j (distribution_loss), and those losses. chosen
    [B, T] bool: rows that are unrolled beyond the first step; None: all.

    Rows whose likeliest target token is outside the draft vocabulary carry no loss: the distribution restricted to the
    draft vocabulary would teach a token that verification rejects."""
    kept, best = None if vocabulary is None else vocabulary.ids, taught.said.best
    teachable = torch.ones_like(batch.loss_mask) if vocabulary is None else vocabulary.member[best]
    counted, learning = [], []
    for step in range(min(config.ttt_steps, batch.ids.shape[1] - 1)):
        count = batch.counted(step)
        if step and chosen is not None:
            count = count & chosen[:, : count.shape[1]]
        counted.append(count)
        learning.append(pad(count & teachable[:, 1 + step :], (0, 1 + step)))
    rows = reaching(learning)
    states, learned, weights = [], [], []
    for step, hidden in enumerate(unroll_rows(head, shape, taught.features, batch.ids, rows, config.recompute)):
        of_step = torch.nonzero(learning[step].flatten()).flatten()
        states.append(taken(hidden, torch.searchsorted(rows[step], of_step)))
        learned.append(of_step)
        weights.append(torch.full((len(of_step),), DECAY**step / max(1, len(of_step)), device=hidden.device))
    every = torch.cat(states)
    teachers = torch.cat([of_step + 1 + step for step, of_step in enumerate(learned)])
    wanted = best.flatten()[teachers]
    losses = linear_loss(
        head.norm(every) if head.output_norm == "logits" else every,
        head.lm_head.weight,
        lambda some: taught.said.logits(some, kept).softmax(-1),
        teachers,
        wanted if kept is None else torch.searchsorted(kept, wanted),
        torch.cat(weights),
    )
    parts, run = {}, Matches(batch.loss_mask, tally)
    sizes = [len(of_step) for of_step in learned]
    for step, (each, right) in enumerate(
        zip(torch.split(losses.each, sizes), torch.split(losses.right, sizes), strict=True)
    ):
        parts[f"step{step}"] = each.sum() / max(1, len(each))
        run.add(step, _placed(right, learning[step])[:, : counted[step].shape[1]], counted[step])
    return losses.total, parts


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
    kept, best = None if vocabulary is None else vocabulary.ids, taught.said.best.flatten()
    run = Matches(batch.loss_mask, tally)
    steps, offset = min(config.ttt_steps, batch.ids.shape[1] - 1), token_offset(config.inputs)
    counted = [batch.counted(step) for step in range(steps)]
    learning = [pad(count, (0, 1 + step)) for step, count in enumerate(counted)]
    if isinstance(head, Eagle3Head):
        rows = reaching(learning)
        states = unroll_rows(head, shape, taught.features, batch.ids, rows)
    else:
        rows = [torch.arange(batch.ids.numel(), device=batch.ids.device)] * steps
        whole = unroll(head, shape, taught.features, batch.ids, steps, offset=offset)
        states = (pad(hidden, (0, 0, 0, 1)).flatten(0, 1) for hidden in whole)
    for step, hidden in enumerate(states):
        of_step = torch.nonzero(learning[step].flatten()).flatten()
        right, shared = [], []
        for some in torch.split(of_step, MEASURED):
            logits = head.logits(hidden[torch.searchsorted(rows[step], some)]).float()
            teachers = some + 1 + step
            shared.append(shared_with(logits, taught.said.probabilities(teachers, kept)))
            proposal = logits.argmax(-1)
            right.append((proposal if kept is None else kept[proposal]) == best[teachers])
        width = counted[step].shape[1]
        grids = [_placed(torch.cat(each), learning[step])[:, :width] for each in (right, shared)]
        run.add(step, grids[0], counted[step], grids[1])


class Matches:
    """Counts at each step the rows whose proposal is the target's token, and keeps those right at every step so far."""

    def __init__(self, rows: Tensor, tally: Tally) -> None:
        """rows [B, ...] bool: of the shape of all rows of a step."""
        self._tally, self._earlier = tally, torch.ones_like(rows)

    def add(self, step: int, right: Tensor, counted: Tensor, shared: Tensor | None = None) -> None:
        """right, counted [B, rows] bool: whether the likeliest draft is the target's likeliest token, and whether the
        row counts. shared: probability that head and target have in common."""
        earlier = self._earlier[:, : counted.shape[1]]
        self._tally.add(step, right, earlier, counted, shared)
        self._earlier = earlier & right & counted


def _numbered(places: Tensor, batch: Batch) -> Tensor:
    """Returns the numbers b * T + i of the set places [B, R]."""
    text, row = torch.nonzero(places, as_tuple=True)
    return text * batch.ids.shape[1] + row


def _placed(values: Tensor, places: Tensor) -> Tensor:
    """Returns a grid like places with the values [n] where it is set, and zeros elsewhere."""
    grid = torch.zeros(places.shape, dtype=values.dtype, device=values.device)
    grid[places] = values
    return grid


def token_offset(inputs: Inputs) -> int:
    """Returns the offset of the token that a row reads: row i reads t[i + offset]."""
    return 0 if inputs == "feature+unshifted" else 1
