"""Targets in GGUF files: bundles equal those of the checkpoints that the files were written from."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from eagle_export.bundle import export
from eagle_export.errors import ExportError
from eagle_export.families.registry import FAMILIES
from eagle_export.families.source import load_source
from eagle_export.gguf.checkpoint import open_gguf
from eagle_runtime import EagleModel

gguf = pytest.importorskip("gguf")
from gguf_writer import write_gguf  # noqa: E402

CONTEXT, VOCAB = 256, 96


@dataclass(frozen=True)
class Row:
    """A family, and how its config differs from that of all. shared: what a file's values share with the source's."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 5.0, 9.0]}
LINEAR = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}
NEAR = {"rope_type": "default", "rope_theta": 10000.0}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
SCALES = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0}
ROWS = {
    "Llama 3, tied": Row(
        "llama",
        {
            "tie_word_embeddings": True,
            "head_dim": 64,
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192},
        },
    ),
    "Llama with biases and a smaller original context": Row(
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 64,
            "rope_parameters": {**LLAMA3, "factor": 4.0, "original_max_position_embeddings": 1024},
        },
    ),
    "Mistral": Row("mistral", {"sliding_window": None, "head_dim": 32}),
    "Qwen2.5": Row("qwen2", {"rope_parameters": {**NEAR, "rope_theta": 1e6}}),
    "Qwen3": Row("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "Phi-3": Row("phi3", {"sliding_window": 20}),
    "Phi-4-mini": Row(
        "phi3",
        {
            "tie_word_embeddings": True,
            "max_position_embeddings": 2 * CONTEXT,
            "original_max_position_embeddings": CONTEXT,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {**LONGROPE, **FACTORS, "original_max_position_embeddings": CONTEXT},
        },
    ),
    "Gemma": Row("gemma", {"head_dim": 32}),
    "Gemma-2": Row("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 12, **CAPS}),
    "Gemma-3": Row(
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 12,
            "num_hidden_layers": 7,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": NEAR},
        },
    ),
    "SmolLM3": Row("smollm3", {"num_hidden_layers": 5}),
    "Granite": Row("granite", SCALES),
    "OLMo-2": Row("olmo2", {"rms_norm_eps": 1e-6}),
    "Mixtral": Row("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "Qwen3-MoE": Row("qwen3_moe", {**EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "OLMoE": Row("olmoe", EXPERTS),
}


def save_source(row: Row, folder: Path) -> None:
    """The random model of a row, in fp32."""
    torch.manual_seed(7)
    cls = FAMILIES[row.model_type].model_class()
    config = cls.config_class(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "initializer_range": 0.1,
            "tie_word_embeddings": row.model_type.startswith("gemma"),
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **row.config,
        }
    )
    model = cls(config)
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "bias", "gate.weight")):  # else all ones or zeros
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.3)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """row -> checkpoint of its model."""
    base = tmp_path_factory.mktemp("gguf")

    @cache
    def folder_of(name: str) -> Path:
        folder = base / str(list(ROWS).index(name)) / "source"
        save_source(ROWS[name], folder)
        return folder

    return folder_of


def same_bundle(first: Path, second: Path) -> None:
    """Graphs and weights are the same bytes."""
    for path in sorted(first.rglob("model.onnx*")):
        name = path.relative_to(first)
        assert path.read_bytes() == (second / name).read_bytes(), name


@pytest.mark.parametrize("name", ROWS)
def test_a_file_in_fp32_gives_the_bundle_of_its_source(
    sources: Callable[[str], Path], tmp_path: Path, name: str
) -> None:
    source = sources(name)
    write_gguf(source, tmp_path / "model.gguf")
    export(source, None, tmp_path / "one", certify=False)
    export(tmp_path / "model.gguf", None, tmp_path / "two", certify=False)
    same_bundle(tmp_path / "one", tmp_path / "two")
