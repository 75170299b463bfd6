"""Acceptance of an unrolled head, counted over rows.

A row counts at step j if the token that it predicts carries loss. It is right if the head's likeliest token is the
target's. Rows whose target token is outside the draft vocabulary count too: they are not trained, but occur in
decoding."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class Acceptance:
    """accuracy[j]: share of the rows that are right at step j. n_alpha[j]: the same among rows right at all earlier
    steps. tau: tokens per forward pass of the target with chains of that many drafts, 1 + sum_n prod_{m<=n} n_alpha[m].
    overlap[j]: mean of sum_v min(p, q). Empty if nothing was counted."""

    accuracy: tuple[float, ...]
    n_alpha: tuple[float, ...]
    overlap: tuple[float, ...]

    @property
    def tau(self) -> float:
        return simulated_tau(self.n_alpha)

    def to_json(self) -> dict[str, Any]:
        """Returns the figures, rounded, for a log line."""
        lists = {"accuracy": self.accuracy, "n_alpha": self.n_alpha, "overlap": self.overlap}
        return {"tau": round(self.tau, 4)} | {k: [round(x, 4) for x in v] for k, v in lists.items() if v}


def simulated_tau(n_alpha: Sequence[float]) -> float:
    """Returns 1 + sum_n prod_{m<=n} alpha_m."""
    tau = reached = 1.0
    for alpha in n_alpha:
        reached *= alpha
        tau += reached
    return tau


class Tally:
    """Sums per step, kept on the device until they are read."""

    def __init__(self, steps: int, device: torch.device) -> None:
        # rows, right, rows right before, right given that, overlap, rows of overlap
        self._sums = torch.zeros(6, steps, dtype=torch.float64, device=device)

    def add(self, step: int, right: Tensor, earlier: Tensor, counted: Tensor, overlap: Tensor | None = None) -> None:
        """right, counted [B, R']: of this step. earlier [B, R']: counted and right at all steps before."""
        reached = counted & earlier
        sums = [counted.sum(), (right & counted).sum(), reached.sum(), (right & reached).sum()]
        if overlap is not None:
            sums += [(overlap * counted).sum(), counted.sum()]
        self._sums[: len(sums), step] += torch.stack([x.double() for x in sums])

    def read(self) -> Acceptance:
        rows, right, reached, held, shared, of = self._sums.tolist()
        return Acceptance(_ratios(right, rows), _ratios(held, reached), _ratios(shared, of) if any(of) else ())


def _ratios(above: Sequence[float], below: Sequence[float]) -> tuple[float, ...]:
    return tuple(a / b if b else 0.0 for a, b in zip(above, below, strict=True))
