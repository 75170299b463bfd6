"""What a bundle drafts with a multi-token-prediction layer, against a module of the layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from eagle_runtime import EagleModel
from eagle_runtime.drafting.head import Scratch
from fakes import observed
from insides import bundle_in

PROMPT = [5, 17, 3, 60, 41, 2, 33, 8, 19, 4, 55]


@torch.no_grad()
def assert_drafts(bundle: Path, source: Any, module: nn.Module) -> None:
    """The first drafted token, one after a continuation, and two levels of a tree, each a forward pass of its own."""
    embed, lm_head = source.get_input_embeddings(), source.lm_head

    def hidden_of(tokens: list[int], previous: Tensor) -> Tensor:
        out: Tensor = module(embed(torch.tensor([tokens])), previous)
        return out

    def features_of(tokens: list[int]) -> Tensor:
        features: Tensor = source.model(input_ids=torch.tensor([tokens])).last_hidden_state
        return features

    def assert_row(proposal: Any, row: int, hidden: Tensor) -> None:
        np.testing.assert_allclose(proposal.hidden[row], hidden, atol=1e-4)
        best = lm_head(hidden).log_softmax(-1).topk(10)
        np.testing.assert_allclose(proposal.log_probs[row], best.values, atol=1e-4)
        assert proposal.tokens[row].tolist() == best.indices.tolist()

    with EagleModel.load(bundle, threads=1) as model:
        logits, rows = bundle_in(model).target.prefill(PROMPT)
        np.testing.assert_allclose(logits, source(torch.tensor([PROMPT])).logits[0, -1], atol=1e-4)
        np.testing.assert_allclose(rows, features_of(PROMPT)[0], atol=1e-4)
        first, later = PROMPT[1:6], [*PROMPT[6:], 9]
        features = features_of(PROMPT)
        assert_row(observed(model.head, first, rows[:5]), 0, hidden_of(first, features[:, :5])[0, -1])
        proposal = observed(model.head, later, rows[5:])
        text = first + later
        hidden = hidden_of(text, features)
        assert_row(proposal, 0, hidden[0, -1])
        with Scratch(model.head) as scratch:
            level = scratch.feed(np.array([11, 12]), np.repeat(proposal.hidden, 2, 0), np.array([-1, -1]))
            second = scratch.feed(np.array([13]), level.hidden[1:], np.array([1]))
        for row, token in enumerate((11, 12)):
            own = torch.cat([features, hidden[:, -1:]], 1)
            child = hidden_of([*text, token], own)
            assert_row(level, row, child[0, -1])
        own = torch.cat([own, child[:, -1:]], 1)
        assert_row(second, 0, hidden_of([*text, 12, 13], own)[0, -1])
