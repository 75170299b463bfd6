"""Runs a head of a pair in torch over a text, on its target's own hidden states.

Shapes: T tokens of a text, H/Hd width of target/head.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from eagle_export.graphs.head_modules import AnyHead, build_any_head
from eagle_export.graphs.pair import HeadPart
from eagle_export.heads.ahead import HeadsAhead
from eagle_export.heads.block import BlockHead, read_blocks
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_export.heads.eagle3 import Eagle3Head
from eagle_export.heads.layers import rotary
from eagle_export.reading.checkpoint import EMBEDDING, LM_HEAD, Checkpoint
from eagle_runtime.base.tree import hiding

TABLE = "embed_tokens.weight"  # of a head
Hidden = Sequence[Tensor] | Mapping[int, Tensor]  # the target's hidden states by tap; -1: the last


class TokenRows(torch.nn.Module):
    """The rows of an embedding for a few tokens. ids [n]: in rising order; rows [n, H]."""

    def __init__(self, ids: Tensor, rows: Tensor) -> None:
        super().__init__()
        self.ids, self.rows = ids, rows

    def forward(self, tokens: Tensor) -> Tensor:
        """tokens [...], all among the ids. Returns [..., H]."""
        return self.rows[torch.searchsorted(self.ids, tokens.contiguous())]


def eager_head(config: HeadConfig, weights: Mapping[str, Tensor], embedding: TokenRows | None = None) -> AnyHead:
    """Returns a head with `eager_weights`, which may be read as another config says. embedding: in place of theirs."""
    with torch.device("meta"):
        head = build_any_head(config)
    if embedding is not None and config.embeds:
        head.set_submodule("embed_tokens", embedding)
        weights = {name: weight for name, weight in weights.items() if name != TABLE}
    head.load_state_dict(weights, assign=True, strict=embedding is None)
    if not isinstance(head, HeadsAhead):
        head.rotary_emb = rotary(config)  # its tables are in no file
    return head.eval()


def eager_weights(part: HeadPart, model: Any) -> dict[str, Tensor]:
    """The head's parameters in fp32. model: its target in transformers, whose weights are borrowed, and not copied."""
    weights = _stored_weights(part, without="" if part.own_embedding else TABLE)
    if not part.own_embedding and part.config.embeds:
        weights[TABLE] = model.get_input_embeddings().weight
    if part.config.borrows_lm_head:
        weights[LM_HEAD] = model.get_output_embeddings().weight
    return weights


def weights_for_tokens(
    part: HeadPart, target: Checkpoint, tokens: Sequence[int], *, lm_head: bool
) -> tuple[dict[str, Tensor], TokenRows]:
    """As eager_weights, read from the target's checkpoint, with an embedding for these tokens alone. lm_head: whether
    an LM head that the head borrows is read; else it gets rows of the embedding, whose outputs mean nothing."""
    weights = _stored_weights(part, without=TABLE)
    ids = sorted(set(tokens))
    table = part.checkpoint.tensors[TABLE] if part.own_embedding else target.tensors[EMBEDDING]
    rows = table.read()[ids].float()
    if part.config.borrows_lm_head:
        borrowed = target.lm_head
        weights[LM_HEAD] = borrowed.read().float() if lm_head else rows[:1].expand(borrowed.shape)
    return weights, TokenRows(torch.tensor(ids), rows)


def _stored_weights(part: HeadPart, without: str) -> dict[str, Tensor]:
    """The head's own parameters in fp32, without one of them."""
    with torch.device("meta"):
        names = build_any_head(part.config).state_dict()
    stored = part.checkpoint.tensors
    return {name: stored[name].read().float() for name in names if name in stored and name != without}


def features_of(head: AnyHead, taps: Sequence[int], hidden: Hidden) -> Tensor:
    """Returns features [B, T, Hd]. hidden: the target's states [B, T, H], embedding first, the last after its norm."""
    return head.features([hidden[tap] for tap in taps]) if isinstance(head, Eagle3Head) else hidden[-1]


def read_rows(head: Eagle1Head | Eagle3Head, config: HeadConfig, tokens: Tensor, features: Tensor) -> Tensor:
    """Returns the head's hidden states [B, T, Hd] of B texts. tokens [B, T]: each is the one after its feature;
    features [B, T, Hd]: each row sees the rows of its text before it, and no other past."""
    texts, rows = tokens.shape
    empty = torch.zeros(texts, 0, config.num_kv_heads, config.head_dim)
    mask = torch.full((1, 1, rows, rows), hiding(np.float32)).triu(1)
    past = [(empty, empty)] * config.num_layers
    hidden: Tensor = head(tokens, features, torch.arange(rows)[None], mask, past)[0]
    return hidden


def read_block_rows(
    head: BlockHead,
    config: HeadConfig,
    tokens: Tensor,
    hidden: Hidden,
    roots: Tensor,
    scaled: Callable[[Tensor], Tensor] | None = None,
) -> Tensor:
    """Returns the logits [A, D, Vd] of the D drafted positions of blocks after the tokens at `roots` [A], with the
    transitions of the tokens that do follow.

    tokens [T]; hidden: the target's hidden states [1, R, H] of the first R rows, all before the last root. Positions
    after the text's end are drafted given its last token. scaled: what the target makes of the output of its LM head,
    if the head borrows that."""
    assert config.block is not None
    taps = [hidden[tap] for tap in config.taps]
    rows = read_blocks(head, config, tokens[None], taps, hidden[-1], roots[None])[0]
    first = 0 if config.block.anchor else 1
    logits: Tensor = head.logits(rows[:, first:])
    logits = logits if scaled is None else scaled(logits)
    if head.markov_head is not None:
        before = roots[:, None] + torch.arange(logits.shape[1])
        logits = logits + head.markov_head(tokens[before.clamp(max=len(tokens) - 1)])
    return logits
