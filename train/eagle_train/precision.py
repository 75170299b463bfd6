"""In which precision a head is trained: products in bfloat16 where the device is faster at them, else all in fp32.
Weights, losses and AdamW's moments are fp32 everywhere."""

from __future__ import annotations

from typing import TypeVar

import torch
from torch import Tensor

Given = TypeVar("Given", Tensor, None, Tensor | None)


def mixed(device: torch.device) -> torch.autocast:
    """Returns the context in which a head computes."""
    return torch.autocast(device.type, torch.bfloat16, enabled=has_bf16(device))


def has_bf16(device: torch.device) -> bool:
    """Returns whether the device is faster at bfloat16 than at fp32: a GPU, or a CPU with AVX-512 BF16 or AMX."""
    if device.type != "cpu":
        return device.type == "cuda"
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def unhalved(state: Given) -> Given:
    """Returns a state that can be joined with others under `mixed`, which takes fp32 and bfloat16, but not fp16."""
    return state.float() if state is not None and state.dtype == torch.float16 else state
