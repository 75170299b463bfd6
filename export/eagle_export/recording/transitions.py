"""The file of a block head's transitions, from which the runtime computes those of the tokens that it meets
(eagle_runtime.drafting.transitions)."""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors.torch import save_file

from eagle_export.graphs.pair import HeadPart

SUCCESSORS = 32  # kept per token: candidates that a position's own likeliest tokens may lack
TOKENS_AT_A_TIME = 1024  # tokens whose transitions are computed at a time


def write_transitions(path: Path, part: HeadPart) -> None:
    """Write before [V,r] and after [Vd,r], whose products are added to the logits of the next token; successors [V,S]
    int32, the draft ids with the highest of them, best first, and `added` [V,S] fp16, these; target_ids [Vd] int64, the
    target's ids of draft ids.

    part: a block head with transitions."""
    tensors = part.checkpoint.tensors
    before, after = (tensors[f"markov_head.markov_w{number}.weight"].read().half() for number in (1, 2))
    count = min(SUCCESSORS, len(after))
    wide = after.float().T
    best = [(rows.float() @ wide).topk(count) for rows in torch.split(before, TOKENS_AT_A_TIME)]
    ids = torch.arange(len(after))
    stored = {
        "before": before,
        "after": after,
        "successors": torch.cat([each.indices for each in best]).to(torch.int32),
        "added": torch.cat([each.values for each in best]).half(),
        "target_ids": ids if part.d2t is None else ids + part.d2t,
    }
    path.parent.mkdir(exist_ok=True)
    save_file(stored, path)
    path.chmod(0o644)  # safetensors makes files that only their owner can read
