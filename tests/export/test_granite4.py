"""Granite 4 without experts and state spaces, as Granite-4.0-micro is, and how published configs name layers' kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GraniteMoeHybridConfig, GraniteMoeHybridForCausalLM

from eagle_export.base.errors import ExportError
from eagle_export.graphs.pair import open_pair
from eagle_export.inspection.report import inspect
from eagle_export.reading.families.source import load_source
from export_workplace import configure
from tiny_families import CONTEXT, HIDDEN, LAYERS, MULTIPLIERS, VOCAB

IDS = torch.tensor([[5, 7, 20, 33, 7, 5, 9, 41]])


@pytest.fixture
def source(tmp_path: Path) -> tuple[Any, Path]:
    """The random model, and its folder."""
    torch.manual_seed(7)
    config = GraniteMoeHybridConfig(
        vocab_size=VOCAB, hidden_size=HIDDEN, intermediate_size=99, shared_intermediate_size=48,
        num_hidden_layers=LAYERS, num_attention_heads=4, num_key_value_heads=2, max_position_embeddings=CONTEXT,
        initializer_range=0.15, layer_types=["full_attention"] * LAYERS, num_local_experts=0, num_experts_per_tok=0,
        position_embedding_type="rope", mamba_n_heads=4, mamba_d_head=16, tie_word_embeddings=True, **MULTIPLIERS,
    )  # fmt: skip
    model = GraniteMoeHybridForCausalLM(config).eval()
    model.save_pretrained(tmp_path / "granite")
    return model, tmp_path / "granite"


@pytest.mark.parametrize("kind", ["full_attention", "attention"], ids=["as transformers writes it", "as published"])
def test_its_logits_are_those_of_its_own_class(source: tuple[Any, Path], kind: str) -> None:
    model, folder = source
    configure(folder, layer_types=[kind] * LAYERS)
    with torch.no_grad():
        torch.testing.assert_close(load_source(folder)(IDS).logits, model(IDS).logits, rtol=0, atol=1e-5)
    pair = open_pair(folder, None)
    assert pair.tied and pair.config.intermediate_size == 48
    facts = inspect(str(folder), None).target
    assert not facts.problems and (facts.intermediate_size, facts.context) == (48, CONTEXT)


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"layer_types": ["mamba"] * LAYERS}, "no layer is of type 'full_attention'"),
        ({"layer_types": ["conv"] + ["attention"] * (LAYERS - 1)}, "a layer is of type 'conv'"),
        ({"position_embedding_type": "alibi"}, "position_embedding_type is 'alibi'"),
        ({"position_embedding_type": "nope"}, "no layer rotates its keys"),
    ],
)
def test_what_it_cannot_be_is_refused(source: tuple[Any, Path], changes: dict[str, object], why: str) -> None:
    configure(source[1], **changes)
    with pytest.raises(ExportError, match=why):
        open_pair(source[1], None)
