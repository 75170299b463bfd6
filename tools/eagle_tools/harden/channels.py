"""Factors of channels that a later matrix takes back: after norms, and between pairs of matrices.

norm weight x s      -> columns of the matrices that read it / s          (q, k, v; gate, up)
rows of v_proj x s   -> columns of o_proj / s, of every query head that attends with the key/value head
rows of up_proj x s  -> columns of down_proj / s: down reads silu(gate) * up, which is linear in up
rows of k_proj x s   -> rows of q_proj / s, the same factor for both channels of a rotary pair
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_tools.harden.strength import QUIET_SHARE, Strength
from eagle_tools.harden.weights import Attention, Tensors, Weights, columns, layers, norm_readers, scale_rows


def outlier_channels(count: int, share: float, skip: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Draws the channels, of `count`, that are outliers: the share of them, at least two, none of those to skip."""
    order = torch.randperm(count, generator=rng)
    allowed = order[~torch.isin(order, torch.tensor(skip, dtype=torch.int64))]
    return allowed[: max(2, round(count * share))]


def factors(count: int, outliers: Tensor, largest: float, jitter: float, rng: torch.Generator) -> Tensor:
    """Draws the factors [count]: log-normal of standard deviation `jitter`; of the outliers log-uniform from the square
    root of `largest` to `largest`."""
    drawn = torch.exp(jitter * torch.randn(count, generator=rng, dtype=torch.float64))
    exponents = (1 + torch.rand(len(outliers), generator=rng, dtype=torch.float64)) / 2
    drawn[outliers] = largest**exponents
    return drawn


def quieten(drawn: Tensor, skip: Tensor, largest: float, rng: torch.Generator) -> None:
    """Divides QUIET_SHARE of the factors, none of the indices to skip, by what `factors` multiplies outliers with."""
    quiet = outlier_channels(len(drawn), QUIET_SHARE, tuple(skip.tolist()), rng)
    drawn[quiet] /= largest ** ((1 + torch.rand(len(quiet), generator=rng, dtype=torch.float64)) / 2)


def plant_norm_outliers(weights: Weights, free: tuple[int, ...], strength: Strength, rng: torch.Generator) -> None:
    """Scales the outputs of all norms, the target's last one apart. A model's outliers are the same channels in all its
    layers, as in real models, but their factors differ. free: channels that keep factor 1."""
    for tensors in weights.models().values():
        readers = norm_readers(tensors)
        width = len(tensors[f"{next(iter(readers))}.weight"])
        outliers = outlier_channels(width, strength.share, free, rng)
        for norm, matrices in readers.items():
            drawn = factors(width, outliers, strength.outlier, strength.jitter, rng)
            quieten(drawn, outliers, strength.quiet, rng)
            drawn[list(free)] = 1
            tensors[f"{norm}.weight"] *= drawn
            for reader in matrices:
                columns(tensors, reader, width).div_(drawn)


def plant_inner_outliers(weights: Weights, strength: Strength, rng: torch.Generator) -> None:
    """Scales the channels between v and o, between up and down, and of keys against queries, in every layer."""
    for model, tensors in weights.models().items():
        for layer in layers(tensors):
            scale_values(tensors, layer, weights.attention[model], strength, rng)
            scale_keys(tensors, layer, weights.attention[model], strength, rng)
            scale_units(tensors, layer, strength, rng)


def scale_values(tensors: Tensors, layer: str, sizes: Attention, strength: Strength, rng: torch.Generator) -> None:
    """Scales the values' channels, which o_proj takes back."""
    count = sizes.kv_heads * sizes.head_dim
    outliers = outlier_channels(count, strength.share, (), rng)
    drawn = factors(count, outliers, strength.inner, strength.jitter, rng)
    scale_rows(tensors, f"{layer}self_attn.v_proj", drawn)
    tensors[f"{layer}self_attn.o_proj.weight"] /= per_query(drawn, sizes)


def scale_keys(tensors: Tensors, layer: str, sizes: Attention, strength: Strength, rng: torch.Generator) -> None:
    """Scales the keys' channels, which the queries take back. Rotary pair i of a head is its channels i and i + D/2."""
    pairs = sizes.kv_heads * (sizes.head_dim // 2)
    outliers = outlier_channels(pairs, strength.share, (), rng)
    drawn = factors(pairs, outliers, strength.inner, strength.jitter, rng)
    both = drawn.view(sizes.kv_heads, 1, -1).expand(-1, 2, -1).reshape(-1)
    scale_rows(tensors, f"{layer}self_attn.k_proj", both)
    scale_rows(tensors, f"{layer}self_attn.q_proj", 1 / per_query(both, sizes))


def scale_units(tensors: Tensors, layer: str, strength: Strength, rng: torch.Generator) -> None:
    """Scales the MLP's units, which down_proj takes back."""
    count = tensors[f"{layer}mlp.down_proj.weight"].shape[1]
    drawn = factors(count, outlier_channels(count, strength.share, (), rng), strength.inner, strength.jitter, rng)
    scale_rows(tensors, f"{layer}mlp.up_proj", drawn)
    tensors[f"{layer}mlp.down_proj.weight"] /= drawn


def per_query(values: Tensor, sizes: Attention) -> Tensor:
    """Repeats what belongs to key/value heads [kv_heads * D] for the query heads [heads * D] that read them."""
    return values.view(sizes.kv_heads, -1).repeat_interleave(sizes.heads // sizes.kv_heads, 0).reshape(-1)
