"""A pass of a target with Llama's layers over rows of tokens, with the attention left to the caller, who keeps keys and
values.

Shapes: N rows, D width of a head, A heads, K key/value heads, G = A / K, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear, rms_norm, silu

from eagle_export.reading.families.registry import windows_of
from eagle_train.attention import rotated
from eagle_train.target import FrozenTarget

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class Layer:
    """Weights of a decoder layer, with those of one input joined. head_norms: of each head's queries and keys."""

    qkv: Tensor
    qkv_bias: Tensor | None
    out: Any
    gate_up: Tensor
    gate_up_bias: Tensor | None
    down: Any
    norms: tuple[Tensor, Tensor]
    head_norms: tuple[Tensor, Tensor] | None


class Decoder:
    """The decoder layers of a target, which then shares its weights with it."""

    def __init__(self, target: FrozenTarget) -> None:
        config, self._model = target.config, target.model.model
        self.layers = [_joined(layer) for layer in self._model.layers]
        self.kv_heads, self.width = target.family.rows(config)[0]
        self.group = int(config.num_attention_heads) // self.kv_heads
        self._eps, self._device = float(config.rms_norm_eps), target.device

    @staticmethod
    def fits(target: FrozenTarget) -> bool:
        """Returns whether a target's layers are computed here."""
        family, config = target.family, target.config
        return family.as_llama and config.hidden_act == "silu" and not any(windows_of(family, config))

    def hidden(self, ids: Tensor, positions: Tensor, attend: Attend) -> Tensor:
        """Returns the hidden states [N, H] after the last norm of ids [N] at positions [N].

        attend: called with a layer's number and its queries [N, A, D], keys and values [N, K, D]; returns what the
        layer attends to, [N, A * D]."""
        stream: Tensor = self._model.embed_tokens(ids.to(self._device))
        cos, sin = (part[0][:, None] for part in self._model.rotary_emb(stream[None], positions[None].to(self._device)))
        split = [self.group * self.kv_heads * self.width] + [self.kv_heads * self.width] * 2
        for number, layer in enumerate(self.layers):
            normed = rms_norm(stream, (stream.shape[-1],), layer.norms[0], self._eps)
            parts = torch.split(linear(normed, layer.qkv, layer.qkv_bias), split, -1)
            queries, keys, values = (part.reshape(len(ids), -1, self.width) for part in parts)
            if layer.head_norms is not None:
                queries, keys = (
                    rms_norm(part, (self.width,), gain, self._eps)
                    for part, gain in zip((queries, keys), layer.head_norms, strict=True)
                )
            queries, keys = rotated(queries, cos, sin), rotated(keys, cos, sin)
            stream = stream + layer.out(attend(number, queries, keys, values))
            normed = rms_norm(stream, (stream.shape[-1],), layer.norms[1], self._eps)
            gate, up = linear(normed, layer.gate_up, layer.gate_up_bias).chunk(2, -1)
            stream = stream + layer.down(silu(gate) * up)
        return rms_norm(stream, (stream.shape[-1],), self._model.norm.weight, self._eps)


def _joined(layer: Any) -> Layer:
    """Joins the weights of a layer that have one input; the layer then holds views of them, so that none is stored
    twice."""
    attention, mlp = layer.self_attn, layer.mlp
    qkv = _join(attention.q_proj, attention.k_proj, attention.v_proj)
    norms = (layer.input_layernorm.weight, layer.post_attention_layernorm.weight)
    head_norms = (attention.q_norm.weight, attention.k_norm.weight) if hasattr(attention, "q_norm") else None
    return Layer(*qkv, attention.o_proj, *_join(mlp.gate_proj, mlp.up_proj), mlp.down_proj, norms, head_norms)


def _join(*parts: Any) -> tuple[Tensor, Tensor | None]:
    """Returns weight and bias, if there is one, of linear operators as one."""
    bias = None if parts[0].bias is None else _shared([part.bias for part in parts])
    return _shared([part.weight for part in parts]), bias


def _shared(tensors: Sequence[Tensor]) -> Tensor:
    """Returns the tensors one after another; each becomes a view of its part."""
    whole = torch.cat([tensor.data for tensor in tensors])
    for tensor, view in zip(tensors, torch.split(whole, [len(tensor) for tensor in tensors]), strict=True):
        tensor.data = view
    return whole
