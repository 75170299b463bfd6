"""The distribution loss through an LM head, with its gradient computed on the way, so that no logits are kept.

    z = W h, q = softmax(z)      loss = a CE + (1 - a) TV, CE = sum p (lse(z) - z), TV = 1 - sum min(p, q)
    dCE/dz = q sum(p) - p        dTV/dz = q (S - m), m = [q < p], S = sum m q

Rows are taken in the order of their teachers, so that drafts of one token at several steps share the target's logits.
All buffers are reused from chunk to chunk: on a CPU fresh memory costs more than the arithmetic on it.

Shapes: n rows, H width, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, cast

import torch
from torch import Tensor

from eagle_train.losses import CROSS_ENTROPY
from eagle_train.rows import taken
from eagle_train.taught import Said

CHUNK = {"cpu": 1 << 20}  # logits at a time: on a CPU what its caches hold
CHUNK_ELSEWHERE = 1 << 27
LEAST_ROWS = 128  # rows at a time, for products that are worth reading the weights
Teacher = Callable[[Tensor], Tensor]
Whole = Callable[..., tuple[Tensor, Tensor, Tensor]]


@dataclass(frozen=True, slots=True)
class RowLosses:
    """total: the weighted sum of all rows' losses. each [n]: their losses, without gradients. right [n] bool: whether
    the likeliest draft token is the wanted one."""

    total: Tensor
    each: Tensor
    right: Tensor


def linear_loss(
    hidden: Tensor, lm_head: Tensor, teacher: Teacher, teacher_rows: Tensor, wanted: Tensor, weights: Tensor
) -> RowLosses:
    """Returns the losses of rows [n, H] of hidden states through an LM head [Vd, H].

    teacher: returns the probabilities [k, Vd] in fp32 of the target's rows [k]. teacher_rows [n]: which of them each
    row learns. wanted [n]: the draft id of the target's likeliest token. weights [n]: of each row's loss in the
    total."""
    order = teacher_rows.argsort(stable=True)
    hidden, lm_head = _cast(hidden), _cast(lm_head)
    total, each, right = _LinearLoss.apply(  # type: ignore[no-untyped-call]
        taken(hidden, order), lm_head, teacher, teacher_rows[order], wanted[order], weights[order]
    )
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return RowLosses(total, each[back], right[back])


class _LinearLoss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        lm_head: Tensor,
        teacher: Teacher,
        teacher_rows: Tensor,
        wanted: Tensor,
        weights: Tensor,
    ) -> tuple[Tensor, Tensor, Tensor]:
        count, width = len(hidden), len(lm_head)
        size = _rows_at_a_time(hidden, width)
        pulled, grown = torch.zeros_like(hidden), torch.zeros_like(lm_head, dtype=torch.float32)
        losses = weights.new_zeros(count)
        right = torch.zeros(count, dtype=torch.bool, device=hidden.device)
        fused = hidden.device.type == "cuda"
        shape = (0 if fused else min(size, count), width)
        buffers = [hidden.new_empty(shape, dtype=torch.float32) for _ in range(3)]
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, count, size):
                part = slice(start, min(start + size, count))
                rows, among = torch.unique_consecutive(teacher_rows[part], return_inverse=True)
                h, share = hidden[part], weights[part, None]
                if fused:
                    logits = torch.mm(h, lm_head.T)
                    losses[part], right[part], pull = _compiled(whole_loss)(teacher(rows), among, logits, wanted[part])
                else:
                    p, q, spare = (buffer[: part.stop - start] for buffer in buffers)
                    torch.index_select(teacher(rows), 0, among, out=p)
                    if h.dtype == torch.float32:
                        torch.mm(h, lm_head.T, out=q)
                    else:
                        q.copy_(torch.mm(h, lm_head.T))
                    losses[part], right[part] = _loss_and_pull(p, q, spare, wanted[part])
                    pull = q.to(h.dtype)
                torch.mm(pull, lm_head, out=pulled[part]).mul_(share)
                if h.dtype == torch.float32:
                    grown.addmm_(pull.T, h * share)
                else:
                    grown += torch.mm(pull.T, (h * share).to(h.dtype))
        ctx.save_for_backward(pulled, grown.to(lm_head.dtype))
        ctx.mark_non_differentiable(losses, right)
        return (losses * weights).sum(), losses, right

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        pulled, grown = ctx.saved_tensors
        given = gradients[0]
        return pulled * given.to(pulled.dtype), grown * given.to(grown.dtype), None, None, None, None


def _loss_and_pull(p: Tensor, q: Tensor, spare: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor]:
    """p: probabilities of the teacher [n, Vd]. q: logits of the draft, which become the loss's gradient by them. spare
    [n, Vd]. Returns loss and whether `wanted` is the likeliest id, [n] each."""
    mass = p.sum(-1)
    q.sub_(q.amax(-1, keepdim=True))
    right = q.gather(-1, wanted[:, None])[:, 0] == 0
    expected = torch.mul(p, q, out=spare).sum(-1)
    scale = q.exp_().sum(-1)
    q.div_(scale[:, None])
    missed = torch.sub(p, q, out=spare).clamp_(min=0).sum(-1)  # sum of p - min(p, q)
    gained = spare.sign_().mul_(q).sum(-1)
    cross_entropy, variation = mass * scale.log() - expected, 1 - mass + missed
    q.mul_((CROSS_ENTROPY * mass + (1 - CROSS_ENTROPY) * gained)[:, None])
    q.sub_(spare, alpha=1 - CROSS_ENTROPY).sub_(p, alpha=CROSS_ENTROPY)
    return CROSS_ENTROPY * cross_entropy + (1 - CROSS_ENTROPY) * variation, right


def whole_loss(probabilities: Tensor, among: Tensor, logits: Tensor, wanted: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """As _loss_and_pull, written for a compiler: it makes a few passes over the logits of it.

    probabilities [k, Vd]: of the teachers. among [n]: which of them each row learns. logits [n, Vd]. Returns losses
    [n], whether `wanted` [n] is the likeliest id, and the gradients [n, Vd] by the logits in their type."""
    p, z = probabilities[among], logits.float()
    z = z - z.amax(-1, keepdim=True)
    right = z.gather(-1, wanted[:, None])[:, 0] == 0
    e = z.exp()
    scale = e.sum(-1, keepdim=True)
    q = e / scale
    mass = p.sum(-1)
    expected = (p * z).sum(-1)
    above = torch.where(p > q, q, 0.0)  # where the draft has too little
    missed = torch.where(p > q, p - q, 0.0).sum(-1)
    gained = above.sum(-1)
    cross_entropy, variation = mass * scale[:, 0].log() - expected, 1 - mass + missed
    pull = q * (CROSS_ENTROPY * mass + (1 - CROSS_ENTROPY) * gained)[:, None]
    pull = pull - (1 - CROSS_ENTROPY) * above - CROSS_ENTROPY * p
    return CROSS_ENTROPY * cross_entropy + (1 - CROSS_ENTROPY) * variation, right, pull.to(logits.dtype)


@lru_cache
def _compiled(function: Whole) -> Whole:
    return cast(Whole, torch.compile(function, dynamic=True))


def classification(hidden: Tensor, lm_head: torch.nn.Linear, said: Said, rows: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the mean cross-entropy of hidden states [n, H], through the target's own frozen LM head [V, H], against
    what the target says in rows [n], and whether the likeliest token of each is the target's [n] bool."""
    hidden, weight = _cast(hidden), {"weight": _cast(lm_head.weight)}
    size = _rows_at_a_time(hidden, lm_head.out_features)
    loss, right = _Classification.apply(  # type: ignore[no-untyped-call]
        hidden, lambda some: torch.func.functional_call(lm_head, weight, (some,)), said, rows, size
    )
    return loss, right


def whole_entropy(p: Tensor, logits: Tensor, best: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the cross-entropies [n] of logits [n, V] against probabilities p [n, V], whether `best` [n] is the
    likeliest id, and the gradients [n, V] by the logits in their type. Written for a compiler, as whole_loss."""
    z = logits.float()
    z = z - z.amax(-1, keepdim=True)
    right = z.gather(-1, best[:, None])[:, 0] == 0
    e = z.exp()
    scale = e.sum(-1, keepdim=True)
    return scale[:, 0].log() - (p * z).sum(-1), right, (e / scale - p).to(logits.dtype)


class _Classification(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, logits_of: Callable[[Tensor], Tensor], said: Said, rows: Tensor, size: int
    ) -> tuple[Tensor, Tensor]:
        best, pulled, losses = said.best.flatten()[rows], torch.zeros_like(hidden), []
        right = torch.zeros(len(rows), dtype=torch.bool, device=rows.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, len(rows), size):
                part = slice(start, start + size)
                p = said.probabilities(rows[part], None)
                logits, pull_back, *_ = torch.func.vjp(logits_of, hidden[part])
                entropies = _compiled(whole_entropy) if hidden.device.type == "cuda" else whole_entropy
                loss, right[part], pull = entropies(p, logits, best[part])
                losses.append(loss)
                (pulled[part],) = pull_back(pull)
        count = max(1, len(rows))
        ctx.save_for_backward(pulled.div_(count))
        ctx.mark_non_differentiable(right)
        return torch.cat([*losses, hidden.new_zeros(0, dtype=torch.float32)]).sum() / count, right

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        (pulled,) = ctx.saved_tensors
        return pulled * gradients[0].to(pulled.dtype), None, None, None, None


def _cast(x: Tensor) -> Tensor:
    """Returns x in the type of products, under autocast."""
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else x


def _rows_at_a_time(hidden: Tensor, width: int) -> int:
    return max(LEAST_ROWS, CHUNK.get(hidden.device.type, CHUNK_ELSEWHERE) // width)
