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
from eagle_export.heads.layers import DecoderLayer, Rows, rms_norm, rotary


class Eagle1Head(nn.Module):
    """The head; embed_tokens and lm_head hold the target's weights."""

    normed_input = False  # whether the first layer has a norm before its attention

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=config.fc_bias)
        normed = [self.normed_input] + [True] * (config.num_layers - 1)
        self.layers = nn.ModuleList(DecoderLayer(config, each) for each in normed)
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
        x = self.fc(self.joined(input_ids, features, position_ids))
        rope = self.rotary_emb(x, position_ids)
        new = []
        for number, (layer, rows) in enumerate(zip(self.layers, past, strict=True), 1):
            x, added = layer(x, rope, mask, rows, wanted_rows if number == len(past) else None)
            new.append(added)
        return self.finished(x), new

    def joined(self, input_ids: Tensor, features: Tensor, position_ids: Tensor) -> Tensor:
        """Returns what fc reads [1,T,2H]."""
        return torch.cat([self.embed_tokens(input_ids), features], -1)

    def finished(self, x: Tensor) -> Tensor:
        """x: the last layer's output [1,R,H]. Returns the hidden state."""
        return x

    def lm_head_input(self, hidden: Tensor) -> Tensor:
        """Returns what the LM head reads [..., H] of hidden [..., H]."""
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """Returns logits [..., V] of hidden [..., H]."""
        out: Tensor = self.lm_head(self.lm_head_input(hidden))
        return out


class PredictionHead(Eagle1Head):
    """A multi-token-prediction layer (MTP, as in arXiv 2412.19437), which drafts recurrently, like an EAGLE-1 head.

        embedding(ids) -> embed_norm ---+
                                        cat -> fc -> decoder layer -> norm -> hidden [1,T,H] -> target's LM head
        features [1,T,H] -> hidden_norm +

    The row of position i pairs the target's feature at i (after the last norm) with the token at i + 1. Its hidden
    state takes the place of the feature in the next step. MiMo joins them in the other order. embed_tokens and lm_head
    hold the target's weights."""

    normed_input = True

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.embed_norm, self.hidden_norm, self.norm = (rms_norm(config) for _ in range(3))
        self.hidden_first, self.masks_first = config.hidden_first, config.masks_first

    def joined(self, input_ids: Tensor, features: Tensor, position_ids: Tensor) -> Tensor:
        embedded = self.embed_tokens(input_ids)
        if self.masks_first:
            embedded = embedded.masked_fill(position_ids[..., None] == 0, 0)
        inputs = [self.embed_norm(embedded), self.hidden_norm(features)]
        return torch.cat(inputs[::-1] if self.hidden_first else inputs, -1)

    def finished(self, x: Tensor) -> Tensor:
        normed: Tensor = self.norm(x)
        return normed
