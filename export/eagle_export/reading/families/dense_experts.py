"""Mixtures of experts as dense layers: every expert is computed for every row, and weighted with zero where the router
did not choose it.

So a row's result does not depend on where the others of its forward pass are sent, as it would if rows were gathered by
expert: engines add up products of one row and of several in different orders. The price is arithmetic and memory
traffic for all experts, where a row needs num_experts_per_tok of them. For CPUs the traced graph is rewritten
(recipes/routed_experts.py).

transformers itself keeps the matrices of a layer's experts in two tensors.

Shapes: T rows, H hidden, E experts, k experts per row, I width of an expert, n rows of one expert.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from eagle_export.reading.families.family import MODULE, Experts
from eagle_export.reading.stored_tensors import StoredTensor


class Expert(nn.Module):
    """One expert: a gated MLP."""

    def __init__(self, hidden: int, width: int, activation: str) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(hidden, width, bias=False)
        self.up_proj = nn.Linear(hidden, width, bias=False)
        self.down_proj = nn.Linear(width, hidden, bias=False)
        self.act_fn = ACT2FN[activation]

    def forward(self, x: Tensor) -> Tensor:
        """x [1, T, H]. Returns [1, T, H]."""
        out: Tensor = self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
        return out


class DenseExperts(nn.Module):
    """The mixture of one layer."""

    def __init__(self, config: Any, experts: Experts) -> None:
        super().__init__()
        hidden, self.count = int(config.hidden_size), experts.count(config)
        self.chosen = int(config.num_experts_per_tok)
        self.renormalised = experts.renormalised(config)
        self.gate = nn.Linear(hidden, self.count, bias=False)
        width = experts.width(config)
        self.experts = nn.ModuleList(Expert(hidden, width, config.hidden_act) for _ in range(self.count))

    def forward(self, x: Tensor) -> Tensor:
        """x [1, T, H]. Returns [1, T, H]."""
        shares = self.shares(x)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mixed = mixed + expert(x) * shares[..., number : number + 1]
        return mixed

    def shares(self, x: Tensor) -> Tensor:
        """Returns each expert's weight [1, T, E], zero for those that were not chosen. Scores are added up in a wider
        type, in which their order does not matter: a rounding could send a row to another expert."""
        wide = torch.float64 if x.dtype == torch.float32 else torch.float32
        scores = nn.functional.linear(x.to(wide), self.gate.weight.to(wide)).float()
        best, which = scores.softmax(-1).topk(self.chosen)
        if self.renormalised:
            best = best / best.sum(-1, keepdim=True)
        is_chosen = which[..., None] == torch.arange(self.count)
        return (best[..., None] * is_chosen).sum(-2).to(x.dtype)


def make_dense(layers: nn.ModuleList, config: Any, experts: Experts) -> None:
    """Replaces the mixtures of a model's layers, in place. Some families have layers without one."""
    for layer in layers:
        if hasattr(getattr(layer, MODULE), "experts"):
            setattr(layer, MODULE, DenseExperts(config, experts))


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
