"""Mixtures of experts as transformers runs them: the matrices of a layer's experts in two tensors.

Shapes: T rows, H hidden, E experts, k experts per row, I width of an expert, n rows of one expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eagle_export.reading.stored_tensors import StoredTensor


def fused_experts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields name and module of each mixture's experts: gate_up_proj [E, 2I, H], down_proj [E, H, I], act_fn, and a
    forward pass of rows [T, H], their experts' numbers [T, k] and shares."""
    for name, part in module.named_modules():
        if isinstance(getattr(part, "gate_up_proj", None), nn.Parameter):
            yield name, part


def expert_inputs(experts: Any, hidden: Tensor, chosen: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields, of each expert with rows, its number, what its gate and up read [n, H] and what its down reads [n, I].

    experts: of `fused_experts`. hidden [T, H]. chosen [T, k]: numbers of experts."""
    for number in sorted(set(chosen.flatten().tolist())):
        rows = hidden[(chosen == number).any(-1)]
        gate, up = nn.functional.linear(rows, experts.gate_up_proj[number]).chunk(2, -1)
        yield number, rows, experts.act_fn(gate) * up


def read_fused(experts: Any, name: str, tensors: Mapping[str, StoredTensor]) -> dict[str, Tensor]:
    """Returns the parameters of a module of `fused_experts` in fp32, by their names with `name` before them.

    name: the module's. tensors: those of the checkpoint by their names in the target's graph."""
    gate_up = torch.empty(experts.gate_up_proj.shape, dtype=torch.float32)
    down = torch.empty(experts.down_proj.shape, dtype=torch.float32)
    width = down.shape[2]
    for number in range(len(down)):
        gate_up[number, :width] = tensors[f"{name}.{number}.gate_proj.weight"].read()
        gate_up[number, width:] = tensors[f"{name}.{number}.up_proj.weight"].read()
        down[number] = tensors[f"{name}.{number}.down_proj.weight"].read()
    return {f"{name}.gate_up_proj": gate_up, f"{name}.down_proj": down}
