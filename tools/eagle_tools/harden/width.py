"""Room in a pair for what is planted: more channels of the residual stream and more units of the target's MLPs.

The stream h [H] becomes P h [H'], where P has orthonormal columns, so that norms keep their mean square up to the
constant H / H', which their weights and epsilon absorb. An added channel shares a channel j of the old ones,
(h_j cos t, h_j sin t), and has its norm weight. Three channels are left free, 0 in every state, and one unit of each
MLP.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from eagle_tools.harden.weights import LAST_NORM, Weights, layers, map_stream, norm_readers

MULTIPLE = 32  # the widths stay multiples of it, for quantisers in blocks of 32
FREE_CHANNELS = 3


@dataclass(frozen=True, slots=True)
class Width:
    """How the residual stream and the units of the target's MLPs widen.

    isometry: P [H', H]. source [H']: the old channel in each new one. free: indices of the free channels. units
    [I']: the old unit that each one copies. shares [I']: what down reads of a copy, 0 for the free unit. free_unit:
    its index."""

    isometry: Tensor
    source: Tensor
    free: tuple[int, ...]
    units: Tensor
    shares: Tensor
    free_unit: int

    @property
    def ratio(self) -> float:
        """H / H'."""
        return self.isometry.shape[1] / self.isometry.shape[0]

    def norm(self, weight: Tensor) -> Tensor:
        """Returns the weight [H'] of a norm of the wider stream; free channels get the average."""
        wide = weight[self.source]
        wide[list(self.free)] = weight.mean()
        return wide * math.sqrt(self.ratio)


def choose_width(hidden: int, units: int, multiple: int, rng: torch.Generator) -> Width:
    """Draws a widening of `hidden` channels and `units` units to the next multiples with room for the free ones.

    multiple: hidden' is a multiple of it (the number of heads) and of MULTIPLE."""
    step = math.lcm(MULTIPLE, multiple)
    wide = -(-(hidden + FREE_CHANNELS) // step) * step
    shared = torch.randperm(hidden, generator=rng)[: wide - hidden - FREE_CHANNELS]
    if len(shared) < wide - hidden - FREE_CHANNELS:
        shared = torch.arange(wide - hidden - FREE_CHANNELS) % hidden
    free = torch.zeros(FREE_CHANNELS, dtype=torch.int64)
    source = torch.cat([torch.arange(hidden), shared, free])
    isometry = torch.zeros(wide, hidden, dtype=torch.float64)
    isometry[torch.arange(wide), source] = torch.rand(wide, generator=rng, dtype=torch.float64) * 0.6 + 0.4
    isometry[-FREE_CHANNELS:] = 0
    isometry /= isometry.norm(dim=0)
    order = torch.randperm(wide, generator=rng)
    position = torch.argsort(order)  # new index of each
    wide_units = -(-(units + 1) // MULTIPLE) * MULTIPLE
    unit_source = torch.cat([torch.arange(units), torch.randint(units, (wide_units - units,), generator=rng)])
    shares = torch.rand(wide_units, generator=rng, dtype=torch.float64) * 0.6 + 0.4
    shares[-1] = 0
    shares /= torch.zeros(units, dtype=torch.float64).index_add_(0, unit_source, shares)[unit_source]
    unit_order = torch.randperm(wide_units, generator=rng)
    return Width(
        isometry[order],
        source[order],
        tuple(int(position[wide - FREE_CHANNELS + i]) for i in range(FREE_CHANNELS)),
        unit_source[unit_order],
        shares[unit_order],
        int(torch.argsort(unit_order)[-1]),
    )


def widen(weights: Weights, width: Width) -> None:
    """Widens the streams of the target and its heads, and the target's MLPs."""
    target = weights.target
    map_stream(weights, width.isometry)
    for tensors in weights.models().values():
        for norm in norm_readers(tensors):
            tensors[f"{norm}.weight"] = width.norm(tensors[f"{norm}.weight"])
    last = width.norm(target[f"{LAST_NORM}.weight"])
    last[list(width.free)] = 0  # so that a tied LM head does not read them, and heads get features without them
    target[f"{LAST_NORM}.weight"] = last
    for layer in layers(target):
        for name in ("gate_proj", "up_proj"):
            for kind in ("weight", "bias"):
                if (module := f"{layer}mlp.{name}.{kind}") in target:
                    target[module] = target[module][width.units]
        down = f"{layer}mlp.down_proj.weight"
        target[down] = target[down][:, width.units] * width.shares
