"""Experts as transformers keeps them: the matrices of a layer's experts in two tensors.

Checkpoints have a tensor for each matrix of each expert, and so have our graphs (dense_experts.py). Of experts with
biases the two tensors are transposed, with the columns of gate and up in turns (gpt-oss).

Shapes: T rows, H hidden, E experts, k experts per row, I width of an expert, n rows of one expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from eagle_export.reading.stored_tensors import StoredTensor

GATE_UP, DOWN, BIAS = "gate_up_proj", "down_proj", "_bias"  # names of transformers' parameters


def fused_experts(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yields name and module of each mixture's experts: gate_up_proj [E, 2I, H], down_proj [E, H, I], or both
    transposed with biases, and a forward pass of rows [T, H], their experts' numbers [T, k] and shares."""
    for name, part in module.named_modules():
        if isinstance(getattr(part, GATE_UP, None), nn.Parameter):
            yield name, part


def expert_inputs(experts: Any, hidden: Tensor, chosen: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
    """Yields, of each expert with rows, its number, what its gate and up read [n, H] and what its down reads [n, I].

    experts: of `fused_experts`. hidden [T, H]. chosen [T, k]: numbers of experts."""
    for number in sorted(set(chosen.flatten().tolist())):
        rows = hidden[(chosen == number).any(-1)]
        if is_biased(experts):
            products = experts._apply_gate(rows @ experts.gate_up_proj[number] + experts.gate_up_proj_bias[number])
        else:
            gate, up = nn.functional.linear(rows, experts.gate_up_proj[number]).chunk(2, -1)
            products = experts.act_fn(gate) * up
        yield number, rows, products


def is_biased(experts: Any) -> bool:
    """Whether experts of `fused_experts` have biases, and so the other layout."""
    return hasattr(experts, GATE_UP + BIAS)


def read_fused(tensors: Mapping[str, StoredTensor], name: str, count: int, biased: bool) -> dict[str, Tensor]:
    """Returns the parameters of a module of `fused_experts` in fp32, by their names with `name` before them.

    name: the module's. tensors: those of the checkpoint by their names in the target's graph. count: E."""

    def read(number: int, part: str) -> Tensor:
        return tensors[f"{name}.{number}.{part}"].read().float()

    width, hidden = tensors[f"{name}.0.gate_proj.weight"].shape
    gate_up, down = torch.empty(count, 2 * width, hidden), torch.empty(count, hidden, width)
    of_gate, of_up = (slice(0, None, 2), slice(1, None, 2)) if biased else (slice(0, width), slice(width, None))
    biases = torch.empty(count, 2 * width), torch.empty(count, hidden)
    for number in range(count):
        gate_up[number, of_gate] = read(number, "gate_proj.weight")
        gate_up[number, of_up] = read(number, "up_proj.weight")
        down[number] = read(number, "down_proj.weight")
        if biased:
            biases[0][number, of_gate] = read(number, "gate_proj.bias")
            biases[0][number, of_up] = read(number, "up_proj.bias")
            biases[1][number] = read(number, "down_proj.bias")
    if not biased:
        return {f"{name}.{GATE_UP}": gate_up, f"{name}.{DOWN}": down}
    turned = {
        f"{name}.{GATE_UP}": gate_up.transpose(1, 2).contiguous(),
        f"{name}.{DOWN}": down.transpose(1, 2).contiguous(),
    }
    return {**turned, f"{name}.{GATE_UP}{BIAS}": biases[0], f"{name}.{DOWN}{BIAS}": biases[1]}
