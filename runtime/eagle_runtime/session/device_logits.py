"""Logits that stay in device memory (candidates.LogitRows), whichever library computes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Float, Int
from eagle_runtime.sampling.candidates import Candidates


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
    """One row of DeviceLogits (candidates.LogitRow)."""

    def __init__(self, candidates: Candidates, rows: DeviceLogits, row: int) -> None:
        self.candidates = candidates
        self._rows, self._row = rows, row

    def whole(self) -> Float:
        """As in LogitRow."""
        row: Float = self._rows.fetch(self._row, 1)[0]
        return row

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.whole().astype(dtype or np.float32, copy=False)
