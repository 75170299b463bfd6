"""Models that read images too: their language model alone, against what the whole model computes of a text."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import (
    Gemma3Config,
    Gemma3ForConditionalGeneration,
    Gemma4Config,
    Gemma4ForConditionalGeneration,
    Mistral3Config,
    Mistral3ForConditionalGeneration,
)

from eagle_export.base.errors import ExportError
from eagle_export.graphs.pair import open_pair
from eagle_export.inspection.report import inspect
from eagle_export.reading.checkpoint import LM_HEAD, Checkpoint
from eagle_export.reading.families.nested import WHOLES, language_model
from eagle_export.reading.families.source import load_source
from export_workplace import configure
from tiny_families import CONTEXT, HIDDEN, LAYERS, ROWS, VOCAB
from tiny_qwen35 import qwen35, qwen35_moe

IDS = torch.tensor([[5, 7, 20, 33, 7, 5, 9, 41]])
TEXT = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": LAYERS,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "max_position_embeddings": CONTEXT,
    "initializer_range": 0.15, "sliding_window": 12,
}  # fmt: skip
SEEN = {
    "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "image_size": 28,
    "patch_size": 14,
}  # fmt: skip


def gemma3() -> Any:
    vision = {"model_type": "siglip_vision_model", **SEEN}
    return Gemma3ForConditionalGeneration(
        Gemma3Config(text_config={"model_type": "gemma3_text", **TEXT}, vision_config=vision, mm_tokens_per_image=4)
    )


def gemma4() -> Any:
    """As 26B-A4B, with experts."""
    text = {**TEXT, **ROWS["Gemma-4, with experts"].config}
    vision = {**SEEN, "num_key_value_heads": 2, "head_dim": 8, "position_embedding_size": 4}
    return Gemma4ForConditionalGeneration(Gemma4Config(text_config=text, vision_config=vision))


def mistral3() -> Any:
    text = {"model_type": "mistral", **TEXT}
    vision = {"model_type": "pixtral", "head_dim": 8, **SEEN}
    return Mistral3ForConditionalGeneration(
        Mistral3Config(text_config=text, vision_config=vision, tie_word_embeddings=False)
    )


@pytest.mark.parametrize("make", [gemma3, gemma4, mistral3, qwen35, qwen35_moe])
def test_its_logits_are_those_of_the_whole(make: Callable[[], Any], tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = make().eval()
    # Experts are published as transformers holds them, in one tensor.
    model.save_pretrained(tmp_path, save_original_format=make is not qwen35_moe)
    with torch.no_grad():
        wanted = model(input_ids=IDS).logits
        torch.testing.assert_close(load_source(tmp_path)(IDS).logits, wanted, rtol=0, atol=1e-5)
    pair = open_pair(tmp_path, None)
    assert pair.tied == (make not in (mistral3, qwen35_moe))
    assert "the language model is taken alone" in pair.target.notes[0]
    facts, source = inspect(str(tmp_path), None).target, load_source(tmp_path)
    stored = [*source.parameters(), *(each for name, each in source.named_buffers() if name.endswith("layer_scalar"))]
    assert not facts.problems and facts.parameters == sum(each.numel() for each in stored)
    assert facts.notes[0] == pair.target.notes[0]


@pytest.mark.parametrize(
    ("inner", "head"), [("language_model.model.", "language_model.lm_head."), ("model.language_model.", "lm_head.")]
)
def test_both_forms_of_names_are_read(inner: str, head: str, tmp_path: Path) -> None:
    mistral3().save_pretrained(tmp_path)
    own = set(open_pair(tmp_path, None).target.tensors)
    tensors = open_pair(tmp_path, None).target.tensors
    renamed = {
        head + "weight" if name == LM_HEAD else inner + name.removeprefix("model."): each.read()
        for name, each in tensors.items()
    }
    vision = {name: each for name, each in load_file(tmp_path / "model.safetensors").items() if "vision" in name}
    save_file({**renamed, **vision}, tmp_path / "model.safetensors")
    assert vision and set(open_pair(tmp_path, None).target.tensors) == own


def test_what_the_whole_says_holds_for_its_language_model(tmp_path: Path) -> None:
    gemma3().save_pretrained(tmp_path)
    configure(tmp_path, eos_token_id=[1, 6], quantization_config={"quant_method": "bitsandbytes"})
    with pytest.raises(ExportError, match="quantised already"):
        open_pair(tmp_path, None)
    configure(tmp_path, quantization_config=None)
    assert open_pair(tmp_path, None).config.eos_token_id == [1, 6]


@pytest.mark.parametrize("kind", WHOLES)
def test_what_published_configs_leave_out_are_the_defaults_of_transformers(kind: str) -> None:
    from transformers import AutoConfig

    whole = AutoConfig.for_model(kind).text_config
    read = language_model(Checkpoint(Path(), {"model_type": kind, "text_config": {}}, {})).config
    assert read and {name: getattr(whole, name) for name in read} == read
    assert json.dumps(read)
