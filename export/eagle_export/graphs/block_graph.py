"""The draft graph of a block head: reads the features of verified rows, and drafts all positions of a block at once.

Shapes: B rows of the block, T verified rows that are new to the head's cache, P rows in it, R drafted positions in
order, k tokens per position, L masked columns, Vd draft vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_export.graphs.graphs import ProposingGraph, full_mask
from eagle_export.heads.block import BlockHead, split_features
from eagle_export.heads.config import HeadConfig
from eagle_export.heads.layers import Rows
from eagle_export.reading.checkpoint import Checkpoint

SUCCESSORS = 32  # kept per token: candidates that a position's own likeliest tokens may lack
TOKENS_AT_A_TIME = 1024  # tokens whose transitions are computed at a time


class BlockGraph(ProposingGraph):
    """A block head that returns the top k tokens of the rows in logit_rows. With transitions, those of the first
    position are given the root, and `scores` lets the runtime add the others: which token comes before is known only
    there."""

    head: BlockHead

    def __init__(
        self, head: BlockHead, config: HeadConfig, top_k: int, logits: Callable[[Tensor], Tensor] | None
    ) -> None:
        super().__init__(head, top_k, logits)
        self.config = config

    def forward(
        self,
        input_ids: Tensor,
        features: Tensor,
        position_ids: Tensor,
        tree_mask: Tensor,
        logit_rows: Tensor,
        past: list[Rows],
    ) -> tuple[Tensor, ...]:
        """input_ids, position_ids [1,B]: of the block; features [1,T,2 L Hkv D + S], the last with the state before the
        root; tree_mask [1,1,B,L] over the last L of the P + T + B columns. Returns log_probs [1,R,k] fp32, token_ids
        [1,R,k] (target ids), with transitions scores [1,R,Vd] fp32 (log-probabilities before transitions, but for the
        first position), and per layer the T new rows."""
        new, states = split_features(features, self.config)
        state = None if states is None else states[:, -1:]
        context = [(torch.cat([k, nk], 1), torch.cat([v, nv], 1)) for (k, v), (nk, nv) in zip(past, new, strict=True)]
        hidden = self.head(input_ids, position_ids, full_mask(tree_mask, context), context, state).index_select(
            1, logit_rows
        )
        scores = self.scores_of(self.head.logits(hidden))
        markov = self.head.markov_head
        if markov is not None:  # the first position follows the root
            root = markov.markov_w1(input_ids[:, :1]).transpose(1, 2)
            added = (markov.markov_w2.weight @ root).transpose(1, 2).float()  # so that no weight is transposed
            first_alone = (torch.arange(logit_rows.shape[0]) == 0).float()[None, :, None]
            scores = scores + added * first_alone
        scores = scores.log_softmax(-1)
        log_probs, token_ids = self.best(scores)
        if markov is None:
            return log_probs, token_ids, new  # type: ignore[return-value]
        return log_probs, token_ids, scores, new  # type: ignore[return-value]


def write_transitions(path: Path, head: Checkpoint, d2t: Tensor | None) -> None:
    """Writes the file of which the runtime computes the transitions of the tokens that it meets
    (eagle_runtime.drafting.transitions): before [V,r] and after [Vd,r], whose products are added to the logits of the
    next token; successors [V,S] int32, the draft ids with the highest of them, best first, and `added` [V,S] fp16,
    these; target_ids [Vd] int64, the target's ids of draft ids.

    head: a block head with transitions. d2t [Vd]: offsets from draft to target ids; None if the ids are the same."""
    before, after = (head.tensors[f"markov_head.markov_w{number}.weight"].read().half() for number in (1, 2))
    count = min(SUCCESSORS, len(after))
    wide = after.float().T
    best = [(rows.float() @ wide).topk(count) for rows in torch.split(before, TOKENS_AT_A_TIME)]
    ids = torch.arange(len(after))
    stored = {
        "before": before,
        "after": after,
        "successors": torch.cat([each.indices for each in best]).to(torch.int32),
        "added": torch.cat([each.values for each in best]).half(),
        "target_ids": ids if d2t is None else ids + d2t,
    }
    path.parent.mkdir(exist_ok=True)
    save_file(stored, path)
    path.chmod(0o644)  # safetensors makes files that only their owner can read
