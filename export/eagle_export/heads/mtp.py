"""A multi-token-prediction layer (MTP, as in arXiv 2412.19437) that drafts recurrently, like an EAGLE-1 head.

    embedding(ids) -> embed_norm --+
                                   cat -> fc -> decoder layer -> norm -> hidden [1,T,H] -> target's LM head -> logits
    features [1,T,H] -> hidden_norm +

The row of position i pairs the target's feature at i (after the last norm) with the token at i + 1. Its hidden state
takes the place of the feature in the next step. MiMo joins them in the other order.
"""

from __future__ import annotations

import torch
from torch import Tensor

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_export.heads.layers import rms_norm


class PredictionHead(Eagle1Head):
    """The layer; embed_tokens and lm_head hold the target's weights."""

    normed_input = True

    def __init__(self, config: HeadConfig) -> None:
        super().__init__(config)
        self.embed_norm, self.hidden_norm, self.norm = (rms_norm(config) for _ in range(3))
        self.hidden_first, self.masks_first = config.hidden_first, config.masks_first

    def joined(self, input_ids: Tensor, features: Tensor, position_ids: Tensor) -> Tensor:
        """As in Eagle1Head."""
        embedded = self.embed_tokens(input_ids)
        if self.masks_first:
            embedded = embedded.masked_fill(position_ids[..., None] == 0, 0)
        inputs = [self.embed_norm(embedded), self.hidden_norm(features)]
        return torch.cat(inputs[::-1] if self.hidden_first else inputs, -1)

    def finished(self, x: Tensor) -> Tensor:
        """As in Eagle1Head."""
        normed: Tensor = self.norm(x)
        return normed
