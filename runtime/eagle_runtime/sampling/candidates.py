"""Rows of logits that stay on the GPU, whichever library computes: what the engine has computed of a row, and the whole
row on demand.

Shapes: V vocabulary, K candidates, M watched tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Float, Int

GREEDY_COUNT = 8  # candidates where no tokens are watched, since the highest logit is the token; chosen, for ties


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
        """Returns the row [V]. Costs a copy and a wait for the GPU."""


class LogitRows(Protocol):
    """The rows of one forward pass, valid until the next."""

    def __len__(self) -> int: ...

    def __getitem__(self, row: int, /) -> LogitRow: ...


class DeviceLogits:
    """The logits [R, V] of one forward pass, valid until the next."""

    def __init__(
        self, count: int, fetch: Callable[[int, int], Float], known: Mapping[str, npt.NDArray[Any]], watched: Int
    ) -> None:
        """count: R. fetch: first row, n -> a copy of n rows [n, V] on the host. known: top_ids, top_logits [R, K],
        log_sum_exp [R] and watched_logits [R, M]; watched [R, M]: ids of the last."""
        self._count, self._known, self._watched = count, known, watched
        self.fetch = fetch

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, row: int, /) -> DeviceLogitRow:
        assert 0 <= row < len(self)
        known = self._known
        candidates = Candidates(
            ids=known["top_ids"][row].astype(np.int64),
            logits=known["top_logits"][row],
            log_sum_exp=float(known["log_sum_exp"][row]),
            watched_ids=self._watched[row],
            watched_logits=known["watched_logits"][row],
        )
        return DeviceLogitRow(candidates, self, row)

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.fetch(0, len(self)).astype(dtype or np.float32, copy=False)


class DeviceLogitRow:
    """One row of DeviceLogits (LogitRow)."""

    def __init__(self, candidates: Candidates, rows: DeviceLogits, row: int) -> None:
        self.candidates = candidates
        self._rows, self._row = rows, row

    def whole(self) -> Float:
        row: Float = self._rows.fetch(self._row, 1)[0]
        return row

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.whole().astype(dtype or np.float32, copy=False)
