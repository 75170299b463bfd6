"""How the axes of weight matrices grow: the residual stream, the inside of a layer, and the order of the layers."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagle_export.graphs.pair import Pair
from eagle_export.heads.reading import default_taps
from eagle_tools.grow.shape import GrowError, Shape, head_of

# Engines round activations to int8 with a scale for each block of up to 128 coordinates or, before an LM head, for all.
# Next to numbers 255 times as large the constant would become 0, and added tokens be drafted.
OWN_BLOCK = 128  # coordinates that the constant has to itself
LOUDER = 16.0  # factor of the constant after the last norm


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
        """Returns the weight [H'] of the norm before an LM head; it turns the constant into LOUDER / RMS of the old."""
        grown = self.norm(weight)
        if self.constant:
            grown[-1] = LOUDER * self.gain / self.constant
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
        width -= OWN_BLOCK if width >= old + OWN_BLOCK else 1
    if width < old:
        raise GrowError(f"hidden {shape.hidden} leaves no coordinate for the added tokens' constant; add one")
    copies = -(-width // old)
    source = np.arange(width) % old
    scale = torch.from_numpy(np.sqrt(copies / np.bincount(source)[source])).float()
    axis = Axis(torch.from_numpy(source), scale, shares(source) / scale)
    if width < shape.hidden:
        zero = torch.zeros(shape.hidden - width)
        axis = Axis(torch.cat([axis.source, zero.long()]), torch.cat([scale, zero]), torch.cat([axis.read, zero]))
        epsilon = min(float(pairs[0].config.rms_norm_eps), *(head_of(pair).config.rms_norm_eps for pair in pairs))
        # A power of two, exact in every type, whose square is at most half of what epsilon adds to the sum.
        constant = 2.0 ** math.floor(math.log2(math.sqrt(epsilon * copies * old / 2)))
    return Stream(axis, constant, math.sqrt(copies * old / shape.hidden), copies, old)


@dataclass(frozen=True, slots=True)
class LayerAxes:
    """The axes inside a decoder layer. silent [n] bool: rows of q_proj that may have any value, as their keys are 0."""

    queries: Axis
    keys: Axis
    values: Axis
    attended: Axis
    units: Axis
    silent: Tensor

    def axes(self, attention_input: Axis, stream: Axis) -> dict[str, tuple[Axis, Axis]]:
        """Returns module -> the axes of its rows and of its columns."""
        return {
            "self_attn.q_proj": (self.queries, attention_input),
            "self_attn.k_proj": (self.keys, attention_input),
            "self_attn.v_proj": (self.values, attention_input),
            "self_attn.o_proj": (stream, self.attended),
            "mlp.gate_proj": (self.units, stream),
            "mlp.up_proj": (self.units, stream),
            "mlp.down_proj": (stream, self.units),
        }


def grow_layer(heads: int, kv_heads: int, head_dim: int, units: int, shape: Shape, where: Path) -> LayerAxes:
    """Returns the axes from the old sizes of a target's or a head's layer to those of `shape`. Raises GrowError."""
    times, rest = divmod(shape.head_dim, head_dim)
    if rest or (times > 1 and head_dim % 2):
        raise GrowError(
            f"head_dim {shape.head_dim} is not a multiple of {where}'s {head_dim}: rotary speeds would differ"
        )
    if units > shape.intermediate or kv_heads > shape.kv_heads:
        raise GrowError(f"{where} has {units} MLP units and {kv_heads} key/value heads, more than the shape asked for")
    kv_source = np.arange(shape.kv_heads) % kv_heads
    head_source = query_sources(heads // kv_heads, kv_source, shape)
    if len(set(head_source)) < heads:
        raise GrowError(f"{shape.heads} heads over {shape.kv_heads} key/value heads cannot hold all {heads} of {where}")
    # Rotary pair i consists of the dimensions i and i + d/2; it moves to pair i * times.
    position = np.arange(shape.head_dim)
    half, pair = np.divmod(position, shape.head_dim // 2)
    live = torch.from_numpy(pair % times == 0)
    old_position = half * (head_dim // 2) + pair // times

    def rotary(source: npt.NDArray[np.int64], factor: float) -> Axis:
        index = torch.from_numpy((source[:, None] * head_dim + old_position).ravel())
        write = live.repeat(len(source)).float() * factor
        return Axis(index, write, write)

    def plain(source: npt.NDArray[np.int64]) -> npt.NDArray[np.int64]:
        return (source[:, None] * head_dim + position % head_dim).ravel()

    return LayerAxes(
        queries=rotary(head_source, math.sqrt(times)),  # attention divides by sqrt(head_dim)
        keys=rotary(kv_source, 1.0),
        values=copied(plain(kv_source)),
        attended=copied(plain(head_source)),
        units=copied(np.arange(shape.intermediate) % units),
        silent=~live.repeat(shape.heads),
    )


def target_layer(pair: Pair, shape: Shape) -> LayerAxes:
    """Returns the axes of the target's layers. Raises GrowError."""
    config = pair.config
    sizes = (int(config.num_attention_heads), pair.num_kv_heads, pair.head_dim, int(config.intermediate_size))
    return grow_layer(*sizes, shape, pair.target.folder)


def head_layer(pair: Pair, shape: Shape) -> LayerAxes:
    """Returns the axes of the head's layers. Raises GrowError."""
    head = head_of(pair).config
    sizes = (head.num_heads, head.num_kv_heads, head.head_dim, head.intermediate_size)
    return grow_layer(*sizes, shape, head_of(pair).checkpoint.folder)


def query_sources(group: int, kv_source: npt.NDArray[np.int64], shape: Shape) -> npt.NDArray[np.int64]:
    """Returns [heads]: the old query head that each new one copies, one that shares the same old key/value head."""
    per_kv = shape.heads // shape.kv_heads
    used = np.zeros(int(kv_source.max()) + 1, np.int64)
    sources = np.empty(shape.heads, np.int64)
    for head in range(shape.heads):
        kv = kv_source[head // per_kv]
        sources[head] = kv * group + used[kv] % group
        used[kv] += 1
    return sources


def grown_taps(taps: tuple[int, ...], old: int, new: int) -> list[int]:
    """Returns the taps of a target of `new` layers that read the states which taps of `old` layers read before."""
    placed = [*place_layers(old, new), old]
    return [placed.index(tap) for tap in taps]


def place_layers(old: int, new: int) -> list[int | None]:
    """Returns [new]: the old layer at each depth, or None for an inserted one, such that EAGLE-3's taps read the same
    states as before."""
    before, after = ((0, *default_taps(count), count) for count in (old, new))
    placed: list[int | None] = [None] * new
    for first, last, start, end in zip(before, before[1:], after, after[1:], strict=False):
        for layer in range(first, last):
            placed[start + (layer - first) * (end - start) // (last - first)] = layer
    return placed
