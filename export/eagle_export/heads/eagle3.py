"""The EAGLE-3 head (arXiv 2503.01840): one layer fed by three taps of the target.

    taps [1,T,3H] -> fc -> features [1,T,Hd] --> hidden_norm --+
                                                               cat -> attention -> + -> norm, MLP, + -> hidden
    embedding(ids) ------------> input_layernorm --------------+                  |
                                            features (un-normed) -----------------+
    hidden -> norm -> own LM head -> logits over the draft vocabulary

`fc` is part of the target's graph: it reads taps of the target only. When the head drafts on from its own proposal, its
hidden state takes the place of the features.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.layers import Attention, Rows, mlp, rms_norm, rotary, wanted


class Eagle3Layer(nn.Module):
    """The head's only layer, called midlayer in checkpoints."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.mlp = mlp(config)
        self.input_layernorm = rms_norm(config)
        self.hidden_norm = rms_norm(config)
        self.post_attention_layernorm = rms_norm(config)

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor,
        past: Rows,
        rows: Tensor | None,
    ) -> tuple[Tensor, Rows]:
        paired = torch.cat([self.input_layernorm(embedded), self.hidden_norm(hidden)], -1)
        attended, new = self.self_attn(paired, rope, mask, past, rows)
        x = wanted(hidden, rows) + attended
        return x + self.mlp(self.post_attention_layernorm(x)), new


class Eagle3Head(nn.Module):
    """The head; embed_tokens holds the target's weight unless the widths differ. Its logits are over draft ids."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(len(config.taps) * config.target_hidden_size, config.hidden_size, bias=config.fc_bias)
        self.midlayer = Eagle3Layer(config)
        self.norm = rms_norm(config)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
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
        """input_ids [1,T], features [1,T,Hd] (fc of the taps, or own hidden), mask [1,1,T,P+T]. Returns hidden
        [1,R,Hd] of the wanted rows (None: all), and the new rows."""
        rope = self.rotary_emb(features, position_ids)
        hidden, new = self.midlayer(self.embed_tokens(input_ids), features, rope, mask, past[0], wanted_rows)
        return hidden, [new]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., Vd] of hidden [..., Hd]."""
        out: Tensor = self.lm_head(self.norm(hidden))
        return out
