"""Rows of logits that stay on the card: what an engine has computed of a row, and the whole row on demand.

Shapes: V vocabulary, K candidates, M watched tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from eagle_runtime.base.tree import Float, Int


@dataclass(frozen=True, slots=True)
class Candidates:
    """What is known of a row of logits [V]; every logit is the row's own, to the bit.

    ids, logits [K]: the K highest, highest first, equal ones in any order. log_sum_exp: the logarithm of the sum of
    exp(logit * inverse_temperature) over the whole row, in fp32, its sum within 1e-4 of itself; not finite if the row
    holds NaN or infinity, or nothing but -infinity. watched_ids, watched_logits [M]: of tokens that were named before
    the forward pass, in their order; some may be named twice, and some be among the highest too."""

    ids: Int
    logits: Float
    log_sum_exp: float
    watched_ids: Int
    watched_logits: Float


class LogitRow(Protocol):
    """A row of logits that is not on the host."""

    @property
    def candidates(self) -> Candidates:
        """What the engine computed of it."""

    def whole(self) -> Float:
        """Returns the row [V]. Costs a copy and a wait for the card."""


class LogitRows(Protocol):
    """The rows of one forward pass, valid until the next."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> LogitRow: ...
