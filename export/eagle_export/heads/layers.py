"""Parts of a draft head's decoder layer, built from transformers' Llama modules.

Shapes: T rows, of which R are wanted, P past rows, X width of attention's input, H hidden, Hq/Hkv query/key heads, D
head_dim.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.phi3 import modeling_phi3

from eagle_export.heads.config import HeadConfig

Rows = tuple[Tensor, Tensor]  # keys and values, each [1, rows, Hkv, D]


class Attention(nn.Module):
    """Self-attention over past and new rows, whose input may be wider than its output."""

    def __init__(self, config: HeadConfig, width: int) -> None:
        super().__init__()
        self.head_dim = config.head_dim
        q, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
        self.q_proj = nn.Linear(width, q, bias=config.qkv_bias)
        self.k_proj = nn.Linear(width, kv, bias=config.qkv_bias)
        self.v_proj = nn.Linear(width, kv, bias=config.qkv_bias)
        self.o_proj = nn.Linear(q, config.hidden_size, bias=config.o_bias)
        self.output_gate = nn.Linear(width, q, bias=False) if config.gated else None
        self.qk_norm = config.qk_norm
        if config.qk_norm:
            self.q_norm, self.k_norm = (norm_of(config.head_dim, config.rms_norm_eps) for _ in "qk")

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, past: Rows, rows: Tensor | None = None
    ) -> tuple[Tensor, Rows]:
        """x [1, T, X], mask additive [1, 1, T, P + T], rows [R] as in `wanted`. Returns [1, R, H], and T new rows."""
        q, k, v = (
            project(source).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project, source in ((self.q_proj, wanted(x, rows)), (self.k_proj, x), (self.v_proj, x))
        )
        if self.qk_norm:
            q, k = self.q_norm(q), self.k_norm(k)
        rotate = (modeling_llama if self.output_gate is None else modeling_phi3).apply_rotary_pos_emb
        if rows is None:
            q, k = rotate(q, k, *rope)
        else:  # the function rotates two tensors; the unused result is not traced
            q, _ = rotate(q, q, *(wanted(table, rows) for table in rope))
            _, k = rotate(k, k, *rope)
        new = (k.transpose(1, 2), v.transpose(1, 2))
        keys, values = (torch.cat(pair, 1).transpose(1, 2) for pair in zip(past, new, strict=True))
        # q is scaled here: TensorRT would apply the operator's own scale to all cached keys.
        out = nn.functional.scaled_dot_product_attention(
            q * self.head_dim**-0.5,
            keys,
            values,
            attn_mask=wanted(mask, rows, 2),
            scale=1.0,
            enable_gqa=q.shape[1] != keys.shape[1],
        )
        out = out.transpose(1, 2).flatten(2)
        if self.output_gate is not None:
            out = out * torch.sigmoid(self.output_gate(wanted(x, rows)))
        return self.o_proj(out), new


class DecoderLayer(nn.Module):
    """A Llama decoder layer. normed: whether there is a norm before its attention."""

    def __init__(self, config: HeadConfig, normed: bool = True) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.mlp = modeling_llama.LlamaMLP(config.llama())
        if normed:
            self.input_layernorm = rms_norm(config)
        self.post_attention_layernorm = rms_norm(config)
        self.normed = normed

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, past: Rows, rows: Tensor | None = None
    ) -> tuple[Tensor, Rows]:
        """As of Attention."""
        normed = self.input_layernorm(x) if self.normed else x
        attended, new = self.self_attn(normed, rope, mask, past, rows)
        x = wanted(x, rows) + attended
        return x + self.mlp(self.post_attention_layernorm(x)), new


def new_rows(attention: Attention, x: Tensor, rope: tuple[Tensor, Tensor]) -> Rows:
    """Returns keys, normalised and rotated, and values of x [1, T, X], each [1, T, Hkv, D]."""
    k, v = (project(x).unflatten(-1, (-1, attention.head_dim)) for project in (attention.k_proj, attention.v_proj))
    k = (attention.k_norm(k) if attention.qk_norm else k).transpose(1, 2)
    # The function rotates two tensors; the unused result is not traced.
    return modeling_llama.apply_rotary_pos_emb(k, k, *rope)[1].transpose(1, 2), v


def wanted(x: Tensor, rows: Tensor | None, axis: int = 1) -> Tensor:
    """Selects the rows [R] of x whose output is wanted; None: all T. The last layer needs only keys and values of the
    other rows."""
    return x if rows is None else x.index_select(axis, rows)


def rms_norm(config: HeadConfig) -> nn.Module:
    """Returns Llama's RMSNorm of the head's width."""
    return norm_of(config.hidden_size, config.rms_norm_eps)


def norm_of(width: int, eps: float) -> nn.Module:
    module: nn.Module = modeling_llama.LlamaRMSNorm(width, eps)
    return module


def rotary(config: HeadConfig) -> nn.Module:
    """Returns a module that maps position_ids [1, T] to cos and sin, with the head's own rope_theta. Of a gated layer
    they are as many as a head has rotated numbers, as Phi-3's code computes and applies them."""
    make = modeling_phi3.Phi3RotaryEmbedding if config.gated else modeling_llama.LlamaRotaryEmbedding
    module: nn.Module = make(config.llama())
    return module
