"""The EAGLE-1 head (arXiv 2401.15077), which EAGLE-2 uses unchanged.

    features [1,T,H] --+
                       cat -> fc -> layer 0 (no input norm) -> ... -> hidden [1,T,H] -> target's LM head -> logits
    embedding(ids) ----+

The row of position i pairs the target's feature at i (after the last norm) with the token at i + 1. Its hidden state
approximates the feature at i + 1 and is used as such in the next step, so the LM head reads it without another norm.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.layers import Attention, Rows, mlp, rms_norm, rotary, wanted


class Eagle1Layer(nn.Module):
    """A Llama decoder layer. The first layer of a head has no norm before its attention."""

    def __init__(self, config: HeadConfig, index: int) -> None:
        super().__init__()
        self.self_attn = Attention(config, config.hidden_size)
        self.mlp = mlp(config)
        if index > 0:
            self.input_layernorm = rms_norm(config)
        self.post_attention_layernorm = rms_norm(config)
        self.index = index

    def forward(
        self, x: Tensor, rope: tuple[Tensor, Tensor], mask: Tensor, past: Rows, rows: Tensor | None
    ) -> tuple[Tensor, Rows]:
        normed = self.input_layernorm(x) if self.index > 0 else x
        attended, new = self.self_attn(normed, rope, mask, past, rows)
        x = wanted(x, rows) + attended
        return x + self.mlp(self.post_attention_layernorm(x)), new


class Eagle1Head(nn.Module):
    """The head; embed_tokens and lm_head hold the target's weights."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        self.layers = nn.ModuleList(Eagle1Layer(config, index) for index in range(config.num_layers))
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.rotary_emb = rotary(config)

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor,
        mask: Tensor,
        past: list[Rows],
        wanted_rows: Tensor | None = None,
    ) -> tuple[Tensor, list[Rows]]:
        """input_ids [1,T], features [1,T,H], mask [1,1,T,P+T]. Returns hidden [1,R,H] of the wanted rows (None: all),
        and each layer's new rows."""
        x = self.fc(torch.cat([self.embed_tokens(input_ids), features], -1))
        rope = self.rotary_emb(x, position_ids)
        new = []
        for number, (layer, rows) in enumerate(zip(self.layers, past, strict=True), 1):
            x, added = layer(x, rope, mask, rows, wanted_rows if number == len(past) else None)
            new.append(added)
        return x, new

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., V] of hidden [..., H]."""
        out: Tensor = self.lm_head(hidden)
        return out
