"""How one axis of a weight matrix grows, and how the residual stream does."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagle_export.pair import Pair
from eagle_tools.grow.shape import GrowError, Shape, head_of


@dataclass(frozen=True, slots=True)
class Axis:
    """How one axis of a matrix grows from m to n indices: new index i is a copy of old index source[i].

    source [n]: old indices. write [n]: factors of a matrix whose rows are this axis, which writes it. read [n]: factors
    of a matrix whose columns are this axis, which reads it. A silent index has write and read 0."""

    source: Tensor
    write: Tensor
    read: Tensor

    def __add__(self, other: Axis) -> Axis:
        """Returns this axis followed by the other, where the old axis consists of the two parts in the same order."""
        offset = int(self.source.max()) + 1
        return Axis(
            torch.cat([self.source, other.source + offset]),
            torch.cat([self.write, other.write]),
            torch.cat([self.read, other.read]),
        )


@dataclass(frozen=True, slots=True)
class Stream:
    """The grown residual stream: its axis, and what its norms need.

    constant: value of the last coordinate, or 0 if no coordinate is reserved. gain: factor of the norms' weights."""

    axis: Axis
    constant: float
    gain: float
    copies: int
    old_width: int

    @property
    def width(self) -> int:
        return len(self.axis.source)

    def epsilon(self, old: float) -> float:
        """Returns the rms_norm_eps that gives the old norm's result; the constant's square adds to the mean square."""
        return (old * self.copies * self.old_width - self.constant**2) / self.width

    def norm(self, weight: Tensor) -> Tensor:
        """Returns the grown weight [H'] of a norm. After it the constant is 0, since no matrix reads it there."""
        grown = weight.float()[self.axis.source] * self.gain
        if self.constant:
            grown[-1] = 0
        return grown

    def last_norm(self, weight: Tensor) -> Tensor:
        """Returns the weight [H'] of the norm before an LM head; it turns the constant into 1 / RMS of the old."""
        grown = self.norm(weight)
        if self.constant:
            grown[-1] = self.gain / self.constant
        return grown


def shares(source: npt.NDArray[np.int64]) -> Tensor:
    """Returns the weights [n] of the copies: powers of two that sum to 1 over the copies of each source.

    Of c copies, with p the largest power of two up to c, 2(c - p) get 1/2p and the others 1/p."""
    order = np.argsort(source, kind="stable")
    counts = np.bincount(source)
    ranks = np.empty(len(source), np.int64)
    ranks[order] = np.arange(len(source)) - np.repeat(np.cumsum(counts) - counts, counts)
    copies = counts[source]
    power = 2 ** np.floor(np.log2(copies)).astype(np.int64)
    return torch.from_numpy(np.where(ranks < 2 * (copies - power), 0.5, 1.0) / power).float()


def copied(source: npt.NDArray[np.int64]) -> Axis:
    """Returns the axis whose new indices copy `source`; the matrices that read it share the weight."""
    return Axis(torch.from_numpy(source), torch.ones(len(source)), shares(source))


def grow_stream(pairs: list[Pair], shape: Shape) -> Stream:
    """Returns the stream whose coordinates are copies of the old ones, one after another until the width is filled.

    A norm divides by the mean square, so every old coordinate must have the same weight in it: a coordinate with one
    copy fewer than others gets larger copies."""
    old = int(pairs[0].config.hidden_size)
    constant = 0.0
    width = shape.hidden
    if shape.vocab or shape.draft_vocab:
        width -= 1
    if width < old:
        raise GrowError(f"hidden {shape.hidden} leaves no coordinate for the added tokens' constant; add one")
    copies = -(-width // old)
    source = np.arange(width) % old
    scale = torch.from_numpy(np.sqrt(copies / np.bincount(source)[source])).float()
    axis = Axis(torch.from_numpy(source), scale, shares(source) / scale)
    if width < shape.hidden:
        zero = torch.zeros(1)
        axis = Axis(torch.cat([axis.source, zero.long()]), torch.cat([scale, zero]), torch.cat([axis.read, zero]))
        epsilon = min(float(pairs[0].config.rms_norm_eps), *(head_of(pair).config.rms_norm_eps for pair in pairs))
        # A power of two, exact in every type, whose square is at most half of what epsilon adds to the sum.
        constant = 2.0 ** math.floor(math.log2(math.sqrt(epsilon * copies * old / 2)))
    return Stream(axis, constant, math.sqrt(copies * old / shape.hidden), copies, old)
