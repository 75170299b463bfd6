"""Builds the drafter that choose.py describes, with the constraint of the output if there is one."""

from __future__ import annotations

from eagle_runtime.constraints.lookahead import Lookahead
from eagle_runtime.drafting.acceptance import AcceptanceStats
from eagle_runtime.drafting.choose import CostAware, DatastoreTree, FixedTree, LookupChain, Method
from eagle_runtime.drafting.constrained import ConstrainedDrafter, ConstrainedHead, PrunedDrafter
from eagle_runtime.drafting.cost_aware import CostAwareDrafter
from eagle_runtime.drafting.costs.storage import LearnedCosts
from eagle_runtime.drafting.coupling import GreedyRanker, GumbelRanker, NoiseWeight, RankedHead
from eagle_runtime.drafting.datastore import Datastore, DatastoreDrafter
from eagle_runtime.drafting.drafter import Drafter
from eagle_runtime.drafting.head import DraftHead
from eagle_runtime.drafting.jacobi import JacobiDrafter, Window
from eagle_runtime.drafting.lookup import LookupDrafter
from eagle_runtime.drafting.predicted import PredictedText
from eagle_runtime.drafting.recycling import HostCosts, RecyclingDrafter, RecyclingHead
from eagle_runtime.drafting.shapes import EagleDrafter
from eagle_runtime.sampling import Sampler

Acceptance = dict[tuple[str, bool, bool], AcceptanceStats]  # by (method, whether greedy, whether constrained)


def build_drafter(
    choice: FixedTree | LookupChain | DatastoreTree | Window | CostAware,
    method: Method,
    sampler: Sampler,
    head: DraftHead | None,
    costs: LearnedCosts,
    acceptance: Acceptance,
    lookahead: Lookahead | None = None,
    predicted: PredictedText | None = None,
    datastore: Datastore | None = None,
    recycling: RecyclingHead | None = None,
) -> Drafter:
    """Returns the drafter of one generation. sampler: draws its tokens. head: None only where the choice asks for none.
    acceptance: gets an entry for this kind of generation, if the drafter learns. lookahead: of the constraint.
    predicted: a text that is searched for matches too, as is the datastore, which a DatastoreTree needs.
    recycling: drafts from a model's habits, in place of the head."""
    greedy = sampler.params.temperature == 0
    head = recycling or head
    if lookahead is not None and head is not None:
        head = ConstrainedHead(head, lookahead)
    drafter: Drafter
    if isinstance(choice, CostAware):
        stats = acceptance.setdefault((method, greedy, lookahead is not None), AcceptanceStats())
        ranker = GreedyRanker() if greedy else GumbelRanker(sampler, stats.noise_weight)
        ranked = RankedHead(head, ranker) if choice.head and head is not None else None
        drafter = CostAwareDrafter(
            ranked,
            costs if recycling is None else HostCosts(costs),
            stats,
            top_k=choice.top_k,
            lookup=choice.lookup,
            index=None if recycling is None else recycling.index,
            predicted=predicted,
            lookahead=lookahead,
            datastore=datastore if choice.lookup else None,
            weighed=recycling is not None,
        )
    elif isinstance(choice, Window):
        drafter = JacobiDrafter(choice, lookahead)
    else:
        if isinstance(choice, LookupChain):
            drafter = LookupDrafter(choice.length, predicted)
        elif isinstance(choice, DatastoreTree):
            assert datastore is not None
            drafter = DatastoreDrafter(datastore, choice.nodes, choice.depth, predicted)
        else:
            assert head is not None
            drafter = EagleDrafter(
                head if greedy else RankedHead(head, GumbelRanker(sampler, NoiseWeight())), choice.shape
            )
        drafter = drafter if lookahead is None else PrunedDrafter(drafter, lookahead)
    drafter = drafter if lookahead is None else ConstrainedDrafter(drafter, lookahead)
    return drafter if recycling is None else RecyclingDrafter(drafter, recycling.habits)
