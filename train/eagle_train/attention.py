"""Attention of unrolled drafts: row i of step j attends the verified rows 0..i and its own earlier drafts.

The verified rows are one causal block, and the drafts a few keys per row. Both parts are computed by themselves and
joined through their log-sum-exp, so no matrix of rows x (steps * rows) exists. The causal block's backward pass takes
the joined output and log-sum-exp: its probabilities then are those of the joined softmax.

Shapes: B texts, T tokens, n rows of them, S own drafts of a row, Hq/Hkv query/key heads in groups of G, D head_dim.
"""

from __future__ import annotations

from typing import Any, Literal, cast

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

# Without cuDNN's, which builds a plan for every new shape: a first step of windows of a new length took 0.2 to 0.3 s
# on an H200 in place of 0.04.
FUSED = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
GPU_FLASH = torch.ops.aten._scaled_dot_product_flash_attention
GPU_FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_backward


def attend(q: Tensor, keys: Tensor, values: Tensor, own_keys: Tensor, own_values: Tensor, rows: Tensor) -> Tensor:
    """Returns the attention output [n, Hq, D] of queries [n, Hq, D].

    keys, values [B, T, Hkv, D]: of the verified rows. own_keys, own_values [n, Hkv, S, D]: of each row's drafts, its
    own row included unless it is a verified one (S = 0). rows [n]: where each query stands in B * T, ascending; it sees
    the verified rows of its text up to and including that one."""
    return cast(Tensor, _Attend.apply(q, keys, values, own_keys, own_values, rows))  # type: ignore[no-untyped-call]


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Returns x [n, heads, D] rotated as Llama does; cos, sin [n, 1, D]."""
    low, high = x.chunk(2, -1)
    return x * cos + torch.cat([-high, low], -1) * sin


class _Attend(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Tensor) -> Tensor:
        q, keys, values, own_keys, own_values, rows = inputs
        grid = (*keys.shape[:2], *q.shape[1:])
        out, lse = _causal(_spread(q, rows, grid), _heads(keys, q.shape[1]), _heads(values, q.shape[1]))
        out, lse = _taken(out, rows), _taken(lse, rows)
        if own_keys.shape[2]:
            scores = torch.matmul(_grouped(q, own_keys), own_keys.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
            verified = lse.view(*scores.shape[:-1], 1)
            joined = torch.cat([verified, scores], -1).logsumexp(-1, keepdim=True)
            own = torch.matmul((scores - joined).exp().to(q.dtype), own_values)
            out = (out.view_as(own) * (verified - joined).exp().to(q.dtype) + own).view_as(q)
            lse = joined.view_as(lse)
        ctx.save_for_backward(q, keys, values, own_keys, own_values, rows, out, lse)
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        q, keys, values, own_keys, own_values, rows, out, lse = ctx.saved_tensors
        given, heads, grid = gradients[0].to(q.dtype), q.shape[1], (*keys.shape[:2], *q.shape[1:])
        above, queries, whole = (_spread(x, rows, grid) for x in (given, q, out))
        reach = _spread(lse, rows, grid[:3], fill=torch.inf)  # rows that were not asked for get no probability
        dq, dk, dv = _causal_backward(above, queries, whole, reach, _heads(keys, heads), _heads(values, heads))
        dq = _taken(dq, rows)
        dk, dv = (_ungrouped(x, keys.shape[2]) for x in (dk, dv))
        if not own_keys.shape[2]:
            return dq, dk, dv, None, None, None
        scale, grouped, given = q.shape[-1] ** -0.5, _grouped(q, own_keys), _grouped(given, own_keys)
        scores = torch.matmul(grouped, own_keys.transpose(-1, -2)).float() * scale
        probabilities = (scores - lse.view(*scores.shape[:-1], 1)).exp()
        mean = (given.float() * _grouped(out, own_keys).float()).sum(-1, keepdim=True)
        pull = torch.matmul(given, own_values.transpose(-1, -2)).float()
        pull = (probabilities * (pull - mean) * scale).to(q.dtype)
        dq = dq + torch.matmul(pull, own_keys).view_as(dq)
        own_dk = torch.matmul(pull.transpose(-1, -2), grouped)
        own_dv = torch.matmul(probabilities.to(q.dtype).transpose(-1, -2), given)
        return dq, dk, dv, own_dk, own_dv, None


def gpu_flash_takes(x: Tensor) -> bool:
    """Returns whether flash attention on a GPU takes queries, keys or values [..., D]: half precision, and heads of up
    to 256 in steps of 8."""
    half, width = x.dtype in (torch.float16, torch.bfloat16), x.shape[-1]
    return x.device.type == "cuda" and half and width % 8 == 0 and width <= 256


def _fused(q: Tensor) -> Literal["cpu", "cuda"] | None:
    """Returns whose fused operator computes the causal block; None: matrices of scores do."""
    if q.device.type == "cpu":
        return "cpu"
    return "cuda" if gpu_flash_takes(q) else None


def _causal(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    """Returns output and fp32 log-sum-exp [B, Hq, T] of causal attention over [B, Hq, T, D]."""
    if (where := _fused(q)) is not None:
        out, lse, *_ = FLASH(q, k, v, 0.0, True) if where == "cpu" else GPU_FLASH(q, k, v, 0.0, True)
        return out, lse
    scores = _scores(q, k)
    lse = scores.logsumexp(-1)
    return torch.matmul((scores - lse[..., None]).exp_().to(v.dtype), v), lse


def _causal_backward(
    given: Tensor, q: Tensor, out: Tensor, lse: Tensor, k: Tensor, v: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns the gradients of q, k and v [B, Hq, T, D]; given: that of the output."""
    if (where := _fused(q)) == "cpu":
        dq, dk, dv = FLASH_BACKWARD(given, q, k, v, out, lse, 0.0, True)
        return dq, dk, dv
    if where == "cuda":
        none, length = torch.empty(0, dtype=torch.int64, device=q.device), q.shape[2]
        dq, dk, dv = GPU_FLASH_BACKWARD(
            given, q, k, v, out, lse.contiguous(), None, None, length, length, 0.0, True, none, none
        )
        return dq, dk, dv
    probabilities = (_scores(q, k) - lse[..., None]).exp_()
    mean = (given.float() * out.float()).sum(-1, keepdim=True)
    pull = torch.matmul(given, v.transpose(-1, -2)).float().sub_(mean).mul_(probabilities).mul_(q.shape[-1] ** -0.5)
    pull = pull.to(q.dtype)
    dv = torch.matmul(probabilities.to(q.dtype).transpose(-1, -2), given)
    return torch.matmul(pull, k), torch.matmul(pull.transpose(-1, -2), q), dv


def _scores(q: Tensor, k: Tensor) -> Tensor:
    """Returns the masked scores [B, Hq, T, T] in fp32."""
    scores = torch.matmul(q, k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
    later = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).triu(1)
    masked: Tensor = scores.masked_fill_(later, -torch.inf)
    return masked


def _spread(x: Tensor, rows: Tensor, grid: tuple[int, ...], fill: float = 0.0) -> Tensor:
    """Returns x [n, Hq, ...] at its places in a grid [B, Hq, T, ...] that holds `fill` elsewhere."""
    whole = x.new_full((grid[0] * grid[1], *grid[2:]), fill)
    whole[rows] = x
    return whole.view(grid).transpose(1, 2)


def _taken(x: Tensor, rows: Tensor) -> Tensor:
    """Returns the rows [n, Hq, ...] of a grid [B, Hq, T, ...]."""
    return x.transpose(1, 2).flatten(0, 1)[rows]


def _heads(x: Tensor, heads: int) -> Tensor:
    """Returns keys or values [B, T, Hkv, D] as [B, Hq, T, D], each repeated for the heads that share it."""
    return x.repeat_interleave(heads // x.shape[2], 2).transpose(1, 2)


def _ungrouped(gradient: Tensor, kv_heads: int) -> Tensor:
    """Returns the gradient [B, Hq, T, D] of repeated keys or values as that of [B, T, Hkv, D]."""
    texts, heads, tokens, width = gradient.shape
    return gradient.reshape(texts, kv_heads, heads // kv_heads, tokens, width).sum(2).transpose(1, 2)


def _grouped(x: Tensor, own: Tensor) -> Tensor:
    """Returns x [n, Hq, D] as [n, Hkv, G, D]."""
    return x.reshape(len(x), own.shape[1], x.shape[1] // own.shape[1], x.shape[2])
