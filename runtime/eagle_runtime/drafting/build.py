"""Builds the drafters that methods share, with the constraint of the output if there is one."""

from __future__ import annotations

from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.head import DraftHead
from eagle_runtime.drafting.acceptance import AcceptanceStats
from eagle_runtime.drafting.constrained import ConstrainedHead, constrained
from eagle_runtime.drafting.cost_aware import CostAwareDrafter
from eagle_runtime.drafting.cost_storage import CostSource
from eagle_runtime.drafting.coupling import GreedyRanker, GumbelRanker, NoiseWeight
from eagle_runtime.drafting.head import Head
from eagle_runtime.drafting.matches import EarlierText
from eagle_runtime.drafting.method import Choice, Parts
from eagle_runtime.drafting.rank_acceptance import Key
from eagle_runtime.drafting.sequoia import SequoiaDrafter
from eagle_runtime.drafting.shapes import EagleDrafter


def shaped_drafter(choice: Choice, parts: Parts, head: DraftHead | None) -> Drafter:
    """Returns a drafter of trees of the chosen shape. head: proposes their tokens."""
    assert head is not None and choice.shape is not None
    own = allowed_head(head, parts)
    ranker = GumbelRanker(parts.sampler, NoiseWeight()) if parts.sampler.params.temperature > 0 else None
    return constrained(EagleDrafter(own, choice.shape, ranker), parts.lookahead, prune=True, head=own)


def cost_aware_drafter(
    choice: Choice,
    parts: Parts,
    head: DraftHead | None,
    costs: CostSource | None,
    *,
    lookup: bool = False,
    index: EarlierText | None = None,
) -> Drafter:
    """Returns a drafter of trees that the costs size. head: proposes tokens; None: matches alone are drafted. lookup:
    whether matches are drafted. index: finds them, and the head counts them in; None for an NgramIndex."""
    assert costs is not None
    greedy = parts.sampler.params.temperature == 0
    stats = parts.acceptance.setdefault((choice.method.name, greedy, parts.lookahead is not None), AcceptanceStats())
    ranker = GreedyRanker() if greedy else GumbelRanker(parts.sampler, stats.noise_weight)
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
        weighed=index is not None,
        ranker=None if head is None else ranker,
    )
    return constrained(drafter, parts.lookahead, head=own)


def sequoia_drafter(choice: Choice, parts: Parts, head: DraftHead | None, costs: CostSource | None) -> Drafter:
    """Returns a drafter of the best static tree. head: proposes its tokens; costs: of its passes and the target's."""
    assert head is not None and costs is not None
    key = Key(choice.method.name, parts.sampler.params.temperature == 0, parts.lookahead is not None)
    stats = parts.acceptance.setdefault((f"{choice.method.name}:sequoia", *key[1:]), AcceptanceStats())
    own = allowed_head(head, parts)
    ranker = None if key.greedy else GumbelRanker(parts.sampler, stats.noise_weight)
    drafter = SequoiaDrafter(own, costs, parts.ranks.of(key), stats.usual_gain, top_k=choice.top_k, ranker=ranker)
    return constrained(drafter, parts.lookahead, head=own)


def allowed_head(head: DraftHead, parts: Parts) -> DraftHead:
    """Returns the head, or with a constraint one whose proposals follow it."""
    if parts.lookahead is None:
        return head
    return ConstrainedHead(head, parts.lookahead, head if type(head) is Head else None)
