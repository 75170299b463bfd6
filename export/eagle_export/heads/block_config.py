"""What a head's config says of blocks."""

from __future__ import annotations

from dataclasses import dataclass

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import LM_HEAD, Checkpoint
from eagle_runtime.bundle.manifest import BLOCK_RANGES, BlockSpec

MARKOV_TABLE = "markov_head.markov_w1.weight"
STATE_READER = "input_fc.weight"
TRANSITIONS = "draft/transitions.safetensors"  # in a bundle


@dataclass(frozen=True, slots=True)
class Block:
    """What only block heads have. size: rows of a block (B), the root's included. anchor: whether the root's row drafts
    (then B tokens are drafted, else B - 1). causal: whether a row of the block sees no later one. mask_id: the token
    whose embedding the other rows have; None for an embedding of their own. markov_rank: of the transitions, 0 for
    none. own_lm_head: whether the LM head is the head's own; else it is the target's. reads_state: whether all rows
    also read the target's last state before the root, as an EAGLE head does (heads of eagle-train)."""

    size: int
    anchor: bool
    causal: bool
    mask_id: int | None
    markov_rank: int
    own_lm_head: bool
    reads_state: bool = False

    def spec(self, state_size: int) -> BlockSpec:
        """What the runtime needs of it. state_size: as in HeadConfig."""
        transitions = TRANSITIONS if self.markov_rank else None
        return BlockSpec(self.size, self.anchor, self.causal, self.mask_id or 0, transitions, state_size)


def read_block(head: Checkpoint, vocab: int, target_layers: int, target_hidden: int) -> Block:
    """Reads the block of a head with the official names. All sizes are the target's. Raises ExportError."""
    where, (least, most) = head.folder / "config.json", BLOCK_RANGES["size"]
    if head.integer("num_target_layers", target_layers) != target_layers:
        raise ExportError(
            f"{where}: num_target_layers is {head.config['num_target_layers']}, but the target has {target_layers}; "
            "target and head do not belong together"
        )
    size = head.integer("block_size")
    if not least <= size <= most:
        raise ExportError(f"{where}: block_size is {size}, but must be {least} to {most}")
    if STATE_READER in head.tensors:
        hidden = head.require("fc.weight", (None, None)).shape[0]
        head.require(STATE_READER, (hidden, hidden + target_hidden))
    own_lm_head = LM_HEAD in head.tensors
    if not own_lm_head and head.integer("draft_vocab_size", vocab) != vocab:
        raise ExportError(
            f"{where}: draft_vocab_size is {head.config['draft_vocab_size']}, but tensor {LM_HEAD!r} of that many rows "
            "is missing; the checkpoint is incomplete"
        )
    return Block(
        size=size,
        anchor=bool(head.config["sample_from_anchor"]),
        causal=bool(head.config["causal"]),
        mask_id=_mask_id(head, vocab),
        markov_rank=_markov_rank(head, vocab),
        own_lm_head=own_lm_head,
        reads_state=STATE_READER in head.tensors,
    )


def _mask_id(head: Checkpoint, vocab: int) -> int | None:
    """The token whose embedding stands for what is drafted; None if the head has an embedding for it."""
    where, stated = head.folder / "config.json", head.config.get("mask_token_id")
    if "mask_embedding" in head.tensors:
        head.require("mask_embedding", (1, 1, head.require("fc.weight", (None, None)).shape[0]))
        return None
    if type(stated) is not int or stated < 0:
        raise ExportError(
            f"{where}: mask_token_id is {stated!r}, but must be a token's id, and there is no tensor 'mask_embedding' "
            "or file mask_embedding.pt in its place"
        )
    if stated >= vocab:
        raise ExportError(
            f"{where}: mask_token_id is {stated}, outside the target's vocabulary of {vocab}; save the row that the "
            "head was trained with as mask_embedding.pt next to config.json"
        )
    return stated


def _markov_rank(head: Checkpoint, vocab: int) -> int:
    """Rank of the transitions; 0 without them."""
    stated, name = head.config.get("markov_rank"), MARKOV_TABLE
    rank = head.require(name, (vocab, None)).shape[1] if name in head.tensors else 0
    if stated is not None and stated != rank:
        tensors = f"tensor {name!r} has rank {rank}" if rank else f"tensor {name!r} is missing"
        raise ExportError(
            f"{head.folder}: markov_rank is {stated!r} in config.json, but {tensors}; config and weights do not belong "
            "together"
        )
    return rank
