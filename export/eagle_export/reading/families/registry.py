"""All families that can be exported."""

from __future__ import annotations

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families import (
    gemma,
    gemma2,
    gemma3,
    granite,
    llama,
    mimo,
    mistral,
    mixtral,
    olmo2,
    olmoe,
    phi3,
    qwen2,
    qwen3,
    qwen3_moe,
    smollm3,
)
from eagle_export.reading.families.family import Family

MODULES = (
    llama,
    mistral,
    qwen2,
    qwen3,
    mimo,
    phi3,
    gemma,
    gemma2,
    gemma3,
    smollm3,
    granite,
    olmo2,
    mixtral,
    qwen3_moe,
    olmoe,
)
FAMILIES: dict[str, Family] = {each.FAMILY.model_type: each.FAMILY for each in MODULES}


def family_of(target: Checkpoint) -> Family:
    """Returns the family of a checkpoint by the model_type of its config. Raises ExportError for one that is not
    known."""
    kind = target.config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    if family is None and "text_config" in target.config:
        raise ExportError(
            f"{target.folder / 'config.json'}: a model of type {kind!r} reads more than text; save its language model "
            "alone (AutoModelForCausalLM, save_pretrained) and give that folder"
        )
    if family is None:
        raise ExportError(
            f"{target.folder / 'config.json'}: model_type is {kind!r}, but only {', '.join(map(repr, FAMILIES))} "
            "targets are supported"
        )
    return family
