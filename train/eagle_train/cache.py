"""Keeps on disk what the target says of the windows, for runs that read the same text many times.

There is one folder per (data, target), named by a hash of both, so that a cache is never read for other data or
another target. In it each state has one memory-mapped file with a row per token: the last state, each tap, and of the
whole vocabulary the likeliest token and the log-sum-exp. So heads of all kinds share what they read alike, and a state
that is missing is added to those that are there.

States are kept in fp16, each row divided by a power of two if it holds more than that type can; the row's last column
is the exponent. Filling takes a pass of the target over all tokens; it is done in order of length, and a fill that was
interrupted goes on where it stopped.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagle_calib.folder import claimed
from eagle_runtime.base.files import replacing
from eagle_train.batches import gather, padded
from eagle_train.data import Windows
from eagle_train.errors import TrainError
from eagle_train.progress import say
from eagle_train.target import FrozenTarget
from eagle_train.taught import Batch, StateLogits, Taught, likeliest

TOKENS = 4096  # at most in a forward pass of the target while the cache is filled
SAVED_EVERY_S = 20.0
DONE = "done.json"  # file -> how many windows, shortest first, it holds
LARGEST = 2.0**15  # of a stored number
Array = npt.NDArray[np.generic]


class CachedTeacher:
    """A Teacher that reads the states from a folder, of which it fills what is missing."""

    def __init__(
        self, folder: Path, target: FrozenTarget, taps: tuple[int, ...], windows: Windows, fingerprint: str
    ) -> None:
        """fingerprint: of the target. Raises TrainError on a full disk, and FolderError while another process fills the
        same folder."""
        self._target, self._taps = target, taps
        key = hashlib.sha256(f"{windows.digest} {fingerprint} {target.model.dtype}".encode()).hexdigest()
        place = folder / key[:32]
        columns = _columns(target.hidden_size, taps)
        if any(_done(place).get(name, 0) < len(windows) for name in columns):
            _fill(place, target, taps, windows)
        self._files: dict[str, Array] = {name: np.load(place / f"{name}.npy", mmap_mode="r") for name in columns}

    def teach(self, windows: Windows, indices: Sequence[int], batch: Batch) -> Taught:
        last = self._state("last", windows, indices, batch)
        taps = [self._state(_tap(tap), windows, indices, batch) for tap in self._taps]
        best, lse = (self._rows(self._files[name], windows, indices, batch)[..., 0] for name in ("best", "lse"))
        said = StateLogits(last, self._target.lm_head, best.long(), lse)
        return Taught(torch.cat(taps, -1) if taps else last, said, last)

    def _state(self, name: str, windows: Windows, indices: Sequence[int], batch: Batch) -> Tensor:
        rows = self._rows(self._files[name], windows, indices, batch)
        state = rows[..., :-1].float()
        if bool(rows[..., -1].any()):
            state *= torch.exp2(rows[..., -1:].float())
        return state.to(self._target.model.dtype)

    def _rows(self, stored: Array, windows: Windows, indices: Sequence[int], batch: Batch) -> Tensor:
        rows = padded([stored[windows.window(index)] for index in indices])
        return torch.from_numpy(rows).to(batch.ids.device)


def _tap(tap: int) -> str:
    return f"tap{tap}"


def _columns(width: int, taps: Sequence[int]) -> dict[str, tuple[type[np.generic], int]]:
    """Returns name -> type and columns of all files."""
    states = dict.fromkeys(("last", *map(_tap, taps)), (np.float16, width + 1))
    return {**states, "best": (np.int32, 1), "lse": (np.float32, 1)}


def _done(place: Path) -> dict[str, int]:
    try:
        return dict(json.loads((place / DONE).read_text(encoding="utf-8")))
    except FileNotFoundError:
        return {}


def _fill(place: Path, target: FrozenTarget, taps: tuple[int, ...], windows: Windows) -> None:
    columns, total = _columns(target.hidden_size, taps), len(windows.ids)
    place.mkdir(parents=True, exist_ok=True)
    with claimed(place.absolute()):
        missing = [name for name in columns if not (place / f"{name}.npy").exists()]
        needed = sum(total * count * np.dtype(kind).itemsize for kind, count in (columns[name] for name in missing))
        free = shutil.disk_usage(place).free
        if free < needed * 1.02:
            raise TrainError(
                f"{place.parent} has {free / 1e9:.1f} GB free, but the cache takes {needed / 1e9:.1f} GB; free space, "
                "or train without a cache"
            )
        try:
            files: dict[str, Array] = {}
            for name, (kind, count) in columns.items():
                path = place / f"{name}.npy"
                if name in missing:
                    with replacing(path, path.with_name(f".{path.name}.new")) as new:
                        np.lib.format.open_memmap(new, "w+", kind, (total, count))
                        _reserve(new)
                files[name] = np.load(path, mmap_mode="r+")
            _compute(place, target, taps, windows, files)
        except OSError as error:
            raise TrainError(f"the cache in {place.parent} could not be written ({error}); train without one") from None


def _reserve(path: Path) -> None:
    """Takes the disk's space for a file. A map of one without it would end the process where the disk is full."""
    if hasattr(os, "posix_fallocate"):
        with path.open("r+b") as file:
            os.posix_fallocate(file.fileno(), 0, path.stat().st_size)


def _compute(
    place: Path, target: FrozenTarget, taps: tuple[int, ...], windows: Windows, files: Mapping[str, Array]
) -> None:
    done = _done(place)
    start = min(done.get(name, 0) for name in files)
    began = saved = time.monotonic()
    lengths = np.diff(windows.starts)
    order, tokens = np.argsort(lengths, kind="stable"), 0
    for indices in _batches(order, lengths, start):
        batch = gather(windows, indices, target.device)
        states = target.states(batch.ids, taps)
        best, lse = likeliest(states.last, target.lm_head, batch.asked)
        rows = {"last": _stored(states.last), "best": best[..., None].int(), "lse": lse[..., None]}
        if states.taps is not None:
            rows |= {_tap(tap): _stored(x) for tap, x in zip(taps, states.taps.chunk(len(taps), -1), strict=True)}
        for name, values in rows.items():
            for row, index in zip(values.cpu().numpy(), indices, strict=True):
                part = windows.window(index)
                files[name][part] = row[: part.stop - part.start]
        start, tokens = start + len(indices), tokens + int(lengths[indices].sum())
        if (now := time.monotonic()) - saved >= SAVED_EVERY_S or start == len(windows):
            saved = now
            _save(place, done | {name: max(start, done.get(name, 0)) for name in files}, files)
            share, rate = start / len(windows), tokens / (now - began)
            say(f"{share:4.0%} of the windows read by the target, {rate:.0f} tokens/s")


def _save(place: Path, done: Mapping[str, int], files: Mapping[str, Array]) -> None:
    for file in files.values():
        with contextlib.suppress(AttributeError):
            file.flush()  # type: ignore[attr-defined]
    with replacing(place / DONE, place / f".{DONE}.new") as new:
        new.write_text(json.dumps(done), encoding="utf-8")


def _batches(order: npt.NDArray[np.int64], lengths: npt.NDArray[np.int64], start: int) -> Iterator[list[int]]:
    """Yields the windows from `start` on, as many at a time as TOKENS allows, and at least one."""
    while start < len(order):
        count = 1
        while start + count < len(order) and (count + 1) * lengths[order[start + count]] <= TOKENS:
            count += 1
        yield [int(index) for index in order[start : start + count]]
        start += count


def _stored(state: Tensor) -> Tensor:
    """Returns states [..., H] as stored rows [..., H + 1] in fp16."""
    state = state.float()
    largest = state.abs().amax(-1, keepdim=True).clamp(min=LARGEST)
    exponent = (largest / LARGEST).log2().ceil()
    return torch.cat([state * torch.exp2(-exponent), exponent], -1).half()
