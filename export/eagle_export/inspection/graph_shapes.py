"""The weights of a pair's two graphs as shapes: which linear layers there are, and what computes their inputs."""

from __future__ import annotations

import re
from collections.abc import Mapping
from math import prod

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.kinds import KINDS, placed
from eagle_export.inspection.sizes import Before, GraphShapes, Layers, alike
from eagle_export.reading.checkpoint import EMBEDDING, LM_HEAD, Checkpoint
from eagle_export.reading.families.family import Family
from eagle_export.reading.stored_tensors import StoredTensor

HEAD_EMBEDDING = "embed_tokens.weight"
MAPS = ("d2t", "t2d")
MAP_BYTES = 8  # of a draft token's id in the graph


def target_shapes(
    family: Family, target: Checkpoint, head: Checkpoint | None, config: HeadConfig | None
) -> GraphShapes:
    """The target's graph, with the part of an EAGLE-3 or block head that reads its taps."""
    tensors = _used(target)
    layers, numbers = [], 0
    for name, tensor in tensors.items():
        if name == EMBEDDING:
            continue
        if _is_layer(name, tensor) and not _is_router(family, name):
            layers.append(_layer(name, tensor, _before(name)))
        else:
            numbers += prod(tensor.shape)
    if head is not None and config is not None:
        for name in placed(config, head.tensors)[1]:
            tensor = head.tensors[name]
            if _is_layer(name, tensor):
                joined = name == "fc.weight" and config.tap_norm != "all"
                layers.append(_layer(f"head_reader.{name}", tensor, "joined" if joined else "norm"))
            else:
                numbers += prod(tensor.shape)
    rows, width = tensors[EMBEDDING].shape
    return GraphShapes(
        alike(layers), (EMBEDDING, (rows, width)), LM_HEAD not in tensors, numbers, chosen=_chosen(family, target)
    )


def draft_shapes(target: Checkpoint, head: Checkpoint, config: HeadConfig) -> GraphShapes:
    """The head's graph, with what it borrows of the target."""
    layers, numbers = [], 0
    for name in placed(config, head.tensors)[0]:
        tensor = head.tensors[name]
        if name in (*MAPS, HEAD_EMBEDDING):
            continue
        if _is_layer(name, tensor):
            joined = re.match(KINDS[config.kind].joined, name) is not None
            before: Before = "lm_head" if name.endswith(".lm_head.weight") else "joined" if joined else _before(name)
            layers.append(_layer(f"head.{name}", tensor, before))
        else:
            numbers += prod(tensor.shape)
    borrowed = target.tensors.get(LM_HEAD)
    if config.borrows_lm_head and borrowed is not None:
        layers.append(_layer(LM_HEAD, borrowed, "lm_head"))
    table = head.tensors.get(HEAD_EMBEDDING, target.tensors[EMBEDDING])
    copied = config.borrows or config.ahead is not None
    name = EMBEDDING if table is target.tensors[EMBEDDING] or copied else f"head.{HEAD_EMBEDDING}"
    rest = MAP_BYTES * config.draft_vocab_size if "d2t" in head.tensors else 0
    rows, width = table.shape
    tied = config.borrows_lm_head and borrowed is None
    return GraphShapes(alike(layers), (name, (rows if config.embeds else 0, width)), tied, numbers, rest)


def _used(checkpoint: Checkpoint) -> Mapping[str, StoredTensor]:
    """Without the tables of rotations, which old checkpoints hold and which are computed."""
    return {name: each for name, each in checkpoint.tensors.items() if not name.endswith("rotary_emb.inv_freq")}


def _is_layer(name: str, tensor: StoredTensor) -> bool:
    return len(tensor.shape) == 2 and name.endswith(".weight")


def _is_router(family: Family, name: str) -> bool:
    """Whether a matrix chooses experts: it is computed in a wider type, and stays as it is."""
    return family.experts is not None and name.endswith(f".{family.experts.block}.gate.weight")


def _chosen(family: Family, target: Checkpoint) -> float:
    """The share of a layer's experts that one row needs."""
    counts = None if family.experts is None else family.experts.counts(target.config)
    return 1.0 if counts is None else counts[1] / counts[0]


def _before(name: str) -> Before:
    if name == LM_HEAD:
        return "lm_head"
    part = name.split(".")[-2]
    return "product" if part in ("down_proj", "w2") else "attention" if part == "o_proj" else "norm"


def _layer(name: str, tensor: StoredTensor, before: Before) -> Layers:
    n, k = tensor.shape
    return Layers(name, before, (k, n))
