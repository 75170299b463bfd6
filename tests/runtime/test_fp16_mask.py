"""Masks in fp16 hide with a value that bears being added twice: a tree's logits are those of the lowest value."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import torch

from eagle_export.graphs.graphs import windowed
from eagle_runtime.base.tree import EAGLE1_CHOICES, additive_mask, ancestor_mask, choice_parents, hiding, node_depths
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.ort.session import OrtSession


def test_a_tree_has_the_logits_of_a_mask_with_the_lowest_value(bundle_of: Callable[..., Path]) -> None:
    """To the bit, after a past of five rows."""
    bundle = bundle_of("eagle1", "fp16")
    target = read_manifest(bundle).target
    parents = choice_parents(EAGLE1_CHOICES)
    nodes, past = len(parents), 5
    rng = np.random.default_rng(0)
    prompt, tokens = rng.integers(0, target.vocab_size, past), rng.integers(0, target.vocab_size, nodes)
    mask = additive_mask(ancestor_mask(parents), np.float16)
    assert mask.min() == hiding(np.float16) == -3e4
    lowest = np.where(mask < 0, np.finfo(np.float16).min, mask)
    logits = []
    with OrtSession(bundle / target.graph.file, target.graph, 1) as session:
        for each in (mask, lowest, np.zeros_like(mask)):
            cache = session.new_cache(past + nodes)
            causal = additive_mask(np.tri(past, dtype=np.bool_), np.float16)
            session.run(_feeds(prompt, np.arange(past), causal), cache)
            cache.advance(past)
            logits.append(session.run(_feeds(tokens, past + node_depths(parents), each), cache)["logits"].copy())
    np.testing.assert_array_equal(logits[0], logits[1])
    assert not np.array_equal(logits[0], logits[2]), "control: the mask counts"


def test_a_window_hides_with_the_same_value() -> None:
    mask = windowed(torch.zeros(1, 1, 3, 5, dtype=torch.float16), torch.arange(2, 5)[None], 2)
    assert set(mask.flatten().tolist()) == {0.0, hiding(np.float16)}
    assert torch.isfinite(mask + mask).all()


def _feeds(tokens: np.ndarray, positions: np.ndarray, mask: np.ndarray) -> dict[str, np.ndarray]:
    return {"input_ids": tokens, "position_ids": positions, "tree_mask": mask, "logit_rows": np.arange(len(tokens))}
