"""The EAGLE-3 head (arXiv 2503.01840): one layer fed by three taps of the target.

    taps [1,T,3H] -> fc -> features [1,T,Hd] --> hidden_norm --+
                                                               cat -> attention -> + -> norm, MLP, + -> hidden
    embedding(ids) ------------> input_layernorm --------------+                  |
                                            features (un-normed) -----------------+
    hidden -> norm -> own LM head -> logits over the draft vocabulary

`fc` is part of the target's graph: it reads taps of the target only. When the head drafts on from its own proposal, its
hidden state takes the place of the features.

Variants: norms of the taps before `fc` (fc_norm, input_norm); a residual that is the normalised features; queries and
keys normalised per head; a last norm whose output is also the hidden state, or no last norm.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn
from transformers.models.llama.modeling_llama import LlamaMLP

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.layers import Attention, Rows, norm_of, rms_norm, rotary, wanted


class Eagle3Layer(nn.Module):
    """The head's only layer, called midlayer in checkpoints."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.self_attn = Attention(config, 2 * config.hidden_size)
        self.mlp = LlamaMLP(config.llama())
        self.input_layernorm = rms_norm(config)
        self.hidden_norm = rms_norm(config)
        self.post_attention_layernorm = rms_norm(config)
        self.normed_residual = config.normed_residual

    def forward(
        self,
        embedded: Tensor,
        hidden: Tensor,
        rope: tuple[Tensor, Tensor],
        mask: Tensor,
        past: Rows,
        rows: Tensor | None,
    ) -> tuple[Tensor, Rows]:
        normed = self.hidden_norm(hidden)
        paired = torch.cat([self.input_layernorm(embedded), normed], -1)
        attended, new = self.self_attn(paired, rope, mask, past, rows)
        x = wanted(normed if self.normed_residual else hidden, rows) + attended
        return x + self.mlp(self.post_attention_layernorm(x)), new


class TapReader(nn.Module):
    """What turns the target's taps into the head's features."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width, eps = config.target_hidden_size, config.rms_norm_eps
        self.fc = nn.Linear(len(config.taps) * width, config.hidden_size, bias=config.fc_bias)
        self.tap_norm = config.tap_norm
        if config.tap_norm == "each":
            self.fc_norm = nn.ModuleList(norm_of(width, eps) for _ in config.taps)
        if config.tap_norm == "all":
            self.input_norm = norm_of(len(config.taps) * width, eps)

    def fused(self, taps: Sequence[Tensor]) -> Tensor:
        """taps: the target's hidden states [1,T,H], in order. Returns what fc reads [1,T,taps * H]."""
        if self.tap_norm == "each":
            taps = [norm(tap) for norm, tap in zip(self.fc_norm, taps, strict=True)]
        joined = torch.cat(list(taps), -1)
        return self.input_norm(joined) if self.tap_norm == "all" else joined

    def features(self, taps: Sequence[Tensor]) -> Tensor:
        """taps as for fused. Returns features [1,T,Hd]."""
        out: Tensor = self.fc(self.fused(taps))
        return out


class Eagle3Head(TapReader):
    """The head; embed_tokens holds the target's weight unless the widths differ. Its logits are over draft ids."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.midlayer = Eagle3Layer(config)
        if config.output_norm != "none":
            self.norm = rms_norm(config)
        self.lm_head = nn.Linear(config.hidden_size, config.draft_vocab_size, bias=False)
        self.rotary_emb = rotary(config)
        self.output_norm = config.output_norm

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
        return self.norm(hidden) if self.output_norm == "recurrent" else hidden, [new]

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., Vd] of hidden [..., Hd]."""
        out: Tensor = self.lm_head(self.norm(hidden) if self.output_norm == "logits" else hidden)
        return out
