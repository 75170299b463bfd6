"""Rotations: of the values between v and o, and of the residual stream.

A value head's channels may be rotated freely: v_proj's rows by R, the columns of o_proj of every query head that reads
them by its transpose. The residual stream may be rotated once every norm's weight is folded into the matrices that read
it, because a norm without weight commutes with rotations (QuaRot, arXiv 2404.00456). The LM head then has the last
norm's weight, so it is stored on its own.

An EAGLE-1 head forbids the second: its hidden state replaces the last norm's weighted output g * x and passes through a
norm of its own, so that only rotations which commute with g are exact.

Two rotations are known. "spread": a random one, after which channels are alike. "concentrate": to the principal axes of
what the weights write for white inputs, after which few channels hold most of the energy.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from eagle_export.reading.checkpoint import EMBEDDING, LM_HEAD
from eagle_tools.harden.weights import (
    LAST_NORM,
    Attention,
    Tensors,
    Weights,
    columns,
    layers,
    map_stream,
    norm_readers,
)

Rotation = Callable[[Tensor, torch.Generator], Tensor]  # covariance [n, n] and random numbers -> orthogonal [n, n]


def spread(covariance: Tensor, rng: torch.Generator) -> Tensor:
    """Draws a rotation [n, n] from all with equal probability, whatever the covariance."""
    drawn = torch.randn(covariance.shape, generator=rng, dtype=covariance.dtype)
    orthogonal, upper = torch.linalg.qr(drawn)
    out: Tensor = orthogonal * upper.diagonal().sign()
    return out


def concentrate(covariance: Tensor, rng: torch.Generator) -> Tensor:
    """Returns the rotation [n, n] to the principal axes of a covariance, which come in random order."""
    axes: Tensor = torch.linalg.eigh(covariance).eigenvectors.T
    return axes[torch.randperm(len(axes), generator=rng)]


ROTATIONS: dict[str, Rotation] = {"spread": spread, "concentrate": concentrate}


def rotate_values(weights: Weights, rotation: Rotation, rng: torch.Generator) -> None:
    """Rotates the channels of every value head of every layer."""
    for model, tensors in weights.models().items():
        for layer in layers(tensors):
            _rotate_layer(tensors, layer, weights.attention[model], rotation, rng)


def _rotate_layer(tensors: Tensors, layer: str, sizes: Attention, rotation: Rotation, rng: torch.Generator) -> None:
    name = f"{layer}self_attn.v_proj"
    values = tensors[f"{name}.weight"].view(sizes.kv_heads, sizes.head_dim, -1)
    matrices = torch.stack([rotation(head @ head.T, rng) for head in values])
    tensors[f"{name}.weight"] = (matrices @ values).flatten(0, 1)
    if f"{name}.bias" in tensors:
        bias = tensors[f"{name}.bias"].view(sizes.kv_heads, sizes.head_dim, 1)
        tensors[f"{name}.bias"] = (matrices @ bias).flatten()
    output = tensors[f"{layer}self_attn.o_proj.weight"]
    read = output.view(len(output), sizes.heads, sizes.head_dim)
    per_head = matrices.repeat_interleave(sizes.heads // sizes.kv_heads, 0)
    tensors[f"{layer}self_attn.o_proj.weight"] = torch.einsum("ohd,hed->ohe", read, per_head).flatten(1)


def rotate_stream(weights: Weights, rotation: Rotation, rng: torch.Generator) -> None:
    """Rotates the residual stream of the target and of an EAGLE-3 head, after folding all norms."""
    assert "eagle1" not in weights.heads
    fold_norms(weights)
    target = weights.target
    written = [
        target[f"{layer}{name}.weight"] for layer in layers(target) for name in ("self_attn.o_proj", "mlp.down_proj")
    ]
    embedding = target[EMBEDDING]
    covariance = embedding.T @ embedding / len(embedding) + sum(matrix @ matrix.T for matrix in written)
    map_stream(weights, rotation(covariance, rng))


def fold_norms(weights: Weights) -> None:
    """Sets the weights of all norms to 1 and multiplies the columns that read them, the LM head's too."""
    target = weights.target
    target.setdefault(LM_HEAD, target[EMBEDDING].clone())
    target[LM_HEAD] *= target[f"{LAST_NORM}.weight"]
    target[f"{LAST_NORM}.weight"].fill_(1)
    for tensors in weights.models().values():
        for norm, readers in norm_readers(tensors).items():
            weight = tensors[f"{norm}.weight"]
            for reader in readers:
                columns(tensors, reader, len(weight)).mul_(weight)
            weight.fill_(1)
