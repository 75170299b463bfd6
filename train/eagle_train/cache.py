"""Keeps the target's features on disk, for runs that read the same text many times.

There is one folder per (data, target, taps), named by a hash of all three, so that a cache is never read for other data
or another target. Rows are in the order of the windows; each kind of state has one memory-mapped file.
"""

from __future__ import annotations

import hashlib
import shutil
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagle_calib.folder import clear_leftovers, written
from eagle_train.batches import gather
from eagle_train.data import Windows
from eagle_train.errors import TrainError
from eagle_train.objective import Batch, Taught
from eagle_train.target import FrozenTarget

BATCH = 8  # windows per forward pass of the target while the cache is filled


class CachedTeacher:
    """A Teacher that reads the features from a folder, which it fills if it is missing."""

    def __init__(
        self, folder: Path, target: FrozenTarget, taps: tuple[int, ...], windows: Windows, fingerprint: str
    ) -> None:
        """fingerprint: of the target. Raises TrainError on a full disk."""
        self._target = target
        self._has_taps = bool(taps)
        dtype = target.model.dtype
        key = hashlib.sha256(f"{windows.digest} {fingerprint} {taps} {dtype}".encode()).hexdigest()
        place = folder / key[:32]
        if not place.is_dir():
            _fill(place, target, taps, windows)
        self._dtype = dtype
        self._last = np.load(place / "last.npy", mmap_mode="r")
        self._taps = np.load(place / "taps.npy", mmap_mode="r") if taps else None

    def teach(self, windows: Windows, indices: Sequence[int], batch: Batch) -> Taught:
        last = self._rows(self._last, windows, indices, batch)
        features = last if self._taps is None else self._rows(self._taps, windows, indices, batch)
        return Taught(features, self._target.logits(last), last)

    def _rows(self, stored: npt.NDArray[np.generic], windows: Windows, indices: Sequence[int], batch: Batch) -> Tensor:
        rows = np.zeros((*batch.ids.shape, stored.shape[1]), stored.dtype)
        for row, index in enumerate(indices):
            part = windows.window(index)
            rows[row, : part.stop - part.start] = stored[part]
        return torch.from_numpy(rows).view(self._dtype).to(batch.ids.device)


def _fill(place: Path, target: FrozenTarget, taps: tuple[int, ...], windows: Windows) -> None:
    """Fill the cache under another name and rename it, so that a folder named `place` is complete."""
    width = target.hidden_size
    needed = len(windows.ids) * width * (1 + len(taps)) * target.model.dtype.itemsize
    place.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(place.parent).free
    if free < needed * 1.02:
        raise TrainError(
            f"{place.parent} has {free / 1e9:.1f} GB free, but the cache takes {needed / 1e9:.1f} GB; free space, or "
            "train without a cache"
        )
    # NumPy has no bfloat16, so 16-bit numbers are kept as their bits.
    kind: type[np.generic] = np.float32 if target.model.dtype == torch.float32 else np.uint16
    clear_leftovers(place.parent)
    try:
        _write(place, target, taps, windows, kind)
    except OSError as error:
        raise TrainError(f"the cache in {place.parent} could not be written ({error}); train without one") from None


def _write(place: Path, target: FrozenTarget, taps: tuple[int, ...], windows: Windows, kind: type[np.generic]) -> None:
    width = target.hidden_size
    with written(place) as new:
        shapes = {"last": width, **({"taps": width * len(taps)} if taps else {})}
        files = {
            name: np.lib.format.open_memmap(new / f"{name}.npy", "w+", kind, (len(windows.ids), columns))
            for name, columns in shapes.items()
        }
        for first in range(0, len(windows), BATCH):
            indices = range(first, min(first + BATCH, len(windows)))
            states = target.states(gather(windows, indices, target.device).ids, taps)
            for name, tensor in {"last": states.last, "taps": states.taps}.items():
                if tensor is not None:
                    rows = tensor.cpu() if kind is np.float32 else tensor.cpu().view(torch.uint16)
                    for row, index in zip(rows.numpy(), indices, strict=True):
                        part = windows.window(index)
                        files[name][part] = row[: part.stop - part.start]
        for file in files.values():
            file.flush()
        del file
        files.clear()  # Windows renames no folder of mapped files
