"""Keeps what the target says of the windows on the GPU, where its memory holds it: the first epoch's passes of the
target fill it, later epochs read it.

Shapes: N tokens of all windows, B texts, T tokens, H hidden size.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from eagle_train.batches import OnlineTeacher
from eagle_train.data import Windows
from eagle_train.target import FrozenTarget
from eagle_train.taught import Batch, StateLogits, Taught

SHARE = 0.6  # of the free memory that may be taken; the rest is training's


class HeldTeacher:
    """A Teacher for windows whose states the GPU holds (`fits`)."""

    def __init__(self, target: FrozenTarget, taps: tuple[int, ...], windows: Windows) -> None:
        count, width, device = len(windows.ids), target.hidden_size, target.device
        kind = target.model.dtype
        self._online = OnlineTeacher(target, taps)
        self._lm_head = target.lm_head
        self._last = torch.empty(count, width, dtype=kind, device=device)
        self._taps = torch.empty(count, width * len(taps), dtype=kind, device=device)
        self._best = torch.empty(count, dtype=torch.int64, device=device)
        self._lse = torch.empty(count, dtype=torch.float32, device=device)
        self._known = np.zeros(len(windows), np.bool_)

    @staticmethod
    def fits(target: FrozenTarget, taps: tuple[int, ...], windows: Windows) -> bool:
        """Returns whether the target is on a GPU that has room for the states of all windows."""
        if target.device.type != "cuda":
            return False
        free, _ = torch.cuda.mem_get_info(target.device)
        size = target.lm_head.weight.element_size()
        return bool(len(windows.ids) * (target.hidden_size * (1 + len(taps)) * size + 12) < SHARE * free)

    def teach(self, windows: Windows, indices: Sequence[int], batch: Batch) -> Taught:
        rows, inside = _rows(windows, indices, batch)
        if self._known[list(indices)].all():
            state = self._last[rows]
            known = StateLogits(state, self._lm_head, self._best[rows] * inside, self._lse[rows])
            return Taught(self._taps[rows] if self._taps.shape[1] else state, known, state)
        taught = self._online.teach(windows, indices, batch)
        said, last = taught.said, taught.last
        assert isinstance(said, StateLogits) and last is not None
        kept = rows[inside]
        self._last[kept], self._best[kept], self._lse[kept] = last[inside], said.best[inside], said.lse[inside]
        if self._taps.shape[1]:
            self._taps[kept] = taught.features[inside]
        self._known[list(indices)] = True
        return taught


def _rows(windows: Windows, indices: Sequence[int], batch: Batch) -> tuple[Tensor, Tensor]:
    """Returns where each place [B, T] of a batch stands among all tokens, and whether it is one and no padding."""
    starts, ends = (windows.starts[np.asarray(indices) + offset] for offset in (0, 1))
    places = starts[:, None] + np.arange(batch.ids.shape[1])
    inside = places < ends[:, None]
    device = batch.ids.device
    return torch.from_numpy(np.where(inside, places, 0)).to(device), torch.from_numpy(inside).to(device)
