"""A head that computes proposals for some rows gives those that it gives for all rows, and caches every row."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import HEADS
from eagle_export.heads.config import HeadConfig
from eagle_runtime.base.tree import additive_mask
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.ort.session import OrtSession
from fakes import rows_of
from tiny_heads import build_head

WIDTH, ROWS, PAST = 16, 7, 3


@pytest.mark.parametrize(("kind", "layers"), [("eagle1", 1), ("eagle1", 2), ("eagle3", 1)])
def test_wanted_rows_equal_those_of_all_rows(kind: Any, layers: int) -> None:
    torch.manual_seed(1)
    config = HeadConfig(
        kind=kind,
        hidden_size=WIDTH,
        intermediate_size=24,
        num_layers=layers,
        num_heads=4,
        num_kv_heads=2,
        head_dim=8,
        vocab_size=40,
        draft_vocab_size=40,
        rms_norm_eps=1e-6,
        rope={"rope_theta": 1e4},
        fc_bias=False,
        qkv_bias=False,
        taps=(1, 2, 3) if kind == "eagle3" else (),
        target_hidden_size=WIDTH,
    )
    head = build_head(config).eval()
    past = [(torch.randn(1, PAST, 2, 8), torch.randn(1, PAST, 2, 8)) for _ in range(layers)]
    ids, positions = torch.randint(0, 40, (1, ROWS)), torch.arange(PAST, PAST + ROWS)[None]
    mask = torch.cat([torch.zeros(ROWS, PAST), torch.full((ROWS, ROWS), -1e9).triu(1)], 1)[None, None]
    rows = torch.tensor([5, 0, 6])
    with torch.no_grad():
        every, new = head(ids, torch.ones(1, ROWS, WIDTH), positions, mask, past)
        some, again = head(ids, torch.ones(1, ROWS, WIDTH), positions, mask, past, rows)
    torch.testing.assert_close(some, every[:, rows])
    torch.testing.assert_close(again, new)


@pytest.mark.parametrize("kind", sorted(HEADS))
def test_the_graph_returns_proposals_for_the_wanted_rows(kind: str, bundle_of: Callable[..., Path]) -> None:
    bundle = bundle_of(kind)
    head = read_manifest(bundle).head
    assert head is not None
    feeds: dict[str, Any] = {
        "input_ids": np.arange(4, 4 + ROWS),
        "features": np.random.default_rng(0).standard_normal((ROWS, head.hidden_size)).astype(np.float32),
        "position_ids": np.arange(ROWS),
        "tree_mask": additive_mask(np.tri(ROWS, dtype=np.bool_), np.float32),
    }
    with OrtSession(bundle / head.graph.file, head.graph, 1) as session:
        caches = [session.new_cache(ROWS), session.new_cache(ROWS)]
        rows = np.array([ROWS - 1, 2])
        every = {
            name: value.copy()
            for name, value in session.run({**feeds, "logit_rows": np.arange(ROWS)}, caches[0]).items()
        }
        some = session.run({**feeds, "logit_rows": rows}, caches[1])
    assert every["token_ids"].shape == (ROWS, head.top_k) and some["hidden"].shape == (2, head.hidden_size)
    np.testing.assert_array_equal(some["token_ids"], every["token_ids"][rows])
    pairs: list[tuple[Any, Any]] = [(some[name], every[name][rows]) for name in ("log_probs", "hidden")]
    for one, other in [*pairs, (rows_of(caches[1]), rows_of(caches[0]))]:
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4)
