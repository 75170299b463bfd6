"""Text that a model of transformers writes itself, and checks of heads on it."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import torch

from eagle_export.checking.head_check import HeadCheck, compare_readings
from eagle_export.graphs.eager import eager_weights
from eagle_export.graphs.pair import HeadPart
from eagle_export.reading.families.registry import FAMILIES
from eagle_export.recording.source_text import Greedy, Writer, Written


def own_text(model: Any, starts: Sequence[list[int]], count: int, eos: Collection[int]) -> list[Written]:
    """Continue all starts greedily by at most `count` tokens, up to the first eos, included."""
    _, written = Writer(model).write([], 0, (), [Greedy(start, count, eos) for start in starts], ())
    return written


@torch.inference_mode()
def check_head(part: HeadPart, model: Any, texts: Sequence[Written]) -> HeadCheck:
    """What a head drafts of texts that its target, as transformers runs it in fp32, reads as a whole."""

    def read(text: Written) -> Written:
        ids = torch.tensor([[*text.start, *text.tokens]])
        states = model(input_ids=ids, output_hidden_states=True, use_cache=False, logits_to_keep=1).hidden_states
        return replace(text, hidden={**dict(enumerate(states)), -1: states[-1]})

    family = FAMILIES[model.config.model_type]
    return compare_readings(part, family, model.config, eager_weights(part, model), map(read, texts))
