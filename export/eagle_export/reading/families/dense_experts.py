"""Mixtures of experts as dense layers: every expert is computed for every row, and weighted with zero where the router
did not choose it.

So a row's result does not depend on where the others of its forward pass are sent, as it would if rows were gathered by
expert: engines add up products of one row and of several in different orders. The price is arithmetic and memory
traffic for all experts, where a row needs num_experts_per_tok of them. For CPUs the traced graph is rewritten
(recipes/routed_experts.py).

Shapes: T rows, H hidden, E experts, k experts per row.
"""

from __future__ import annotations

from functools import partial
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN

from eagle_export.reading.families.family import Experts, row_sums


class Expert(nn.Module):
    """One expert: a gated MLP."""

    def __init__(self, config: Any, experts: Experts) -> None:
        super().__init__()
        hidden, width = int(config.hidden_size), experts.width(config)
        self.gate_proj = nn.Linear(hidden, width, bias=experts.biased)
        self.up_proj = nn.Linear(hidden, width, bias=experts.biased)
        self.down_proj = nn.Linear(width, hidden, bias=experts.biased)
        named = getattr(config, "hidden_act", None) or getattr(config, "hidden_activation", None)
        self.act_fn = ACT2FN[named or "silu"]  # which LFM2's does not state
        self.gated = None if experts.gated is None else partial(experts.gated, config)

    def forward(self, x: Tensor) -> Tensor:
        """x [1, T, H]. Returns [1, T, H]."""
        gate, up = self.gate_proj(x), self.up_proj(x)
        out: Tensor = self.down_proj(self.act_fn(gate) * up if self.gated is None else self.gated(gate, up))
        return out


class DenseExperts(nn.Module):
    """The mixture of one layer."""

    def __init__(self, config: Any, experts: Experts, whole: nn.Module) -> None:
        """whole: transformers' part of the layer, of which the MLP that reads every row stays, and a router of
        parts."""
        super().__init__()
        self.config, self.declared = config, experts
        self.count = experts.count(config)
        router, _, scores = experts.router.partition(".")
        made = nn.Linear(int(config.hidden_size), self.count, bias=experts.biased)
        self.add_module(router, whole.get_submodule(router) if scores else made)
        self.experts = nn.ModuleList(Expert(config, experts) for _ in range(self.count))
        if experts.shared:
            self.add_module(experts.shared, whole.get_submodule(experts.shared))
        if experts.shared_gate:
            self.add_module(experts.shared_gate, whole.get_submodule(experts.shared_gate))
        if experts.correction:
            owner: nn.Module = self
            *path, name = experts.correction.split(".")
            for part in path:
                if not hasattr(owner, part):
                    owner.add_module(part, nn.Module())
                owner = owner.get_submodule(part)
            like = attrgetter(experts.correction)(whole)
            owner.register_parameter(name, nn.Parameter(torch.zeros_like(like)))

    def forward(self, x: Tensor, routed: Tensor | None = None) -> Tensor | tuple[Tensor, Tensor]:
        """x [1, T, H]. routed: what the router reads in its place. Returns [1, T, H], and the shares where transformers
        does."""
        shares = self.shares(x if routed is None else routed)
        mixed = torch.zeros_like(x)
        for number, expert in enumerate(self.experts):
            mixed = mixed + expert(x) * shares[..., number : number + 1]
        if self.declared.shared:
            mixed = mixed + self._of_every_row(x)
        return (mixed, shares) if self.declared.tells_shares else mixed

    def _of_every_row(self, x: Tensor) -> Tensor:
        """Returns what the MLP that reads every row adds [1, T, H]."""
        added: Tensor = self.get_submodule(self.declared.shared)(x)
        gate = self.declared.shared_gate
        return self._scores(gate, x).sigmoid().to(x.dtype) * added if gate else added

    def _scores(self, name: str, x: Tensor) -> Tensor:
        """Returns what a part of a few columns makes of x, in fp32. It is added up in a wider type, in which the order
        does not matter: a rounding could send a row to another expert."""
        wide, part = torch.float64 if x.dtype == torch.float32 else torch.float32, self.get_submodule(name)
        assert isinstance(part, nn.Linear)
        bias = None if part.bias is None else part.bias.to(wide)
        return nn.functional.linear(x.to(wide), part.weight.to(wide), bias).float()

    def shares(self, x: Tensor) -> Tensor:
        """Returns each expert's weight [1, T, E], zero for those that were not chosen."""
        best, which = self._chosen(self._scores(self.declared.router, x))
        is_chosen = which[..., None] == torch.arange(self.count)
        return (best[..., None] * is_chosen).sum(-2).to(x.dtype)

    def _chosen(self, scores: Tensor) -> tuple[Tensor, Tensor]:
        """scores [1, T, E]. Returns weights and numbers of each row's experts [1, T, k]."""
        experts = self.declared
        if experts.chosen is not None:
            correction = self.get_parameter(experts.correction).float().reshape(-1)
            return experts.chosen(self.config, scores, correction)
        best, which = scores.softmax(-1).topk(int(self.config.num_experts_per_tok))
        if experts.renormalised(self.config):
            best = best / row_sums(best)
        return best, which


def make_dense(layers: nn.ModuleList, config: Any, experts: Experts) -> list[DenseExperts]:
    """Replaces the mixtures of a model's layers, in place, and returns them. Some families have layers without one."""
    mixtures = []
    for layer in layers:
        whole = getattr(layer, experts.module) if experts.module else layer
        if not hasattr(whole, "experts"):
            continue
        mixtures.append(DenseExperts(config, experts, whole))
        if experts.module:
            setattr(layer, experts.module, mixtures[-1])
        else:
            _beside_mlp(layer, mixtures[-1])
    return mixtures


def _beside_mlp(layer: Any, mixture: DenseExperts) -> None:
    """Lets a layer add a mixture to its MLP as Gemma-4 does, whose own code reads rows [T, H] here."""
    layer.enable_moe_block, layer.experts = False, mixture.experts
    before: list[Tensor] = []

    def note(_module: nn.Module, given: tuple[Tensor, ...]) -> None:
        before.append(given[0])

    def added(_module: nn.Module, given: tuple[Tensor, ...]) -> Tensor:
        x, router = before.pop(), layer.router
        routed = router.norm(x) * router.scale * router.scalar_root_size
        mixed = layer.post_feedforward_layernorm_2(mixture(layer.pre_feedforward_layernorm_2(x), routed))
        out: Tensor = layer.post_feedforward_layernorm_1(given[0]) + mixed
        return out

    layer.pre_feedforward_layernorm.register_forward_pre_hook(note)
    layer.post_feedforward_layernorm.register_forward_pre_hook(added)
