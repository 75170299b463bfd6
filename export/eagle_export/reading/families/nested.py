"""Models that read images too, and whose language model is one of a family: it is read alone.

config.json nests the language model's config, and its tensors have a prefix, which differs between releases of
transformers. For a text the whole model computes what the language model does.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_export.reading.checkpoint import Checkpoint

# model_type of the whole -> what its published configs leave to the defaults of the language model's class.
WHOLES: Mapping[str, Mapping[str, Any]] = {
    "gemma3": {
        "model_type": "gemma3_text",
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
    },
    "gemma4": {"model_type": "gemma4_text"},
    "mistral3": {"model_type": "mistral"},
    "qwen3_5": {"model_type": "qwen3_5_text"},
    "qwen3_5_moe": {"model_type": "qwen3_5_moe_text"},
}
SHARED = (  # keys of the whole that hold for its language model too
    "bos_token_id", "eos_token_id", "pad_token_id", "tie_word_embeddings", "quantization_config", "quantization",
)  # fmt: skip
PREFIXES = {  # of names -> of the language model's names when it is saved alone; all others belong to the images
    "language_model.model.": "model.",
    "language_model.lm_head.": "lm_head.",
    "model.language_model.": "model.",
    "lm_head.": "lm_head.",
    "mtp.": "mtp.",
}


def language_model(stored: Checkpoint) -> Checkpoint:
    """Returns the language model of a checkpoint that reads images too; any other checkpoint as it is."""
    kind, nested = stored.config.get("model_type"), stored.config.get("text_config")
    if not isinstance(kind, str) or kind not in WHOLES or not isinstance(nested, Mapping):
        return stored
    shared = {key: value for key in SHARED if (value := stored.config.get(key)) is not None}
    tensors = {
        own + name.removeprefix(prefix): tensor
        for name, tensor in stored.tensors.items()
        for prefix, own in PREFIXES.items()
        if name.startswith(prefix)
    }
    note = f"{stored.folder}: of this model, which reads images too, the language model is taken alone"
    config = {**WHOLES[kind], **nested, **shared}
    return replace(stored, config=config, tensors=tensors, notes=(*stored.notes, note))
