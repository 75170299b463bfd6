"""Families at real widths, two layers deep: equal to transformers in fp32, and fused attention in TensorRT for RTX."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from eagle_export.bundle import export
from eagle_export.reading.families.registry import FAMILIES
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from insides import bundle_in
from trt_network import TARGET_SIZES, Network

pytestmark = pytest.mark.slow
LAYERS = 2
# Widths of published models; MLPs, vocabularies, windows and numbers of experts are smaller.
SHAPES: dict[str, dict[str, Any]] = {
    "mistral": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 8, "sliding_window": 300},
    "qwen2": {"hidden_size": 1536, "num_attention_heads": 12, "num_key_value_heads": 2},
    "qwen3": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 8, "head_dim": 128},
    "phi3": {
        "hidden_size": 3072,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.75},
        "sliding_window": 300,
    },
    "gemma": {"hidden_size": 2048, "num_attention_heads": 8, "num_key_value_heads": 1, "head_dim": 256},
    "gemma2": {
        "hidden_size": 2304,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "sliding_window": 300,
    },
    "gemma3_text": {
        "hidden_size": 1152,
        "num_attention_heads": 4,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "sliding_window": 300,
        "sliding_window_pattern": 2,
    },
    "gemma4_text": {
        "hidden_size": 1536,
        "num_attention_heads": 8,
        "num_key_value_heads": 1,
        "head_dim": 256,
        "global_head_dim": 512,
        "layer_types": ["sliding_attention", "full_attention"],
        "vocab_size_per_layer_input": 2048,
        "sliding_window": 300,
        "final_logit_softcapping": 30.0,
    },
    "lfm2": {
        "hidden_size": 1024,
        "num_attention_heads": 16,
        "num_key_value_heads": 8,
        "layer_types": ["conv", "full_attention"],
    },
    "smollm3": {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "no_rope_layer_interval": 2,
    },
    "granite": {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "attention_multiplier": 0.015625,
        "embedding_multiplier": 12.0,
        "residual_multiplier": 0.22,
        "logits_scaling": 8.0,
    },
    "olmo2": {"hidden_size": 2048, "num_attention_heads": 16, "num_key_value_heads": 16},
    "qwen3_moe": {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "num_experts": 16,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 768,
    },
    "mixtral": {
        "hidden_size": 4096,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "sliding_window": None,
    },
    "olmoe": {
        "hidden_size": 2048,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "num_experts": 16,
        "num_experts_per_tok": 8,
    },
    "olmo3": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 32, "sliding_window": 256},
    "ministral3": {
        "hidden_size": 3072,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "sliding_window": None,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 1e6,
            "factor": 16.0,
            "original_max_position_embeddings": 256,
            "llama_4_scaling_beta": 0.1,
        },
    },
    "glm4": {"hidden_size": 4096, "num_attention_heads": 32, "num_key_value_heads": 2, "head_dim": 128},
    "ernie4_5": {"hidden_size": 1024, "num_attention_heads": 16, "num_key_value_heads": 2, "head_dim": 128},
    "hunyuan_v1_dense": {
        "hidden_size": 1024,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 128,
        "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 1000.0, "factor": 1.0},
    },
    "exaone4": {
        "hidden_size": 2048,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "sliding_window": 256,
        "sliding_window_pattern": 2,
    },
    "seed_oss": {"hidden_size": 5120, "num_attention_heads": 80, "num_key_value_heads": 8, "head_dim": 128},
    "arcee": {"hidden_size": 2560, "num_attention_heads": 20, "num_key_value_heads": 4, "head_dim": 128},
    "gpt_oss": {
        "hidden_size": 2880,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 4,
        "sliding_window": 128,
    },
}
SCALED = {"gemma4_text": 256**-0.5}  # gains of queries, where attention divides scores by nothing
UNBUILT = {"gemma2", "gemma4_text", "lfm2"}  # refused: bounds of scores, keys of several shapes, convolutions


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """pytest keeps the folders of its last runs; random weights are not worth keeping."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("model_type", SHAPES)
@torch.no_grad()
def test_real_widths(model_type: str, folder: Path) -> None:
    torch.manual_seed(0)
    cls = FAMILIES[model_type].model_class()
    sizes = {"vocab_size": 2048, "intermediate_size": 1024, "num_hidden_layers": LAYERS}
    ends = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
    model = cls(cls.config_class(**sizes, **ends, max_position_embeddings=1024, **SHAPES[model_type])).eval()
    for name, parameter in model.named_parameters():
        if model_type in SCALED and name.endswith("q_norm.weight"):
            parameter *= SCALED[model_type]
    model.save_pretrained(folder / "source")
    text = np.random.default_rng(1).integers(0, 2048, 400).tolist()
    out = model(torch.tensor([text]), output_hidden_states=True)
    export(folder / "source", None, folder / "fp32", Settings(certify=False))
    with EagleModel.load(folder / "fp32", threads=1) as bundle:
        logits, features = bundle_in(bundle).target.prefill(text)
        np.testing.assert_allclose(logits, out.logits[0, -1].numpy(), atol=1e-4)
        np.testing.assert_allclose(np.asarray(features), out.hidden_states[-1][0].numpy(), atol=1e-4)
    if model_type in UNBUILT:
        return
    export(folder / "source", None, folder / "fp16", Settings(precision="fp16", backend="tensorrt-rtx", certify=False))
    network = Network(folder / "fp16/target/model.onnx", TARGET_SIZES)
    kernels = network.build(["8.6"])
    assert kernels, network.errors
    assert sum(kernel.is_fused_attention for kernel in kernels) == LAYERS
