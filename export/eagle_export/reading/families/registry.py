"""All families that can be exported, and targets' configs as their families' own classes, read strictly."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from eagle_export.base.errors import ExportError
from eagle_export.base.quiet import quiet
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families import (
    arcee,
    ernie,
    exaone,
    gemma,
    gemma4,
    glm,
    gpt_oss,
    granite,
    hunyuan,
    lfm2,
    llama,
    mistral,
    olmo,
    phi3,
    qwen,
    qwen3_next,
    seed,
    smollm3,
)
from eagle_export.reading.families.family import Config, Family, Windows, linear_layers
from eagle_export.reading.families.nested import WHOLES

MODULES = (
    llama, mistral, qwen, qwen3_next, phi3, gemma, gemma4, smollm3, granite, olmo, glm, ernie, hunyuan, exaone, seed,
    arcee, gpt_oss, lfm2,
)  # fmt: skip
FAMILIES: dict[str, Family] = {each.model_type: each for module in MODULES for each in module.FAMILIES}


def declared(config: Mapping[str, Any]) -> Family | None:
    """Returns the family of a config.json; None for one that is not known."""
    kind = config.get("model_type")
    family = FAMILIES.get(kind) if isinstance(kind, str) else None
    return family and (family.variant(config) or family)


def family_of(target: Checkpoint) -> Family:
    """Returns the family of a checkpoint by its config. Raises ExportError for one that is not known."""
    kind, family = target.config.get("model_type"), declared(target.config)
    if family is None and "text_config" in target.config:
        raise ExportError(
            f"{target.folder / 'config.json'}: a model of type {kind!r} reads more than text; give one of texts alone, "
            f"or one of type {' or '.join(map(repr, WHOLES))}, whose language model is taken"
        )
    if family is None:
        raise ExportError(
            f"{target.folder / 'config.json'}: model_type is {kind!r}, but only {', '.join(map(repr, FAMILIES))} "
            "targets are supported"
        )
    return family


def read_config(family: Family, target: Checkpoint) -> Config:
    """Returns the checkpoint's config as transformers' class of the family. Raises ExportError for values that are
    wrong, or that the family cannot express."""
    check_config(family, target)
    cls = family.model_class()
    with quiet("transformers"), accepted_by_transformers(target):
        config = cls.config_class.from_dict(dict(target.config))
    if family.rotary_layers(config) == 0 and not linear_layers(config):
        raise ExportError(f"{target.folder / 'config.json'}: no layer rotates its keys, so that order would not count")
    return config


def check_config(family: Family, target: Checkpoint) -> None:
    """Raises ExportError for a config with values that are wrong, or that the family cannot express."""
    where = target.folder / "config.json"
    if target.config.get("quantization_config") or target.config.get("quantization"):  # the latter: MLX
        raise ExportError(f"{where}: the weights are quantised already; export the original checkpoint")
    for key in ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size", "intermediate_size"):
        target.integer(key)
    for key in ("head_dim", "max_position_embeddings", "sliding_window"):
        target.integer(key, 1)
    heads = target.integer("num_attention_heads")
    kv_heads = target.integer("num_key_value_heads", heads)
    if heads % kv_heads:
        raise ExportError(f"{where}: {heads} heads cannot share {kv_heads} key/value heads; download the config again")
    family.refuse(target)


def windows_of(family: Family, config: Config) -> Windows:
    """Returns each layer's window, None where it is as long as the context, so that it hides nothing."""
    context = family.context(config)
    return tuple(None if width is None or width >= context else width for width in family.windows(config))


@contextmanager
def accepted_by_transformers(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns the errors with which transformers rejects a config, some only in a model, into ExportError."""
    try:
        yield
    except Exception as error:
        what = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        where = checkpoint.folder / "config.json"
        raise ExportError(f"{where}: transformers refuses the config ({what}); compare it with the original") from None
