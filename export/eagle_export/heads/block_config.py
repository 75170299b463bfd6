"""What a head's config says of blocks."""

from __future__ import annotations

from dataclasses import dataclass


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
