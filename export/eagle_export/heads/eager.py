"""Runs a head of a pair in torch over a text, on its target's own hidden states.

Shapes: T tokens of a text, H/Hd width of target/head.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from eagle_export.graphs import build_head
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_export.heads.eagle3 import Eagle3Head
from eagle_export.heads.layers import rotary
from eagle_export.pair import HeadPart


def eager_head(config: HeadConfig, weights: dict[str, Tensor]) -> Eagle1Head | Eagle3Head:
    """Returns a head with the weights of `eager_weights`, which may be read as another config says."""
    with torch.device("meta"):
        head = build_head(config)
    head.load_state_dict(weights, assign=True)
    head.rotary_emb = rotary(config)  # its tables are in no file
    return head.eval()


def eager_weights(part: HeadPart, model: Any) -> dict[str, Tensor]:
    """The head's parameters in fp32. model: its target in transformers, whose own weights are what the head borrows and
    are not copied."""
    with torch.device("meta"):
        names = list(build_head(part.config).state_dict())
    stored = part.checkpoint.tensors
    weights = {name: stored[name].read().float() for name in names if name in stored}
    if not part.own_embedding:
        weights["embed_tokens.weight"] = model.get_input_embeddings().weight
    if part.config.borrows:
        weights["lm_head.weight"] = model.get_output_embeddings().weight
    return weights


def features_of(head: Eagle1Head | Eagle3Head, taps: Sequence[int], hidden: Sequence[Tensor]) -> Tensor:
    """Returns features [1, T, Hd] for the head. hidden: the target's hidden states [1, T, H], the embedding first and
    the last one after the last norm."""
    return head.features([hidden[tap] for tap in taps]) if isinstance(head, Eagle3Head) else hidden[-1]


def read_rows(head: Eagle1Head | Eagle3Head, config: HeadConfig, tokens: Tensor, features: Tensor) -> Tensor:
    """Returns the head's hidden states [1, T, Hd]. tokens [T]: each is the one after its feature; features [1, T, Hd]:
    each row sees the rows before it, and no other past."""
    rows = len(tokens)
    empty = torch.zeros(1, 0, config.num_kv_heads, config.head_dim)
    mask = torch.full((1, 1, rows, rows), torch.finfo(torch.float32).min).triu(1)
    past = [(empty, empty)] * config.num_layers
    hidden: Tensor = head(tokens[None], features, torch.arange(rows)[None], mask, past)[0]
    return hidden
