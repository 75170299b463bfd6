"""Trees of the kind `sequoia`: of all static trees the one that promises the most tokens per second (Sequoia, arXiv
2402.12374, section 3), for the acceptance that was measured and the costs of this machine.

Of a static tree the ranks of the nodes are fixed, and not their tokens: "the second child of the first child" is a node
of it. With p[d, r], the chance that the proposal of rank r is emitted after an accepted node of depth d, a node is
reached with the product of the chances on its path, and a tree emits as many tokens as these products add up to. The
best subtree of n nodes below a node of depth d gives its child of rank 0 the best subtree of some s nodes, and the
children of higher ranks the rest: so the best trees of all sizes and depths come from smaller ones by dynamic
programming. Among them is the one with the highest rate

    tokens / (seconds of verifying n nodes + seconds of the head's passes)

A cost-aware tree (cost_aware.py) looks at each proposal's own probability instead, and so differs from one verification
to the next; this one stays until chances or costs have moved.

Shapes: L depths of a parent, K ranks, N nodes of the largest tree.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from eagle_runtime.base.tree import Int, Tree, root_only, with_nodes
from eagle_runtime.core.accept import Step
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.head import WINDOW, DraftHead, Proposal, Ranker, States, WrappedHead
from eagle_runtime.drafting.acceptance import DraftGain, UsualGain
from eagle_runtime.drafting.cost_measurement import CycleTimer
from eagle_runtime.drafting.cost_model import HEAD_ROWS, LARGEST, Seconds
from eagle_runtime.drafting.cost_storage import CostSource
from eagle_runtime.drafting.coupling import RankedHead
from eagle_runtime.drafting.head import NEVER
from eagle_runtime.drafting.rank_acceptance import LEVELS, RANKS, Chances, Plan, RankCounts
from eagle_runtime.drafting.shapes import StaticTree

Choice = tuple[int, ...]  # ranks on the path from the root to a node

# A plan is made again after so many verifications, and after a share of all that were counted before
# [+1.6 %, +1.3 %; +0.7 %, -0.5 %].
LEAST_NEW, SHARE_NEW = 16, 0.25
FEW_NODES = 16  # that trees have at most, unless larger ones could be better: saves time, and changes no plan


class BestTrees(NamedTuple):
    """The best trees of at most D levels. tokens [N + 1]: that a tree of at most n nodes, root included, is expected to
    emit; taken: for each depth d < D [K, N]: of m nodes for the children of ranks k and higher below a node of depth d,
    those that the subtree of rank k gets."""

    tokens: Seconds
    taken: tuple[Int, ...]

    def choices(self, nodes: int) -> tuple[Choice, ...]:
        """The nodes of the best tree of at most `nodes` nodes, sorted by depth, then rank."""
        found: list[Choice] = []

        def add(above: Choice, count: int) -> None:
            left = count - 1
            for rank, taken in enumerate(self.taken[len(above)] if len(above) < len(self.taken) else ()):
                own = int(taken[left])
                if own:
                    found.append((*above, rank))
                    add((*above, rank), own)
                    left -= own

        add((), nodes)
        return tuple(sorted(found, key=_place))


def best_trees(chances: Chances, most: int) -> list[BestTrees]:
    """The best trees of at most 1, 2 ... L levels, of each number of nodes up to `most`. chances [L, K].

    Subtrees with a level less, at all depths at once, make those with a level more."""
    depths, ranks = chances.shape
    room, own = np.arange(most)[:, None], np.arange(most + 1)[None]
    rest, fits = np.maximum(room - own, 0), own <= room  # [N, N + 1]: nodes that are left for higher ranks
    below = np.tile(np.minimum(np.arange(most + 1.0), 1), (depths + 1, 1))  # [L + 1, N + 1]: without a level, itself
    taken: list[Int] = []  # one [L - levels + 1, K, N] for each number of levels
    found = []
    for levels in range(1, depths + 1):
        count = depths - levels + 1  # depths whose subtrees may have so many levels
        forest = np.zeros((count, most))  # of the children of ranks k and higher, by their nodes together
        split = np.zeros((count, ranks, most), np.int64)
        for rank in reversed(range(ranks)):
            gained = chances[:count, rank, None] * below[1 : count + 1]
            options = np.where(fits, gained[:, None] + forest[:, rest], -1.0)
            split[:, rank] = options.argmax(2)
            forest = np.take_along_axis(options, split[:, rank, :, None], 2)[..., 0]
        below = np.concatenate([np.zeros((count, 1)), 1 + forest], 1)
        taken.append(split)
        found.append(BestTrees(below[0], tuple(taken[levels - 1 - depth][depth] for depth in range(levels))))
    return found


def planned(chances: Chances, verify: Seconds, level: Seconds, free: bool) -> Plan:
    """The tree with the highest rate of those that hold at least one drafted token.

    chances [L, K]; verify[n - 1]: seconds of verifying n nodes, 2 or more; level[r]: of the head's pass over r rows.
    free: whether all levels cost one pass, whose seconds are those of the most rows."""
    most = min(FEW_NODES, len(verify))
    while True:
        trees = best_trees(chances, most)
        # [L, N - 1]: tokens of the trees of 2 ... nodes, those beyond `most` gaining what the last node gains, which is
        # more than they can: further nodes are less likely.
        tokens = np.stack([one.tokens for one in trees])[:, 2:]
        last = tokens[:, -1:] - (tokens[:, -2:-1] if most > 2 else 1)
        beyond = tokens[:, -1:] + last * np.arange(1, len(verify) - most + 1)
        bounds = np.concatenate([tokens, beyond], 1)
        # Every pass below the root over one row, so that no tree is faster than this.
        below = np.arange(len(trees))[:, None] * level[1]
        passes = level[-1] if free else level[_read(np.minimum(bounds, len(level) - 1))] + below
        bounds = bounds / (verify[1:] + passes)
        plan, rate = _best_of(trees, bounds[:, : most - 1], chances, verify, level, free)
        if most == len(verify) or bounds[:, most - 1 :].max() <= rate:
            return plan
        most = min(2 * most, len(verify))


def _best_of(
    trees: Sequence[BestTrees], bounds: Seconds, chances: Chances, verify: Seconds, level: Seconds, free: bool
) -> tuple[Plan, float]:
    """The plan of the highest rate, and that rate. bounds [L, N - 1]: rates that trees of 2 ... nodes cannot exceed;
    the rest as in `planned`."""
    best, plan = 0.0, None
    for place in np.argsort(-bounds, axis=None):
        levels, nodes = np.unravel_index(place, bounds.shape)
        if bounds[levels, nodes] <= best:
            break
        choices = trees[levels].choices(int(nodes) + 2)
        tokens = float(trees[levels].tokens[nodes + 2])
        inner = sorted({choice[:-1] for choice in choices}, key=_place)
        fed = np.bincount([len(choice) for choice in inner])[1:]  # rows of each pass below the root
        spent = float(level[-1] if free else level[_read(np.array(tokens))] + level[fed].sum())
        rate = tokens / (float(verify[len(choices)]) + spent)
        if rate > best:
            best, plan = rate, Plan(StaticTree(choices), {choice: row for row, choice in enumerate(inner)}, spent)
    assert plan is not None  # tokens and seconds are above 0
    return plan, best


def _place(choice: Choice) -> tuple[int, Choice]:
    """Sorts choices by depth, then rank."""
    return len(choice), choice


def _read(tokens: Seconds) -> Int:
    """Rows that the head reads before it drafts: of the tokens that the last tree emitted."""
    return np.rint(tokens).astype(np.int64)


class SequoiaDrafter(Drafter):
    """Drafts the planned tree. One object per generation; counts and the usual gain outlive it."""

    def __init__(
        self,
        head: DraftHead,
        costs: CostSource,
        counts: RankCounts,
        usual: UsualGain,
        *,
        top_k: int = 10,
        ranker: Ranker | None = None,
    ) -> None:
        """costs: learn from each cycle's passes. usual: what drafts gained of late; where this text's lose, the head
        pauses. top_k: most children per node. ranker: as in CostAwareDrafter."""
        self._timer = CycleTimer(costs, time.perf_counter)
        self._head = _WatchedHead(head if ranker is None else RankedHead(head, ranker), self._timer)
        self._costs = costs
        self._counts = counts
        self._gain = DraftGain(usual)
        self._ranks = min(top_k, head.top_k, RANKS)
        self._levels = min(LEVELS, 1 + head.scratch // self._ranks)
        self._plan: Plan | None = None  # of the last tree
        self._cost = 0.0  # of the last tree, in verifications of one token; 0: the head took no part

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        self._timer.begin(len(tokens) - 1)
        self._cost = 0.0
        self._head.forget()
        plain = self._costs.asks_for_plain or (self._costs.others == 0 and self._gain.pauses())
        if plain or max_nodes < 2:
            return root_only(tokens[-1])
        self._plan = plan = self._planned(len(tokens))
        costs = self._costs.now
        first = self._head.catch_up(tokens)
        if first.log_probs[0, 0] > NEVER / 2:
            tree = plan.tree.grow(self._head, tokens[-1], first, max_nodes)
            # Without nodes that cannot come: of a grammar, or beyond what the head proposes for.
            tree = with_nodes(tree, np.flatnonzero(tree.scores[1:] > NEVER / 2))
        else:
            tree = root_only(tokens[-1])
        self._head.finish()
        if max_nodes <= len(plan.tree.choices):
            self._head.forget()  # a part of the tree, whose rows are others
        verified = float(costs.target.at(len(tokens))[min(tree.num_nodes, LARGEST)])
        self._cost = (plan.spent + verified) / costs.plain_at(len(tokens))
        return tree

    def learn(self, step: Step) -> None:
        """Count the ranks of what was emitted, and report the cycle's seconds to the costs."""
        if self._plan is not None and self._head.proposals:
            self._counts.learn(_ranks_of(step.tokens, self._plan.rows, self._head.proposals, self._ranks))
            self._head.forget()
        if self._cost and self._costs.others == 0:
            self._gain.note(len(step.tokens), self._cost)
        self._timer.end(step.nodes)

    def _planned(self, context: int) -> Plan:
        """The plan, made again where enough was counted since, or the costs are others."""
        costs, counts, others = self._costs.now, self._counts, self._costs.others
        if others in counts.plans:
            plan, of_costs, seen = counts.plans[others]
            since = counts.verifications - seen
            if since < LEAST_NEW or (of_costs is costs and since < SHARE_NEW * seen):
                return plan
        assert costs.head is not None
        level = costs.head.at(context)
        if free := self._head.free_levels:
            level = level[: self._head.row_counts[-1] + 1]
        chances = counts.chances()[: self._levels, : self._ranks]
        plan = planned(chances, costs.target.at(context)[1:], level, free)
        counts.plans[others] = plan, costs, counts.verifications
        return plan


def _ranks_of(emitted: Int, rows: dict[Choice, int], proposals: Sequence[Proposal], most: int) -> list[int | None]:
    """The rank of each emitted token among the proposals for it, as far as there were some. emitted [a + 1]."""
    tokens = np.concatenate([proposal.tokens[:, :most] for proposal in proposals])
    log_probs = np.concatenate([proposal.log_probs[:, :most] for proposal in proposals])
    ranks: list[int | None] = []
    choice: Choice = ()
    for token in emitted.tolist():
        row = rows.get(choice)
        if row is None or row >= len(tokens):
            break
        found = np.flatnonzero((tokens[row] == token) & (log_probs[row] > NEVER / 2))
        ranks.append(int(found[0]) if len(found) else None)
        if len(found) == 0:
            break
        choice = (*choice, int(found[0]))
    return ranks


class _WatchedHead(WrappedHead):
    """A head whose passes are timed, and whose proposals of the newest tree are kept, one after the other."""

    def __init__(self, head: DraftHead, timer: CycleTimer) -> None:
        super().__init__(head)
        self._timer = timer
        self._lap: tuple[int, int] = (0, 0)  # rows and context of the pass that is timed
        self.proposals: list[Proposal] = []

    def forget(self) -> None:
        """Keep no proposals of the newest tree."""
        self.proposals = []

    def catch_up(self, tokens: Sequence[int], ranker: Ranker | None = None, rows: int | None = None) -> Proposal:
        context, read = self.cache.length, min(self.unread, WINDOW)
        counts = self.row_counts[-1] if self.free_levels else read
        self._lap = counts if context and read <= HEAD_ROWS[-1] else 0, context
        self._timer.start_lap()
        proposal = self._head.catch_up(tokens, ranker, rows)
        self.proposals = [proposal]
        return proposal

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        if not self.free_levels:
            self._timer.end_lap(*self._lap)
            self._lap = len(tokens), self.cache.length
        proposal = self._head.feed(tokens, hidden, parents, committed, depth)
        self.proposals.append(proposal)
        return proposal

    def finish(self) -> None:
        """The tree is grown."""
        self._timer.end_lap(*self._lap)
