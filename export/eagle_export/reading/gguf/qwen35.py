"""The config of a Qwen3.5 or Qwen3-Next in a GGUF file, and the order in which it has the value heads of delta nets.

A checkpoint has the value heads of one key head together. A file of Qwen3.5 has the first ones of all key heads, then
the second ones, because llama.cpp repeats keys as a whole (conversion/qwen.py of ggml-org/llama.cpp; Ollama's converter
too).
"""

from __future__ import annotations

from typing import Any

from eagle_export.base.errors import ExportError
from eagle_export.reading.gguf.file import ADVICE, GgufFile, Order
from eagle_export.reading.gguf.rope import rope_parameters

MIXTURES = ("qwen35moe", "qwen3next")
KINDS = "attention.recurrent_layers"
KEY_HEADS, VALUE_HEADS, KEY_WIDTH = "ssm.group_count", "ssm.time_step_rank", "ssm.state_size"


def qwen35_config(file: GgufFile) -> dict[str, Any]:
    """Returns what a config says of the layers. Raises ExportError for metadata that do not say it of each."""
    width, moe = file.integer("attention.key_length"), _experts(file) if file.architecture in MIXTURES else {}
    share = file.integer("rope.dimension_count", width) / width
    return {
        **(moe or {"intermediate_size": file.integer("feed_forward_length")}),
        "head_dim": width,
        "num_key_value_heads": file.one_of_some_layers("attention.head_count_kv"),  # 0 in delta nets of Ollama's files
        "layer_types": _layer_types(file),
        "linear_num_key_heads": file.integer(KEY_HEADS),
        "linear_num_value_heads": file.integer(VALUE_HEADS),
        "linear_key_head_dim": file.integer(KEY_WIDTH),
        "linear_value_head_dim": file.integer("ssm.inner_size") // file.integer(VALUE_HEADS),
        "linear_conv_kernel_dim": file.integer("ssm.conv_kernel"),
        "partial_rotary_factor": share,
        "rope_parameters": {**rope_parameters(file, width), "partial_rotary_factor": share},
    }


def _experts(file: GgufFile) -> dict[str, Any]:
    return {
        "num_experts": file.integer("expert_count"),
        "num_experts_per_tok": file.integer("expert_used_count"),
        "moe_intermediate_size": file.integer("expert_feed_forward_length"),
        "shared_expert_intermediate_size": file.integer("expert_shared_feed_forward_length"),
    }


def value_order(file: GgufFile, part: str, shape: tuple[int, ...]) -> Order | None:
    """part: of a block. shape: of its tensor. Returns how its numbers are stored; None for those of a checkpoint."""
    keys = file.integer(KEY_HEADS)
    each = file.integer(VALUE_HEADS) // keys
    if each == 1:
        return None
    if part in ("attn_gate", "ssm_alpha", "ssm_beta", "ssm_a", "ssm_dt"):
        return Order(1, each, keys)
    if part in ("attn_qkv", "ssm_conv1d"):  # queries and keys come first
        return Order(1, each, keys, start=2 * keys * file.integer(KEY_WIDTH))
    return Order(shape[0], each, keys) if part == "ssm_out" else None


def _layer_types(file: GgufFile) -> list[str]:
    stated = file.optional(KINDS)  # newer files have it, of the layers that predict further tokens too
    if stated is None:
        period = file.integer("full_attention_interval", 4)
        stated = [(layer + 1) % period != 0 for layer in range(file.layers)]
    if not isinstance(stated, list) or len(stated) < file.layers:
        raise ExportError(
            f"{file.path}: metadata {file.architecture}.{KINDS} is {str(stated)[:60]}, but must say of each of "
            f"{file.layers} layers whether it is one; {ADVICE}"
        )
    return ["linear_attention" if each else "full_attention" for each in stated[: file.layers]]
