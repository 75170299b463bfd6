"""Chooses the windows of each training step, and computes the target's features and logits of them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from eagle_train.data import Windows
from eagle_train.target import FrozenTarget
from eagle_train.taught import Batch, StateLogits, Taught, likeliest

Number = TypeVar("Number", bound=np.generic)

POOL = 64  # batches of a shuffled epoch whose windows are sorted by length together


class Teacher(Protocol):
    """Returns what the target says of windows: computed, or read from a cache."""

    def teach(self, windows: Windows, indices: Sequence[int], batch: Batch) -> Taught:
        """indices: numbers of the windows in the batch."""
        ...


class OnlineTeacher:
    """A Teacher that runs the frozen target on every batch."""

    def __init__(self, target: FrozenTarget, taps: tuple[int, ...]) -> None:
        self._target = target
        self._taps = taps

    def teach(self, windows: Windows, indices: Sequence[int], batch: Batch) -> Taught:
        states = self._target.states(batch.ids, self._taps)
        lm_head = self._target.lm_head
        said = StateLogits(states.last, lm_head, *likeliest(states.last, lm_head, batch.asked))
        return Taught(states.features, said, states.last)


def gather(windows: Windows, indices: Sequence[int], device: torch.device) -> Batch:
    """Returns the windows as a batch, padded on the right to the longest."""
    parts = [windows.window(i) for i in indices]
    ids, mask = (torch.from_numpy(padded([of[part] for part in parts])) for of in (windows.ids, windows.mask))
    return Batch(ids.long().to(device), mask.to(device))


def padded(parts: Sequence[npt.NDArray[Number]]) -> npt.NDArray[Number]:
    """Returns arrays [t, ...] as one [N, T, ...], filled up with zeros to the longest."""
    rows = np.zeros((len(parts), max(map(len, parts)), *parts[0].shape[1:]), parts[0].dtype)
    for row, part in zip(rows, parts, strict=True):
        row[: len(part)] = part
    return rows


class Order:
    """The windows of each step: one shuffled epoch after another, determined by the arguments alone.

    Windows of similar length share a batch, so that little of it is padding: POOL batches at a time of the shuffled
    epoch are sorted by length, then the batches are shuffled. Several processes take neighbouring batches."""

    def __init__(
        self, lengths: npt.NDArray[np.int64], batch_size: int, seed: int, rank: int = 0, ranks: int = 1
    ) -> None:
        self._lengths, self._batch, self._seed, self._rank, self._ranks = lengths, batch_size, seed, rank, ranks
        self._epoch = lru_cache(maxsize=2)(self._shuffled)

    def windows(self, step: int) -> list[int]:
        """Returns the indices of this process's windows at a step."""
        count = len(self._lengths)
        first = (step * self._ranks + self._rank) * self._batch
        return [int(self._epoch(at // count)[at % count]) for at in range(first, first + self._batch)]

    def _shuffled(self, epoch: int) -> npt.NDArray[np.int64]:
        rng, together = np.random.default_rng([self._seed, epoch]), self._batch * self._ranks
        order = rng.permutation(len(self._lengths))
        # The first windows fill the last batch of the epoch before, the others whole batches and the beginning of one.
        first, order = np.split(order, [-epoch * len(order) % together])
        for start in range(0, len(order), POOL * together):
            part = order[start : start + POOL * together]
            part[:] = part[np.argsort(self._lengths[part], kind="stable")]
        *whole, rest = np.split(order, range(together, len(order) + 1, together))
        return np.concatenate([first, *(whole[index] for index in rng.permutation(len(whole))), rest])


def step_generator(seed: int, step: int, rank: int, device: torch.device) -> torch.Generator:
    """Returns the random generator of a step, which depends on the arguments alone."""
    state = np.random.SeedSequence([seed, step, rank]).generate_state(1, np.uint64)[0]
    return torch.Generator(device).manual_seed(int(state) >> 1)
