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

Maker = Callable[[Session, Manifest, int, int, Transitions | None], HeadOfText]  # as head_of


def _recurrent(
    session: Session, manifest: Manifest, capacity: int, scratch: int, transitions: Transitions | None
) -> HeadOfText:
    vocab = manifest.target.vocab_size
    if isinstance(session, OneCallSession):  # an engine that grows whole trees
        return OneCallHead(session, capacity, vocab)
    return Head(session, capacity, scratch, vocab)


def _block(
    session: Session, manifest: Manifest, capacity: int, scratch: int, transitions: Transitions | None
) -> HeadOfText:
    assert manifest.head is not None and manifest.head.block is not None  # read_manifest
    return BlockHead(session, capacity, scratch, manifest.head.block, transitions, manifest.target.vocab_size)


HEADS: Mapping[HeadKind, Maker] = {
    "eagle1": _recurrent,
    "eagle3": _recurrent,
    "mtp": _recurrent,
    "block": _block,
    "assistant": lambda session, manifest, capacity, scratch, _: AssistantHead(
        session, capacity, scratch, manifest.target.vocab_size
    ),
    "medusa": lambda session, manifest, capacity, scratch, _: MedusaHeads(
        session, capacity, scratch, manifest.target.vocab_size
    ),
    "hydra": lambda session, manifest, capacity, scratch, _: HydraHeads(
        session, capacity, scratch, manifest.target.vocab_size
    ),
}


def head_of(
    session: Session, manifest: Manifest, capacity: int, scratch: int, transitions: Transitions | None
) -> HeadOfText:
    """Returns the head of a bundle that has one. capacity: tokens of its cache. scratch: as in Head. transitions: a
    block head's."""
    assert manifest.head is not None
    return HEADS[manifest.head.kind](session, manifest, capacity, scratch, transitions)
