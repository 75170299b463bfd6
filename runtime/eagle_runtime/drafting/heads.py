"""What drafts with the graph of each kind of head (HEADS)."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from eagle_runtime.bundle.head import HeadKind
from eagle_runtime.bundle.manifest import Manifest
from eagle_runtime.core.head import HeadOfText
from eagle_runtime.core.session import OneCallSession, Session
from eagle_runtime.drafting.ahead_heads import HydraHeads, MedusaHeads
from eagle_runtime.drafting.assistant_head import AssistantHead
from eagle_runtime.drafting.block_head import BlockHead
from eagle_runtime.drafting.head import Head
from eagle_runtime.drafting.one_call import OneCallHead
from eagle_runtime.drafting.transitions import Transitions

# Kinds but for block heads, which head_of makes.
HEADS: Mapping[HeadKind, Callable[[Session, int, int, int], HeadOfText]] = {
    "eagle1": Head,
    "eagle3": Head,
    "mtp": Head,
    "assistant": AssistantHead,
    "medusa": MedusaHeads,
    "hydra": HydraHeads,
}


def head_of(
    session: Session, manifest: Manifest, capacity: int, scratch: int, transitions: Transitions | None
) -> HeadOfText:
    """Returns the head of a bundle that has one. capacity: tokens of its cache. scratch: as in Head. transitions: a
    block head's."""
    assert manifest.head is not None
    vocab = manifest.target.vocab_size
    if manifest.head.block is not None:
        return BlockHead(session, capacity, scratch, manifest.head.block, transitions, vocab)
    if isinstance(session, OneCallSession):  # an engine that grows whole trees
        return OneCallHead(session, capacity, vocab)
    return HEADS[manifest.head.kind](session, capacity, scratch, vocab)
