"""What the config of a Gemma-4 assistant says. It has no keys of its own: its layers attend to keys and values of the
target's last layers of each type that have some.

Source: transformers/models/gemma4_assistant, and SinglePositionMultiTokenCandidateGenerator, which drafts with it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from eagle_export.base.errors import ExportError
from eagle_export.base.quiet import quiet
from eagle_export.reading.checkpoint import EMBEDDING, LM_HEAD, Checkpoint
from eagle_export.reading.families.family import Config, Rows
from eagle_export.reading.families.gemma4 import GEMMA4, UNUSED, rows
from eagle_export.reading.families.registry import accepted_by_transformers

TARGET = "target_config"  # in an assistant's config: its target's, next to which it is read
CENTROIDS, TOKEN_ORDERING = "masked_embedding.centroids.weight", "masked_embedding.token_ordering"


@dataclass(frozen=True, slots=True)
class Assistant:
    """What only assistants have. text: config of its layers, as transformers writes it. num_layers: of them. kinds:
    types of layers of the target whose keys and values they read; places, rows: of the target's last layer of each
    type, its number among those that have keys, its key/value heads and their width. centroids: into how many groups
    the vocabulary is cut, 0 if it is not; chosen: how many of them a row's tokens come from."""

    text: Mapping[str, Any]
    num_layers: int
    kinds: tuple[str, ...]
    places: tuple[int, ...]
    rows: Rows
    centroids: int
    chosen: int

    @property
    def width(self) -> int:
        """Of its hidden states."""
        return int(self.text["hidden_size"])

    @property
    def window(self) -> int:
        """Of its sliding layers."""
        return int(self.text["sliding_window"])


def official_assistant(head: Checkpoint) -> Checkpoint:
    """Returns an assistant whose LM head has its own name: the embedding that it ties is used as nothing else. Raises
    ExportError for assistants of Gemma-4's unified models."""
    if (kind := head.config.get("model_type")) != "gemma4_assistant":
        raise ExportError(
            f"{head.folder / 'config.json'}: model_type is {kind!r}, but only assistants of type 'gemma4_assistant' "
            "are supported"
        )
    unused = tuple(f".self_attn.{part}." for part in UNUSED)  # which transformers leaves out too
    tensors = {name: tensor for name, tensor in head.tensors.items() if not any(part in name for part in unused)}
    if (embedding := tensors.pop(EMBEDDING, None)) is not None:
        tensors.setdefault(LM_HEAD, embedding)
    return replace(head, tensors=tensors)


def with_targets_config(head: Checkpoint, target: Mapping[str, Any]) -> Checkpoint:
    """Returns an assistant with its target's config, which says what keys and values it finds."""
    return replace(head, config={**head.config, TARGET: target})


def read_assistant(head: Checkpoint, target_hidden: int, vocab: int) -> Assistant:
    """Reads an assistant that stands next to its target, whose sizes these are. Raises ExportError if they do not fit
    together."""
    where, target = head.folder / "config.json", head.config[TARGET]
    apart = "target and head do not belong together"
    if (kind := target.get("model_type")) != GEMMA4.model_type:
        raise ExportError(f"{where}: an assistant drafts for Gemma-4, but the target is of type {kind!r}; {apart}")
    with quiet("transformers"), accepted_by_transformers(head):
        from transformers import Gemma4AssistantConfig, Gemma4TextConfig

        config = Gemma4AssistantConfig.from_dict({key: head.config[key] for key in head.config if key != TARGET})
        text, theirs = config.text_config, Gemma4TextConfig.from_dict(dict(target))
        last = {kind: number for number, kind in enumerate(theirs.layer_types[: len(rows(theirs))])}
    for name, own, wanted in (
        ("backbone_hidden_size", config.backbone_hidden_size, target_hidden),
        ("text_config.vocab_size", text.vocab_size, vocab),
    ):
        if own != wanted:
            raise ExportError(f"{where}: {name} is {own}, but the target's is {wanted}; {apart}")
    kinds = sorted({*text.layer_types}, key=lambda kind: last.get(kind, -1))
    for kind in kinds:
        _check_rows(where, text, kind, None if kind not in last else rows(theirs)[last[kind]])
    head.require("pre_projection.weight", (text.hidden_size, 2 * target_hidden))
    head.require("post_projection.weight", (target_hidden, text.hidden_size))
    head.require(LM_HEAD, (vocab, text.hidden_size))
    centroids = config.num_centroids if config.use_ordered_embeddings else 0
    if centroids:
        _check_centroids(head, centroids, text.hidden_size, vocab)
    return Assistant(
        text=text.to_dict(),
        num_layers=int(text.num_hidden_layers),
        kinds=tuple(kinds),
        places=tuple(last[kind] for kind in kinds),
        rows=tuple(rows(theirs)[last[kind]] for kind in kinds),
        centroids=centroids,
        chosen=min(config.centroid_intermediate_top_k, centroids),
    )


def _check_rows(where: object, text: Config, kind: str, theirs: tuple[int, int] | None) -> None:
    """Raises ExportError unless layers of one type read keys of the shape that the target's have."""
    if theirs is None:
        raise ExportError(
            f"{where}: text_config has layers of type {kind!r}, but no layer of the target is of that type; target and "
            "head do not belong together"
        )
    layer = text.per_layer_config[text.layer_types.index(kind)]
    own = int(layer.num_key_value_heads), int(layer.head_dim)
    if own != theirs:
        raise ExportError(
            f"{where}: layers of type {kind!r} read {own[0]} key/value heads of width {own[1]}, but the target's have "
            f"{theirs[0]} of {theirs[1]}; target and head do not belong together"
        )


def _check_centroids(head: Checkpoint, centroids: int, width: int, vocab: int) -> None:
    """Raises ExportError unless the tokens are cut into groups of equal size."""
    head.require(CENTROIDS, (centroids, width))
    stored = head.require(TOKEN_ORDERING, (vocab,))
    if vocab % centroids or stored.dtype not in ("I32", "I64"):
        raise ExportError(
            f"{stored.file}: tensor {stored.name!r}, stored as {stored.dtype}, does not cut {vocab} tokens into "
            f"{centroids} groups; the checkpoint is damaged"
        )
