"""Starts a block head from a trained EAGLE-1 head of the same target, whose first row then drafts nearly as that head.

Both read the token after a state of the target, and that state. EAGLE-1's keys and values are of rows that read the
same; a block's are of what fc makes of the target's taps, so fc starts as the least-squares map from the taps to what
EAGLE-1's layer reads (R2 .73 on the demo pair).

Shapes: T tokens of all texts, H width, n taps.
"""

from __future__ import annotations

from typing import cast

import numpy as np
import torch
from torch import Tensor

from eagle_export.graphs.pair import HeadPart
from eagle_export.heads.block import BlockHead
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.layers import DecoderLayer
from eagle_train.batches import gather
from eagle_train.data import Windows
from eagle_train.errors import TrainError
from eagle_train.target import FrozenTarget

SAMPLE = 128  # windows that fc is fitted to


@torch.no_grad()
def start_from_eagle1(
    head: BlockHead, shape: HeadConfig, part: HeadPart, target: FrozenTarget, windows: Windows, seed: int
) -> None:
    """Give an untrained block head the weights of an EAGLE-1 head. Raises TrainError if their layers differ in size."""
    known = part.config
    sizes = ("num_heads", "num_kv_heads", "head_dim", "intermediate_size", "qkv_bias", "o_bias", "fc_bias")
    for name in sizes:
        if getattr(known, name) != getattr(shape, name):
            raise TrainError(
                f"{part.checkpoint.folder} has {name} {getattr(known, name)}, but the block head "
                f"{getattr(shape, name)}; leave out what sets it, or start from an untrained head"
            )
    weights = {name: tensor.read().float().to(target.device) for name, tensor in part.checkpoint.tensors.items()}
    first, *later = (cast(DecoderLayer, layer) for layer in head.layers)
    head.input_fc.weight.copy_(weights["fc.weight"])
    for name, parameter in first.named_parameters():
        if name != "input_layernorm.weight":
            parameter.copy_(weights[f"layers.0.{name}"])
    for layer in later:  # they add nothing at first
        layer.self_attn.o_proj.weight.zero_()
        cast(Tensor, layer.mlp.down_proj.weight).zero_()
    taps, read, last = _read(head, shape, target, windows, seed)
    head.fc.weight.copy_(torch.linalg.lstsq(taps, read).solution.T)
    # EAGLE-1's layer reads its input, and its LM head its output, without a norm.
    for norm, size in ((first.input_layernorm, _size(read)), (head.hidden_norm, _size(read)), (head.norm, _size(last))):
        cast(Tensor, norm.weight).fill_(size)


def _read(
    head: BlockHead, shape: HeadConfig, target: FrozenTarget, windows: Windows, seed: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns, of rows of some windows: taps [T, n H], what EAGLE-1's layer reads [T, H], last states [T, H]."""
    chosen = np.random.default_rng(seed).permutation(len(windows))[:SAMPLE]
    rows = []
    for index in sorted(chosen.tolist()):
        ids = gather(windows, [index], target.device).ids
        states = target.states(ids, shape.taps)
        assert states.taps is not None
        read = head.input_fc(torch.cat([head.embed_tokens(ids[:, 1:]), states.last[:, :-1]], -1))
        rows.append((states.taps[0, 1:], read[0], states.last[0, 1:]))
    taps, read, last = (torch.cat(parts).float() for parts in zip(*rows, strict=True))
    return taps, read, last


def _size(rows: Tensor) -> float:
    """Returns the mean over rows of their root mean square."""
    return float(rows.pow(2).mean(-1).sqrt().mean())
