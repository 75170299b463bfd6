"""Training-time test (ttt.py) of an EAGLE-3 head on the rows that matter, and nothing else of them computed twice.

- Row i of step j is computed only if it carries loss at step j or later: no other row ever reads it. Of the remaining
  rows of step 0 the keys and values alone are needed.
- What a layer makes of a token's embedding is the same at every step, so it is computed once per token.
- Attention is a causal block and a few keys per row (attention.py).

Rows are numbered through the texts: b * T + i. Shapes: B texts, T tokens, n rows of a step, Hd width of the head.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, cast

import torch
from torch import Tensor
from torch.nn.functional import linear
from torch.utils.checkpoint import checkpoint

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.eagle3 import Eagle3Head
from eagle_export.heads.layers import Attention
from eagle_train.attention import attend, rotated


def reaching(learning: Sequence[Tensor]) -> list[Tensor]:
    """Returns the rows [n] to compute at each step, ascending. learning: [B, T] bool of each step, rows with loss."""
    rows, needed = [], torch.zeros_like(learning[-1])
    for each in reversed(learning):
        needed = needed | each
        rows.append(torch.nonzero(needed.flatten()).flatten())
    return rows[::-1]


def unroll_rows(
    head: Eagle3Head, shape: HeadConfig, features: Tensor, ids: Tensor, rows: Sequence[Tensor], recompute: bool = False
) -> Iterator[Tensor]:
    """Yields the head's hidden states [n, Hd] of each step's rows, which must be among those of the step before.

    features [B, T, Hd]: after fc. ids [B, T]. recompute: keep no activations inside a step for the backward
    pass, but compute them again."""
    layer, attention = head.midlayer, head.midlayer.self_attn
    width, length = shape.hidden_size, ids.shape[1]
    weight, bias = _joined(attention)
    next_ids = torch.cat([ids[:, 1:], ids.new_zeros(len(ids), 1)], 1)
    of_tokens = linear(layer.input_layernorm(head.embed_tokens(next_ids)), weight[:, :width], bias).flatten(0, 1)
    places = torch.arange(length + len(rows), device=ids.device)
    cos, sin = (table[0] for table in head.rotary_emb(features, places[None]))

    def project(state: Tensor, at: Tensor, step: int) -> tuple[Tensor, Tensor, Tensor]:
        """state [n, Hd]: what the layer reads, normalised. Returns queries, keys, values [n, heads, D]."""
        mixed = linear(state, weight[:, width:]) + taken(of_tokens, at + step)
        sizes = [shape.num_heads, shape.num_kv_heads, shape.num_kv_heads]
        q, k, v = torch.split(mixed.reshape(len(mixed), sum(sizes), shape.head_dim), sizes, 1)
        if attention.qk_norm:
            q, k = attention.q_norm(q), attention.k_norm(k)
        position = at % length + step
        q, k = (rotated(x, cos[position, None], sin[position, None]).to(v.dtype) for x in (q, k))
        return q, k, v

    everywhere = torch.arange(ids.numel(), device=ids.device)
    verified = layer.hidden_norm(features.flatten(0, 1))
    every_q, keys, values = project(verified, everywhere, 0)
    keys, values = (x.reshape(*ids.shape, *x.shape[1:]) for x in (keys, values))

    def finish(residual: Tensor, attended: Tensor) -> Tensor:
        x = residual + attention.o_proj(attended.flatten(1))
        x = x + layer.mlp(layer.post_attention_layernorm(x))
        return cast(Tensor, head.norm(x)) if head.output_norm == "recurrent" else x

    def first(at: Tensor) -> Tensor:
        residual = verified if layer.normed_residual else features.flatten(0, 1)
        none = keys.new_zeros(len(at), keys.shape[2], 0, keys.shape[3])
        return finish(taken(residual, at), attend(taken(every_q, at), keys, values, none, none, at))

    def later(
        hidden: Tensor, at: Tensor, step: int, past_keys: Tensor, past_values: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        normed = layer.hidden_norm(hidden)
        q, k, v = project(normed, at, step)
        own_k, own_v = (torch.cat([past, new[:, :, None]], 2) for past, new in ((past_keys, k), (past_values, v)))
        attended = attend(q, keys, values, own_k, own_v, at)
        return finish(normed if layer.normed_residual else hidden, attended), own_k, own_v

    hidden = first(rows[0]) if not recompute else checkpoint(first, rows[0], use_reentrant=False)
    own_keys = own_values = keys.new_zeros(len(rows[0]), keys.shape[2], 0, keys.shape[3])
    yield hidden
    for step in range(1, len(rows)):
        kept = torch.searchsorted(rows[step - 1], rows[step])
        state = (x if len(kept) == len(x) else taken(x, kept) for x in (hidden, own_keys, own_values))
        hidden, own_keys, own_values = state
        args = (hidden, rows[step], step, own_keys, own_values)
        hidden, own_keys, own_values = later(*args) if not recompute else checkpoint(later, *args, use_reentrant=False)
        yield hidden


def taken(x: Tensor, rows: Tensor) -> Tensor:
    """Returns the rows [n, ...] of x. No row may be named twice: the gradients are put back, not added up, which a CPU
    does in parallel."""
    return cast(Tensor, _Taken.apply(x, rows))  # type: ignore[no-untyped-call]


class _Taken(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, rows: Tensor) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = x.shape
        return x.index_select(0, rows)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, None]:
        (rows,) = ctx.saved_tensors
        whole = gradients[0].new_zeros(ctx.shape)
        whole[rows] = gradients[0]
        return whole, None


def _joined(attention: Attention) -> tuple[Tensor, Tensor | None]:
    """Returns weight and bias of the projections to queries, keys and values, one after another."""
    projections = (attention.q_proj, attention.k_proj, attention.v_proj)
    weight = torch.cat([each.weight for each in projections])
    return weight, None if attention.q_proj.bias is None else torch.cat([each.bias for each in projections])
