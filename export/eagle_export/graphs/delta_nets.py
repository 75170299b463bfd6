"""Gated delta nets (Qwen3.5's layers without attention) and state spaces (Granite 4's) as one node each in a trace, and
gated attention.

The nodes are of this project's own; recipes/delta_nets.py and recipes/native.py put operators in their place, and give
the graph the inputs and outputs of the states.

Shapes: T rows, X width of the model; G key heads of width D and H value heads of width E, C = 2 G D + H E.
"""

from __future__ import annotations

import sys
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from eagle_export.recipes.graph import DELTA_NET, STATE_SPACE


class DeltaNet(nn.Module):
    """The part of one layer, with the names of transformers' weights.

    Of a row in_proj_qkv makes queries, keys and values [C], which go through a short convolution over the last rows,
    and in_proj_b and in_proj_a how much of its key's value is replaced in the state, and how much of the state stays.
    What the query reads of the state is normalised in each head, and gated."""

    def __init__(self, whole: nn.Module) -> None:
        """whole: transformers' part."""
        super().__init__()
        for name, part in whole.named_children():
            setattr(self, name, part)
        self.A_log, self.dt_bias = whole.A_log, whole.dt_bias
        sizes = ("num_k_heads", "num_v_heads", "head_k_dim", "head_v_dim")
        self.sizes: tuple[int, ...] = tuple(int(getattr(whole, name)) for name in sizes)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """hidden_states [1, T, X]. Returns [1, T, X]."""
        key_heads, heads, key_width, width = self.sizes
        rows = [part(hidden_states) for part in (self.in_proj_qkv, self.in_proj_b, self.in_proj_a)]  # type: ignore[operator]
        read = torch.onnx.ops.symbolic(
            "::".join(DELTA_NET),
            [*rows, self.conv1d.weight, self.A_log, self.dt_bias],  # type: ignore[list-item, union-attr]
            {"key_heads": key_heads, "heads": heads, "key_width": key_width, "width": width},
            dtype=hidden_states.dtype,
            shape=(1, hidden_states.shape[1], heads * width),
        )
        norm: Any = self.norm
        normed = nn.functional.rms_norm(read.reshape(1, -1, heads, width), (width,), norm.weight, norm.variance_epsilon)
        gate: Tensor = self.in_proj_z(hidden_states)  # type: ignore[operator]
        mixed: Tensor = self.out_proj(normed.reshape(1, -1, heads * width) * nn.functional.silu(gate))  # type: ignore[operator]
        return mixed


class StateSpace(nn.Module):
    """The part of one layer with a state space of Mamba-2, with the names of transformers' weights. The rows of in_proj
    and conv1d are in the order of a delta net's: C, B and x are what queries, keys and values are there.

    Of a row in_proj makes a gate, these [C], which go through a short convolution over the last rows, and dt, how much
    of the state stays, and goes into it. What C reads of the state, and x, is gated and normalised in each group."""

    def __init__(self, whole: nn.Module) -> None:
        """whole: transformers' part."""
        super().__init__()
        for name, part in whole.named_children():
            setattr(self, name, part)
        self.A_log, self.dt_bias, self.D = whole.A_log, whole.dt_bias, whole.D
        sizes = ("n_groups", "num_heads", "ssm_state_size", "head_dim")
        self.sizes: tuple[int, ...] = tuple(int(getattr(whole, name)) for name in sizes)

    def forward(self, hidden_states: Tensor, **_: Any) -> Tensor:
        """hidden_states [1, T, X]. Returns [1, T, X]."""
        parts: Any = self
        groups, heads, key_width, width = self.sizes
        columns = heads * width
        sizes = [columns, 2 * groups * key_width + columns, heads]
        gate, qkv, dt = parts.in_proj(hidden_states).split(sizes, dim=-1)
        read = torch.onnx.ops.symbolic(
            "::".join(STATE_SPACE),
            [qkv, dt, parts.conv1d.weight, parts.conv1d.bias, parts.A_log, parts.dt_bias, parts.D],
            {"key_heads": groups, "heads": heads, "key_width": key_width, "width": width},
            dtype=hidden_states.dtype,
            shape=(1, hidden_states.shape[1], columns),
        )
        gated, gain, size = read * nn.functional.silu(gate), parts.norm.weight, columns // groups
        if groups == 1:
            normed = nn.functional.rms_norm(gated, (size,), gain, parts.norm.variance_epsilon)
        else:
            ones = torch.ones(size, dtype=gated.dtype)
            of_groups = gated.reshape(1, -1, groups, size)
            normed = nn.functional.rms_norm(of_groups, (size,), ones, parts.norm.variance_epsilon)
            normed = normed.reshape(1, -1, columns) * gain
        mixed: Tensor = parts.out_proj(normed)
        return mixed


class GatedAttention(nn.Module):
    """The attention of other layers, with the names of transformers' weights. The rows of q_proj are those of all
    queries and then those of their gates, where checkpoints have both of each head together."""

    def __init__(self, whole: nn.Module) -> None:
        """whole: transformers' part."""
        super().__init__()
        for name, part in whole.named_children():
            setattr(self, name, part)
        self.config, self.head_dim, self.scaling = whole.config, whole.head_dim, whole.scaling
        self.layer_idx: Any = whole.layer_idx
        self.modeling = type(whole).__module__

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any, attention_mask: Any, cache: Any, **_: Any
    ) -> tuple[Tensor, None]:
        """hidden_states [1, T, X]. Returns [1, T, X], and no weights."""
        parts: Any = self

        def heads(rows: Tensor) -> Tensor:
            return rows.reshape(1, hidden_states.shape[1], -1, parts.head_dim)

        q, gate = parts.q_proj(hidden_states).chunk(2, dim=-1)
        k, v = parts.k_proj(hidden_states), parts.v_proj(hidden_states)
        q, k = parts.q_norm(heads(q)).transpose(1, 2), parts.k_norm(heads(k)).transpose(1, 2)
        q, k = sys.modules[self.modeling].apply_rotary_pos_emb(q, k, *position_embeddings)
        k, v = cache.update(k, heads(v).transpose(1, 2), self.layer_idx)
        attend = ALL_ATTENTION_FUNCTIONS[parts.config._attn_implementation]
        read, _weights = attend(self, q, k, v, attention_mask, scaling=parts.scaling)
        read = read.reshape(1, hidden_states.shape[1], -1)
        return parts.o_proj(read * torch.sigmoid(gate)), None


def mark_delta_nets(layers: nn.ModuleList, name: str) -> None:
    """Puts a DeltaNet in the place of each layer's part of that name, and GatedAttention in that of attention."""
    layer: Any
    for layer in layers:
        if hasattr(layer, name):
            setattr(layer, name, DeltaNet(getattr(layer, name)))
        else:
            layer.self_attn = GatedAttention(layer.self_attn)


def mark_state_spaces(layers: nn.ModuleList, name: str) -> None:
    """Puts a StateSpace in the place of each layer's part of that name; layers with attention have None there."""
    for layer in layers:
        if getattr(layer, name) is not None:
            setattr(layer, name, StateSpace(getattr(layer, name)))
