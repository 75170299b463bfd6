"""Logits that stay on the GPU (candidates.LogitRows)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.candidates import Candidates
from eagle_runtime.session.trt.device import Device
from eagle_runtime.tree import Float, Int


class DeviceLogits:
    """The logits [R, V] of one forward pass, valid until the next."""

    def __init__(
        self, device: Device, address: int, shape: tuple[int, int], known: Mapping[str, npt.NDArray[Any]], watched: Int
    ) -> None:
        """address: of fp32 [R, V] on the GPU. known: top_ids, top_logits [K, R], log_sum_exp [R] and watched_logits
        [R, M], which are on the host once the stream is idle; watched [R, M]: ids of the last."""
        self._device, self._address, self._shape = device, address, shape
        self._known, self._watched = known, watched

    def __len__(self) -> int:
        return self._shape[0]

    def __getitem__(self, row: int, /) -> DeviceLogitRow:
        assert 0 <= row < len(self)
        known = self._known
        candidates = Candidates(
            ids=known["top_ids"][:, row].astype(np.int64),
            logits=known["top_logits"][:, row],
            log_sum_exp=float(known["log_sum_exp"][row]),
            watched_ids=self._watched[row],
            watched_logits=known["watched_logits"][row],
        )
        return DeviceLogitRow(candidates, self, row)

    def rows(self, first: int, count: int) -> Float:
        """Returns a copy of some rows [count, V] on the host. Waits for the GPU."""
        width = self._shape[1]
        host = np.empty((count, width), np.float32)
        address = self._address + first * width * host.itemsize
        self._device.driver.download(host.ctypes.data, address, host.nbytes, self._device.stream)
        self._device.wait()
        return host

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.rows(0, len(self)).astype(dtype or np.float32, copy=False)


class DeviceLogitRow:
    """One row of DeviceLogits (candidates.LogitRow)."""

    def __init__(self, candidates: Candidates, rows: DeviceLogits, row: int) -> None:
        self.candidates = candidates
        self._rows, self._row = rows, row

    def whole(self) -> Float:
        """As in LogitRow."""
        row: Float = self._rows.rows(self._row, 1)[0]
        return row

    def __array__(self, dtype: npt.DTypeLike | None = None, copy: bool | None = None) -> npt.NDArray[Any]:
        return self.whole().astype(dtype or np.float32, copy=False)
