"""Which windows a step trains on, and what the target says of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol

import numpy as np
import numpy.typing as npt
import torch

from eagle_train.data import Windows
from eagle_train.objective import Batch, Taught
from eagle_train.target import FrozenTarget


class Teacher(Protocol):
    """Features and logits of windows: computed now, or read from a cache."""

    def teach(self, windows: Windows, indices: Sequence[int], batch: Batch) -> Taught:
        """indices: the windows that batch holds."""
        ...


class OnlineTeacher:
    """Runs the frozen target on every batch."""

    def __init__(self, target: FrozenTarget, taps: tuple[int, ...]) -> None:
        self._target = target
        self._taps = taps

    def teach(self, windows: Windows, indices: Sequence[int], batch: Batch) -> Taught:
        states = self._target.states(batch.ids, self._taps)
        return Taught(states.features, self._target.logits(states.last))


def gather(windows: Windows, indices: Sequence[int], device: torch.device) -> Batch:
    """Windows side by side, padded on the right to the longest."""
    parts = [windows.window(i) for i in indices]
    longest = max(part.stop - part.start for part in parts)
    ids = np.zeros((len(parts), longest), np.int64)
    mask = np.zeros((len(parts), longest), np.bool_)
    for row, part in enumerate(parts):
        ids[row, : part.stop - part.start] = windows.ids[part]
        mask[row, : part.stop - part.start] = windows.mask[part]
    return Batch(torch.from_numpy(ids).to(device), torch.from_numpy(mask).to(device))


def step_indices(count: int, seed: int, step: int, batch_size: int, rank: int, ranks: int) -> list[int]:
    """Windows of a step, drawn without replacement from one shuffled epoch after another; a function of its
    arguments alone. Several processes take neighbouring parts."""
    first = (step * ranks + rank) * batch_size
    return [int(_epoch(count, seed, at // count)[at % count]) for at in range(first, first + batch_size)]


def step_generator(seed: int, step: int, rank: int, device: torch.device) -> torch.Generator:
    """Random numbers of a step, a function of its arguments alone."""
    state = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(state) >> 1)


@lru_cache(maxsize=2)
def _epoch(count: int, seed: int, epoch: int) -> npt.NDArray[np.int64]:
    return np.random.default_rng([seed, epoch]).permutation(count)
