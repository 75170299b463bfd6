"""Medusa's and Hydra's heads in checkpoints: what producers call their tensors, and their sizes by the tensors' shapes.

    0.0.linear.weight, 0.1.weight                 -> heads.0.blocks.0.linear.weight, heads.0.lm_head.weight
    hydra_mlp.0.0.linear.weight, hydra_lm_head.0.weight

Official names: heads.{head}.blocks.{block}.linear, .res_connection (Hydra's first block), heads.{head}.lm_head.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from eagle_export.base.errors import ExportError
from eagle_export.heads.prediction import MEDUSA_HEADS
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.stored_tensors import StoredTensor

MOST_HEADS = 32  # heads
# Of Hydra's modules: their own copy of the target's embedding, and parts of architectures that are not read.
OTHER_PARTS = ("prefix_embeding_layer.", "cross_attn.", "self_attn.", "eagle_")
# Settings of config.json -> what the runtime does; other values are refused. Absent settings are not looked at.
HYDRA_SETTINGS: dict[str, tuple[object, str]] = {
    "hydra_head_arch": ("mlp", "only heads of architecture 'mlp' are read"),
    "grounded_heads": (True, "only grounded heads are read; others are Medusa's"),
    "hidden_state_offset": (0, "only heads that read the last hidden state are read"),
}


@dataclass(frozen=True, slots=True)
class Ahead:
    """What only such heads have. count: of heads, so of positions that are drafted. blocks: residual blocks of each.
    bias: whether their linear layers have one. own_lm_heads: whether every head has an LM head; else all have the
    target's. lm_bias: whether the LM heads have a bias. grounded: whether a head reads the tokens since the feature
    (Hydra)."""

    count: int
    blocks: int
    bias: bool
    own_lm_heads: bool
    lm_bias: bool
    grounded: bool


def read_ahead(head: Checkpoint, hidden: int, vocab: int, *, grounded: bool) -> Ahead:
    """Returns the sizes of the heads of a folder with the official names, for a target of this hidden size and
    vocabulary. grounded: whether they are Hydra's. Raises ExportError."""
    _check_settings(head, grounded, vocab)
    count = _count(head, r"heads\.(\d+)\.")
    blocks = [_count(head, rf"heads\.{index}\.blocks\.(\d+)\.") for index in range(count)]
    stated = ("hydra_num_heads", "hydra_num_layers") if grounded else ("medusa_num_heads", "medusa_num_layers")
    if head.config.get("model_type") == "medusa" and not grounded:  # vLLM's config
        stated = ("num_heads", "num_hidden_layers")
    _check_counts(head, count, blocks, *stated)
    sizes = Ahead(
        count=count,
        blocks=blocks[0],
        bias="heads.0.blocks.0.linear.bias" in head.tensors,
        own_lm_heads="heads.0.lm_head.weight" in head.tensors,
        lm_bias="heads.0.lm_head.bias" in head.tensors,
        grounded=grounded,
    )
    for name, shape in shapes_of(sizes, hidden, vocab).items():
        head.require(name, shape)
    return sizes


def shapes_of(sizes: Ahead, hidden: int, vocab: int) -> dict[str, tuple[int, ...]]:
    """Returns the official name and shape of every tensor of such heads."""
    shapes: dict[str, tuple[int, ...]] = {}
    for index in range(sizes.count):
        for block in range(sizes.blocks):
            inputs = index + 2 if sizes.grounded and block == 0 else 1
            for layer in ("linear", "res_connection") if inputs > 1 else ("linear",):
                name = f"heads.{index}.blocks.{block}.{layer}"
                shapes[f"{name}.weight"] = (hidden, inputs * hidden)
                if sizes.bias:
                    shapes[f"{name}.bias"] = (hidden,)
        if sizes.own_lm_heads:
            shapes[f"heads.{index}.lm_head.weight"] = (vocab, hidden)
            if sizes.lm_bias:
                shapes[f"heads.{index}.lm_head.bias"] = (vocab,)
    return shapes


def _check_settings(head: Checkpoint, grounded: bool, vocab: int) -> None:
    where, config = head.folder / "config.json", head.config
    if head.integer("vocab_size", vocab) != vocab:
        raise ExportError(
            f"{where}: the heads' vocabulary has {config['vocab_size']} tokens, the target's {vocab}; target and heads "
            "do not belong together"
        )
    for key, (read, why) in HYDRA_SETTINGS.items() if grounded else ():
        if config.get(key, read) != read:
            raise ExportError(f"{where}: {key} is {config[key]!r}, but {why}")
    if config.get("truncated_vocab_size") not in (None, vocab) or "token_map" in head.tensors:
        raise ExportError(f"{head.folder}: heads with a vocabulary of their own are not supported")
    if config.get("original_lm_head"):
        raise ExportError(f"{where}: original_lm_head is set: heads that share one LM head of their own are not read")


def _count(head: Checkpoint, pattern: str) -> int:
    """Returns how many heads, or blocks of a head, the names number from 0 on."""
    numbers = {int(match[1]) for name in head.tensors if (match := re.match(pattern, name))}
    if numbers != set(range(len(numbers))) or len(numbers) > MOST_HEADS:
        raise ExportError(
            f"{head.folder}: its tensors are of heads or blocks {sorted(numbers)[:MOST_HEADS]}, which must be numbered "
            f"from 0 on and be at most {MOST_HEADS}; the checkpoint is incomplete"
        )
    return len(numbers)


def _check_counts(head: Checkpoint, count: int, blocks: list[int], heads_key: str, blocks_key: str) -> None:
    """Raises ExportError where heads have different numbers of blocks, or the config states more heads than there are,
    or other blocks. Medusa's published configs state fewer heads than their files hold, and its code reads those."""
    where, config = head.folder / "config.json", head.config
    if len(set(blocks)) != 1:
        raise ExportError(
            f"{head.folder}: its heads have {blocks} blocks, but must have as many each; it is incomplete"
        )
    stated = {key: config[key] for key in (heads_key, blocks_key) if type(config.get(key)) is int}
    if stated.get(heads_key, count) > count:
        raise ExportError(
            f"{where}: {heads_key} is {stated[heads_key]}, but the tensors are of {count} heads; it is incomplete"
        )
    if stated.get(blocks_key, blocks[0]) != blocks[0]:
        raise ExportError(
            f"{where}: {blocks_key} is {stated[blocks_key]}, but the tensors are of {blocks[0]} blocks per head; "
            "config and weights do not belong together"
        )


@dataclass(frozen=True, slots=True)
class AheadNames:
    """prefixes: what all names may begin with; the first that the file has is taken off. parts: pattern of a name
    without it -> official name. mark: a name that every such file has. alone: whether the folder holds
    nothing else, so that every other name is kept."""

    prefixes: tuple[str, ...]
    parts: tuple[tuple[str, str], ...]
    mark: str
    alone: bool = True

    def held_by(self, head: Checkpoint) -> bool:
        """Whether a folder has such heads."""
        return self._prefix(head) + self.mark in head.tensors

    def official(self, head: Checkpoint) -> Mapping[str, StoredTensor]:
        """Returns the heads' tensors by their official names. Raises ExportError for two tensors of one name."""
        prefix, named = self._prefix(head), dict[str, StoredTensor]()
        for name, tensor in head.tensors.items():
            new = self._renamed(name.removeprefix(prefix)) if name.startswith(prefix) else None
            new = name if new is None and (self.alone or name.startswith(prefix)) else new
            if new in named:
                raise ExportError(
                    f"{head.folder} holds tensors {named[new].name!r} and {name!r}, which are one in this layout; the "
                    "checkpoint is damaged"
                )
            if new is not None:
                named[new] = tensor
        return named

    def _prefix(self, head: Checkpoint) -> str:
        starts = (each for each in self.prefixes if any(name.startswith(each) for name in head.tensors))
        return next(starts, "")

    def _renamed(self, name: str) -> str | None:
        for pattern, official in self.parts:
            if (match := re.fullmatch(pattern, name)) is not None:
                return match.expand(official)
        return None


_MEDUSA = (
    (r"(\d+)\.(\d+)\.linear\.(weight|bias)", r"heads.\1.blocks.\2.linear.\3"),
    (r"(\d+)\.\d+\.weight", r"heads.\1.lm_head.weight"),
)
MEDUSA = AheadNames((), _MEDUSA, mark="0.0.linear.weight")
MEDUSA_IN_TARGET = AheadNames((MEDUSA_HEADS,), _MEDUSA, mark="0.0.linear.weight", alone=False)
VLLM_MEDUSA = AheadNames(
    ("medusa_heads.",),
    (
        (r"blocks\.(\d+)\.layers\.(\d+)\.(weight|bias)", r"heads.\1.blocks.\2.linear.\3"),
        (r"lm_heads\.(\d+)\.weight", r"heads.\1.lm_head.weight"),
    ),
    mark="blocks.0.layers.0.weight",
)
HYDRA = AheadNames(
    ("hydra_head.",),
    (
        (r"hydra_mlp\.(\d+)\.(\d+)\.(linear|res_connection)\.(weight|bias)", r"heads.\1.blocks.\2.\3.\4"),
        (r"hydra_lm_head\.(\d+)\.(weight|bias)", r"heads.\1.lm_head.\2"),
        (r"input_embed_fn\.weight", "embed_tokens.weight"),
    ),
    mark="hydra_mlp.0.0.linear.weight",
)
