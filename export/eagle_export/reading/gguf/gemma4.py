"""The config of a Gemma-4 in a GGUF file. Its layers differ: those with a window have heads of another width and other
key/value heads than those without, and the last ones use keys of layers before them.

What llama.cpp's converter writes of every such model (conversion/gemma.py of ggml-org/llama.cpp) must be there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from eagle_export.base.errors import ExportError
from eagle_export.reading.gguf.file import GgufFile
from eagle_export.reading.gguf.rope import default_rope, proportional_rope

WINDOWS, KV_HEADS, SHARED = "attention.sliding_window_pattern", "attention.head_count_kv", "attention.shared_kv_layers"
WIDTHS = "feed_forward_length"


def gemma4_config(file: GgufFile) -> dict[str, Any]:
    """Returns what a config says of the layers. Raises ExportError for metadata that contradict each other or the
    tensors."""
    windowed, kept = _windowed(file), file.layers - file.integer(SHARED, least=0)
    if set(windowed[: max(kept, 0)]) != {True, False}:
        raise _wrong(file, SHARED, "so layers of one kind have no keys and values that they could use")
    far, near = _head_width(file, ""), _head_width(file, "_swa")
    heads = list(zip(file.each_layer(KV_HEADS), windowed, strict=True))
    far_heads = _only(file, KV_HEADS, (count for count, window in heads if not window))
    near_heads = _only(file, KV_HEADS, (count for count, window in heads if window))
    keys_are_values = _keys_are_values(file, [layer for layer in range(kept) if not windowed[layer]])
    if far_heads != near_heads and not keys_are_values:
        raise _wrong(file, KV_HEADS, "so layers differ, but not in whether their values are keys (no attn_v)")
    widths = file.each_layer(WIDTHS)
    width = _only(file, WIDTHS, widths[:kept])
    if set(widths[kept:]) not in (set(), {width}, {2 * width}):
        raise _wrong(file, WIDTHS, "but layers that use others' keys have the others' width or twice that")
    cap = file.optional("final_logit_softcapping")
    return {
        **(_experts(file) if file.optional("expert_count") else {}),
        "intermediate_size": width,
        "use_double_wide_mlp": set(widths[kept:]) == {2 * width},
        "head_dim": near,
        "global_head_dim": far,
        "num_key_value_heads": near_heads,
        "num_global_key_value_heads": far_heads if keys_are_values else None,
        "attention_k_eq_v": keys_are_values,
        "num_kv_shared_layers": file.layers - kept,
        "layer_types": ["sliding_attention" if each else "full_attention" for each in windowed],
        "sliding_window": file.integer("attention.sliding_window"),
        "hidden_size_per_layer_input": file.integer("embedding_length_per_layer_input", least=0),
        "vocab_size_per_layer_input": file.tensors["token_embd.weight"].shape[0],
        "final_logit_softcapping": cap and file.number("final_logit_softcapping"),
        "rope_parameters": {
            "full_attention": proportional_rope(file, "rope.freq_base", far),
            "sliding_attention": default_rope(file, "rope.freq_base_swa"),
        },
    }


def _experts(file: GgufFile) -> dict[str, Any]:
    return {
        "enable_moe_block": True,
        "num_experts": file.integer("expert_count"),
        "top_k_experts": file.integer("expert_used_count"),
        "moe_intermediate_size": file.integer("expert_feed_forward_length"),
    }


def _windowed(file: GgufFile) -> list[bool]:
    """Whether each layer has a window."""
    stated = file.optional(WINDOWS)
    windowed = [bool(each) for each in stated] if isinstance(stated, list) else []
    if len(windowed) != file.layers or windowed[-1] or not windowed[0]:
        raise _wrong(file, WINDOWS, "but must say of each layer whether it has a window; the first has, the last not")
    return windowed


def _head_width(file: GgufFile, kind: str) -> int:
    """Of keys and values. kind: what ends the keys of the metadata of layers with a window."""
    key = f"attention.key_length{kind}"
    width = file.integer(key)
    if {file.integer(f"attention.value_length{kind}"), file.integer(f"rope.dimension_count{kind}")} != {width}:
        raise _wrong(file, key, "but values, or the part that is rotated, have another width, which is not supported")
    return width


def _keys_are_values(file: GgufFile, layers: Sequence[int]) -> bool:
    """Whether the layers have no values of their own. layers: those without a window that have keys."""
    names = [f"blk.{layer}.attn_v.weight" for layer in layers]
    stored = [name for name in names if name in file.tensors]
    if stored and stored != names:
        raise ExportError(
            f"{file.path} has tensor {stored[0]!r}, but none such of another layer without a window; the file is "
            "incomplete, or of a variant that is not supported"
        )
    return not stored


def _only(file: GgufFile, key: str, numbers: Iterable[int]) -> int:
    """The number that layers of one kind have in common."""
    first, *others = set(numbers)
    if others:
        raise _wrong(file, key, "so layers of one kind differ, which is not supported")
    return first


def _wrong(file: GgufFile, key: str, what: str) -> ExportError:
    return ExportError(f"{file.path}: metadata {file.architecture}.{key} is {str(file.optional(key))[:60]}, {what}")
