"""Tiny random targets of every family."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from eagle_export.reading.families.registry import FAMILIES

VOCAB, HIDDEN, LAYERS, CONTEXT = 64, 32, 4, 256


@dataclass(frozen=True)
class Row:
    """A family, and how its config differs from that of all. query_gain: of norms of queries."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)
    query_gain: float = 1.0


PARTIAL_LONGROPE = {
    "original_max_position_embeddings": CONTEXT,
    "rope_parameters": {
        "rope_type": "longrope",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "short_factor": [1.0, 1.5],
        "long_factor": [2.0, 9.0],
        "original_max_position_embeddings": CONTEXT,
    },
}
WIDE_PHI = "Phi-4-mini, with wider heads"
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}  # low enough to matter
MULTIPLIERS = {
    "embedding_multiplier": 3.0,
    "attention_multiplier": 0.2,
    "residual_multiplier": 0.7,
    "logits_scaling": 2.0,
}
PLAIN_ROPE = {"rope_parameters": {"rope_type": "default", "rope_theta": 10000.0}}
FIXED_ALPHA = {"rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "alpha": 1000.0, "factor": 1.0}}
GROWING_QUERIES = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": CONTEXT // 4,
        "llama_4_scaling_beta": 0.1,
    }
}
TINY_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 150000.0,
        "factor": 4.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": CONTEXT // 4,
    }
}
NO_SCALE = 0.25  # of gains, where attention multiplies scores by nothing
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
NETS = {
    "head_dim": 64,
    "layer_types": ["linear_attention", "linear_attention", "full_attention", "linear_attention"],
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,
}
SPACES = {
    "layer_types": NETS["layer_types"],
    "shared_intermediate_size": 40,
    "mamba_n_heads": 4,
    "mamba_d_state": 16,
    "mamba_d_conv": 3,
    "mamba_chunk_size": 8,
    **MULTIPLIERS,
}
# Ends of names of what is all ones or zeros, or alike, where transformers makes a model.
RANDOM = ("norm.weight", "norm_1.weight", "norm_2.weight", "bias", "gate.weight", "sinks", "scale", "mamba.D")
# A family is one row here and one declaration in export/eagle_export/reading/families.
ROWS = {
    "Llama": Row("llama"),
    "Qwen2.5, tied, upper layers with a window": Row(
        "qwen2", {"tie_word_embeddings": True, "use_sliding_window": True, "sliding_window": 12, "max_window_layers": 2}
    ),
    "Qwen3": Row("qwen3", {"head_dim": 16}),
    "MiMo-7B": Row("mimo"),
    "Mistral": Row("mistral", {"sliding_window": 70, "head_dim": 16}),
    "Phi-3, with a window": Row("phi3", {"sliding_window": 20}),
    "Phi-4-mini": Row(
        "phi3", {"tie_word_embeddings": True, "max_position_embeddings": 2 * CONTEXT, **PARTIAL_LONGROPE}
    ),
    WIDE_PHI: Row("phi3", {"num_attention_heads": 1, "num_key_value_heads": 1, "partial_rotary_factor": 0.5}),
    "Gemma": Row("gemma", {"head_dim": 16}),
    "Gemma-2": Row("gemma2", {"head_dim": 16, "sliding_window": 12, "query_pre_attn_scalar": 24, **CAPS}),
    "Gemma-3": Row("gemma3_text", {"head_dim": 16, "sliding_window": 70, "sliding_window_pattern": 3}),
    "Gemma-4, with layers that use others' keys": Row(
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "sliding_window": 12,
            "final_logit_softcapping": 3.0,
        },
        NO_SCALE,
    ),
    "Gemma-4, with values that are keys": Row(
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 32,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 70,
        },
        NO_SCALE,
    ),
    "Gemma-4, with experts": Row(
        "gemma4_text",
        {
            "head_dim": 16,
            "global_head_dim": 48,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "sliding_window": 12,
            "layer_types": ["sliding_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 3,
            "moe_intermediate_size": 24,
        },
        NO_SCALE,
    ),
    "LFM2": Row(
        "lfm2",
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "tie_word_embeddings": True,
        },
    ),
    "LFM2, with biases and wide convolutions": Row(
        "lfm2",
        {
            "layer_types": ["full_attention", "conv", "conv", "full_attention"],
            "block_auto_adjust_ff_dim": False,
            "num_key_value_heads": 4,
            "conv_bias": True,
            "conv_L_cache": 5,
        },
    ),
    "LFM2, with experts": Row(
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv", "full_attention"],
            "num_dense_layers": 3,
            "moe_intermediate_size": 24,
            "num_experts": 4,
            "num_experts_per_tok": 3,
        },
    ),
    "Qwen3.5": Row("qwen3_5_text", {**NETS, "tie_word_embeddings": True}),
    "Qwen3.5, with experts": Row(
        "qwen3_5_moe_text",
        {**NETS, **EXPERTS, "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40},
    ),
    "Granite 4": Row("granitemoehybrid", {**SPACES, "num_local_experts": 0, "tie_word_embeddings": True}),
    "Granite 4, with experts and rotation": Row(
        "granitemoehybrid", {**SPACES, "num_local_experts": 3, "mamba_n_groups": 2, "position_embedding_type": "rope"}
    ),
    "SmolLM3": Row("smollm3", {"no_rope_layer_interval": 2}),
    "Granite": Row("granite", MULTIPLIERS),
    "OLMo-2": Row("olmo2"),
    "OLMo-3": Row("olmo3", {"sliding_window": 12}),
    "Ministral": Row("ministral", {"sliding_window": 12, "head_dim": 16, **PLAIN_ROPE}),
    "Ministral-3": Row("ministral3", {"sliding_window": None, "head_dim": 16, **GROWING_QUERIES}),
    "GLM-4": Row("glm", {"head_dim": 16}),
    "GLM-4-0414": Row("glm4", {"head_dim": 16}),
    "ERNIE 4.5": Row("ernie4_5", {"head_dim": 16, "tie_word_embeddings": True}),
    "Hunyuan": Row("hunyuan_v1_dense", {"head_dim": 16, "tie_word_embeddings": True, **FIXED_ALPHA}),
    "EXAONE 4.0": Row("exaone4", {"head_dim": 16, "sliding_window": 12, "sliding_window_pattern": 2}),
    "EXAONE 4.0, without windows": Row("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * LAYERS}),
    "Seed-OSS": Row("seed_oss", {"head_dim": 16, "attention_bias": True}),
    "AFM": Row("arcee"),
    "Mixtral": Row("mixtral", {"num_local_experts": 4, "sliding_window": 12}),
    "Qwen3-MoE, one layer without experts": Row(
        "qwen3_moe", {**EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True, "mlp_only_layers": [1]}
    ),
    "gpt-oss": Row(
        "gpt_oss",
        {
            "layer_types": ["sliding_attention", *["full_attention"] * (LAYERS - 1)],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 16,
            "sliding_window": 12,
            **TINY_YARN,
        },
    ),
    "ERNIE 4.5, with experts": Row(
        "ernie4_5_moe",
        {
            "head_dim": 16,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 24,
            "moe_layer_end_index": 3,
            "tie_word_embeddings": True,
        },
    ),
    "Granite, with experts": Row("granitemoe", {"num_local_experts": 3, **MULTIPLIERS}),
    "GLM-4.5-Air": Row(
        "glm4_moe",
        {
            "head_dim": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
            "routed_scaling_factor": 1.5,
            "num_nextn_predict_layers": 0,
        },
    ),
    "OLMoE": Row("olmoe", {**EXPERTS, "clip_qkv": 1.5}),
}


def source_of(row: Row) -> Any:
    """The random model of a row, in fp32."""
    torch.manual_seed(7)
    cls = FAMILIES[row.model_type].model_class()
    config = cls.config_class(
        **{
            "vocab_size": VOCAB,
            "hidden_size": HIDDEN,
            "intermediate_size": 48,
            "num_hidden_layers": LAYERS,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "initializer_range": 0.15,
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **row.config,
        }
    )
    model = cls(config).eval()
    corrections = [each for each in model.named_buffers() if each[0].endswith("correction_bias")]
    for name, parameter in [*model.named_parameters(), *corrections]:
        if name.endswith(RANDOM):
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.3)
        if name.endswith("mamba.A_log"):  # states of transformers' own hold a token or two
            torch.nn.init.normal_(parameter, -2.0, 1.0)
        if name.endswith("router.proj.weight"):  # by the root of the width of which Gemma-4 divides what it reads
            torch.nn.init.normal_(parameter, 0.0, 0.3 * HIDDEN**0.5)
        if name.endswith("q_norm.weight"):
            parameter.data *= row.query_gain
    return model


def save_source(row: Row, folder: Path) -> None:
    """Writes the checkpoint of a row's model."""
    source_of(row).save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())  # MiMo runs another family's class
    (folder / "config.json").write_text(json.dumps(config | {"model_type": row.model_type}))
