"""What the frozen target says of a batch of texts: its features, and its distribution of each next token.

A row of logits over the target's vocabulary is large, and training looks at few of them, mostly over the draft
vocabulary alone. So logits are computed when rows are asked for; what needs the whole vocabulary, the likeliest token
and the log-sum-exp, is known for all rows that matter.

Shapes: B texts, T tokens, n rows of B * T, V vocabulary, Vd some of its ids, H width of the last state, W of the
features.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor
from torch.nn.functional import pad

LOGIT_ROWS = {"cpu": 128}  # of logits over the whole vocabulary that are held at a time
ROWS_ELSEWHERE = 2048


@dataclass(frozen=True, slots=True)
class Batch:
    """ids [B, T], zero after the end of a text. loss_mask [B, T] bool: tokens to be predicted, False in the padding."""

    ids: Tensor
    loss_mask: Tensor

    def counted(self, step: int) -> Tensor:
        """Returns [B, T - 1 - step] bool: rows whose predicted token i + 2 + step carries loss. The last row has
        none."""
        return pad(self.loss_mask[:, 2 + step :], (0, 1))

    @property
    def asked(self) -> Tensor:
        """Returns [B, T] bool: rows of the target whose next token carries loss; nothing is asked of the others."""
        return pad(self.loss_mask[:, 1:], (0, 1))


class Said(Protocol):
    """The target's distribution of the next token, row by row. Rows are numbered through the texts, b * T + t. best
    [B, T]: the likeliest token, of the rows that are asked for."""

    best: Tensor

    def logits(self, rows: Tensor, kept: Tensor | None) -> Tensor:
        """Returns the fp32 logits [n, Vd] of rows [n] over the ids `kept` [Vd], or [n, V] if that is None."""
        ...

    def probabilities(self, rows: Tensor, kept: Tensor | None) -> Tensor:
        """As logits, after the softmax over the whole vocabulary: they sum to 1 or less."""
        ...


class WholeLogits:
    """Said by logits [B, T, V] in fp32."""

    def __init__(self, logits: Tensor) -> None:
        self._flat, self.best = logits.flatten(0, 1), logits.argmax(-1)

    def logits(self, rows: Tensor, kept: Tensor | None) -> Tensor:
        some = self._flat[rows]
        return some if kept is None else some.index_select(-1, kept)

    def probabilities(self, rows: Tensor, kept: Tensor | None) -> Tensor:
        some = self._flat[rows].softmax(-1)
        return some if kept is None else some.index_select(-1, kept)


class LmHead(torch.nn.Linear):
    """The target's LM head [V, H], frozen, or some of its rows, with what the target makes of its output."""

    def __init__(self, weight: Tensor, finished: Callable[[Tensor], Tensor] = lambda logits: logits) -> None:
        """finished: a bound or a multiplier of each logit by itself."""
        count, width = weight.shape
        super().__init__(width, count, bias=False, device="meta")
        self.weight, self.finished = torch.nn.Parameter(weight, requires_grad=False), finished

    def forward(self, states: Tensor) -> Tensor:
        """Returns the logits [..., V] of what a head makes of states [..., H]."""
        return self.finished(super().forward(states))

    def exact(self, states: Tensor) -> Tensor:
        """Returns the logits [..., V] in fp32 of the target's own states [..., H]."""
        # A head may compute in bfloat16, which would make ties here.
        with torch.autocast(states.device.type, enabled=False):
            return self.finished(super().forward(states.to(self.weight.dtype)).float())

    def rows(self, ids: Tensor) -> LmHead:
        """Returns the rows of ids [Vd]."""
        return LmHead(self.weight[ids], self.finished)


class StateLogits:
    """Said by states [B, T, H] after the last norm, through an LM head."""

    def __init__(self, states: Tensor, lm_head: LmHead, best: Tensor, lse: Tensor) -> None:
        """best [B, T], lse [B, T]: as likeliest returns them."""
        self._flat, self._lm_head, self.best, self.lse = states.flatten(0, 1), lm_head, best, lse
        self._rows: tuple[Tensor, LmHead] | None = None

    def logits(self, rows: Tensor, kept: Tensor | None) -> Tensor:
        return (self._lm_head if kept is None else self._rows_of(kept)).exact(self._flat[rows])

    def probabilities(self, rows: Tensor, kept: Tensor | None) -> Tensor:
        return self.logits(rows, kept).sub_(self.lse.flatten()[rows, None]).exp_()

    def _rows_of(self, kept: Tensor) -> LmHead:
        """Returns the LM head's rows of the kept ids, gathered once."""
        if self._rows is None or self._rows[0] is not kept:
            self._rows = (kept, self._lm_head.rows(kept))
        return self._rows[1]


@torch.no_grad()
def likeliest(states: Tensor, lm_head: LmHead, asked: Tensor) -> tuple[Tensor, Tensor]:
    """Returns the likeliest token and the log-sum-exp of the logits [B, T] of states [B, T, H]; 0 where not asked
    [B, T]."""
    best = torch.zeros(asked.shape, dtype=torch.int64, device=states.device)
    lse = torch.zeros(asked.shape, dtype=torch.float32, device=states.device)
    flat = states.flatten(0, 1)
    size = LOGIT_ROWS.get(states.device.type, ROWS_ELSEWHERE)
    for rows in torch.split(torch.nonzero(asked.flatten()).flatten(), size):
        logits = lm_head.exact(flat[rows])
        best.view(-1)[rows], lse.view(-1)[rows] = logits.argmax(-1), logits.logsumexp(-1)
    return best, lse


@dataclass(frozen=True, slots=True)
class Taught:
    """The frozen target's outputs for a batch: features [B, T, W] (last hidden state, or the taps joined; as the head
    reads them, after fc, where the objectives get them), said: its distributions, and, where the target's own modules
    computed them, last [B, T, H]: states after the last norm."""

    features: Tensor
    said: Said
    last: Tensor | None = None
