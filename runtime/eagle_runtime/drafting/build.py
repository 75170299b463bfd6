"""Builds the drafters that methods share, with the constraint of the output if there is one."""

from __future__ import annotations

from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.head import DraftHead
from eagle_runtime.drafting.acceptance import AcceptanceStats
from eagle_runtime.drafting.constrained import ConstrainedHead, constrained
from eagle_runtime.drafting.cost_aware import CostAwareDrafter
from eagle_runtime.drafting.cost_storage import CostSource
from eagle_runtime.drafting.coupling import GreedyRanker, GumbelRanker
from eagle_runtime.drafting.matches import EarlierText
from eagle_runtime.drafting.method import Choice, Parts
from eagle_runtime.drafting.rank_acceptance import Key
from eagle_runtime.drafting.sequoia import SequoiaDrafter
from eagle_runtime.drafting.shapes import EagleDrafter


def proposer_of(choice: Choice, parts: Parts) -> tuple[DraftHead | None, CostSource]:
    """Returns what proposes the tokens of a method's trees, None for one without a head, and what its passes cost."""
    if choice.method.proposer == "draft model":
        assert parts.draft_costs is not None
        return parts.draft_models[0], parts.draft_costs
    return parts.head if choice.method.proposer == "head" else None, parts.costs


def shaped_drafter(choice: Choice, parts: Parts) -> Drafter:
    """Returns a drafter of trees of the chosen shape."""
    head, _ = proposer_of(choice, parts)
    assert head is not None
    own = allowed_head(head, parts)
    return constrained(eagle_drafter(own, choice, parts), parts.lookahead, prune=True, head=own)


def eagle_drafter(head: DraftHead, choice: Choice, parts: Parts) -> EagleDrafter:
    """Returns a drafter of one head's proposals in the chosen shape, without the constraint."""
    assert choice.shape is not None
    ranker = GumbelRanker(parts.sampler) if parts.sampler.params.temperature > 0 else None
    return EagleDrafter(head, choice.shape, ranker)


def cost_aware_drafter(
    choice: Choice,
    parts: Parts,
    proposer: tuple[DraftHead, CostSource] | None = None,
    *,
    lookup: bool = False,
    index: EarlierText | None = None,
) -> Drafter:
    """Returns a drafter of trees that the costs size. proposer: None for the method's (proposer_of); without a head
    matches alone are drafted. lookup: whether matches are drafted. index: finds them, and the head counts them in; None
    for an NgramIndex."""
    head, costs = proposer or proposer_of(choice, parts)
    greedy = parts.sampler.params.temperature == 0
    stats = parts.acceptance.setdefault((choice.method.name, greedy, parts.lookahead is not None), AcceptanceStats())
    ranker = GreedyRanker() if greedy else GumbelRanker(parts.sampler)
    own = None if head is None else allowed_head(head, parts)
    drafter = CostAwareDrafter(
        own,
        costs,
        stats,
        top_k=choice.top_k,
        lookup=lookup,
        index=index,
        predicted=parts.predicted,
        lookahead=parts.lookahead,
        datastore=parts.datastore if lookup else None,
        ranker=ranker,
    )
    return constrained(drafter, parts.lookahead, head=own)


def sequoia_drafter(choice: Choice, parts: Parts) -> Drafter:
    """Returns a drafter of the best static tree."""
    head, costs = proposer_of(choice, parts)
    assert head is not None
    key = Key(choice.method.name, parts.sampler.params.temperature == 0, parts.lookahead is not None)
    stats = parts.acceptance.setdefault((f"{choice.method.name}:sequoia", *key[1:]), AcceptanceStats())
    own = allowed_head(head, parts)
    ranker = None if key.greedy else GumbelRanker(parts.sampler)
    drafter = SequoiaDrafter(own, costs, parts.ranks.of(key), stats.usual_gain(), top_k=choice.top_k, ranker=ranker)
    return constrained(drafter, parts.lookahead, head=own)


def allowed_head(head: DraftHead, parts: Parts) -> DraftHead:
    """Returns the head, or with a constraint one whose proposals follow it."""
    return head if parts.lookahead is None else ConstrainedHead(head, parts.lookahead)
