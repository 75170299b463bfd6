"""How a decoder layer grows, and at which depth each old layer is placed in the grown target."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from eagle_export.heads.config import default_taps
from eagle_export.pair import Pair
from eagle_tools.grow.axes import Axis, copied
from eagle_tools.grow.shape import GrowError, Shape, head_of


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
        raise GrowError(f"head_dim {shape.head_dim} is no multiple of {where}'s {head_dim}: rotary speeds would differ")
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


def place_layers(old: int, new: int) -> list[int | None]:
    """Returns [new]: the old layer at each depth, or None for an inserted one, such that EAGLE-3's taps read the same
    states as before."""
    before, after = ((0, *default_taps(count), count) for count in (old, new))
    placed: list[int | None] = [None] * new
    for first, last, start, end in zip(before, before[1:], after, after[1:], strict=False):
        for layer in range(first, last):
            placed[start + (layer - first) * (end - start) // (last - first)] = layer
    return placed
