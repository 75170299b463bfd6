"""The draft graph of a Gemma-4 assistant: its cache holds the keys and values of verified rows that the target made.

Shapes: T new rows, P rows in the cache, L masked columns, R rows that draft, k tokens per row, H width of the target, S
numbers of keys and values in a feature.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from eagle_export.graphs.graphs import ATTENTION, ProposingGraph, full_mask
from eagle_export.heads.assistant import AssistantHead
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.layers import Rows
from eagle_runtime.base.tree import hiding


class AssistantGraph(ProposingGraph):
    """An assistant that returns the top k tokens of the rows in logit_rows. Of all other rows it passes the keys on."""

    head: AssistantHead
    group_of: Tensor | None  # [V], of each token

    def __init__(self, config: HeadConfig, top_k: int) -> None:
        super().__init__(AssistantHead(config, ATTENTION), top_k, None)
        assert config.assistant is not None
        self.window = config.assistant.window
        self.register_buffer("group_of", None)

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor,
        tree_mask: Tensor,
        logit_rows: Tensor,
        past: list[Rows],
    ) -> tuple[Tensor, Tensor, Tensor, list[Rows]]:
        """input_ids, position_ids [1,T]; features [1,T,H + S]; tree_mask [1,1,T,L] over the last L of the P + T
        columns, of which a row sees the first few, or none. Returns log_probs [1,R,k] fp32, token_ids [1,R,k], hidden
        [1,R,H + S], of which S are zeros, and the T new rows of each type."""
        hidden, new = self.head.split(features)
        rows = [
            (torch.cat([k, more_k], 1), torch.cat([v, more_v], 1))
            for (k, v), (more_k, more_v) in zip(past, new, strict=True)
        ]
        wanted = tree_mask.index_select(2, logit_rows)
        full = full_mask(tree_mask, past).index_select(2, logit_rows)
        before = full.shape[3] - wanted.shape[3]
        newest = before - 1 + (wanted == 0).sum(-1, keepdim=True)  # the column of the last key that a row sees
        # The keys `window` before that one are the last ones of a sliding layer, as transformers masks them.
        outside = torch.arange(full.shape[3]) < newest - self.window
        sliding = full.masked_fill(outside, hiding(np.float16 if full.dtype == torch.float16 else np.float32))
        states = self.head(
            self.head.embed_tokens(input_ids).index_select(1, logit_rows),
            hidden.index_select(1, logit_rows),
            position_ids.index_select(1, logit_rows),
            {"full_attention": full, "sliding_attention": sliding},
            rows,
        )
        log_probs, token_ids = self.best(self.scores_of(self.head.logits(states, self.group_of)).log_softmax(-1))
        return log_probs, token_ids, self.head.fed_back(states), new
