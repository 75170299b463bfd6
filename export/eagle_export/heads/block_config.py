"""What a head's config says of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_export.checkpoint import Checkpoint
from eagle_export.errors import ExportError
from eagle_runtime.bundle.manifest import BLOCK_RANGES, BlockSpec


@dataclass(frozen=True, slots=True)
class Block:
    """What only block heads have. size: rows of a block (B), the root's included. anchor: whether the root's row drafts
    (then B tokens are drafted, else B - 1). causal: whether a row of the block sees no later one. mask_id: the token
    whose embedding the other rows have; None for an embedding of their own. markov_rank: of the transitions, 0 for
    none. own_lm_head: whether the LM head is the head's own; else it is the target's."""

    size: int
    anchor: bool
    causal: bool
    mask_id: int | None
    markov_rank: int
    own_lm_head: bool

    @property
    def spec(self) -> BlockSpec:
        """What the runtime needs of it."""
        return BlockSpec(self.size, self.anchor, self.causal, self.mask_id or 0, self.markov_rank > 0)


def read_block(head: Checkpoint, vocab: int) -> Block:
    """Reads the block of a head with the official names (block_layouts.py). Raises ExportError."""
    where, (least, most) = head.folder / "config.json", BLOCK_RANGES["size"]
    size = head.integer("block_size")
    if not least <= size <= most:
        raise ExportError(f"{where}: block_size is {size}, but must be {least} to {most}")
    own_mask = "mask_embedding" in head.tensors
    mask_id = None if own_mask else head.integer("mask_token_id")
    if mask_id is not None and not 0 <= mask_id < vocab:
        raise ExportError(
            f"{where}: mask_token_id is {mask_id}, outside the target's vocabulary of {vocab}; export the row that the "
            "head was trained with as tensor 'mask_embedding'"
        )
    rank = 0
    if "markov_head.markov_w1.weight" in head.tensors:
        rank = head.require("markov_head.markov_w1.weight", (vocab, None)).shape[1]
    return Block(
        size=size,
        anchor=bool(head.config["sample_from_anchor"]),
        causal=bool(head.config["causal"]),
        mask_id=mask_id,
        markov_rank=rank,
        own_lm_head="lm_head.weight" in head.tensors,
    )
