"""Draft trees sized by what they cost and by the tokens that they are expected to bring.

The chances of a tree's nodes to be accepted add up to the drafted tokens that a verification can be expected to
accept, so a tree of n nodes has an expected rate, in tokens per second:

    rate(n) = (1 + chances of the n - 1 best nodes) / (seconds of drafting + seconds of verifying n nodes)

(Sequoia, arXiv 2402.12374; OPT-Tree, arXiv 2406.17276). The head grows another level while that promises a higher rate;
the nodes with the highest rate are verified. Where its drafts lose time, the head pauses. With costs that are
learned while generating, trees depend on the clock, but the output never does.

Shapes: M candidates, N tree nodes, k children per node. A *value* is a log-chance of the whole path down to a node.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from eagle_runtime.base.tree import Float, Int, Tree, best_first, root_only, subtree
from eagle_runtime.core.accept import Step
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.core.head import WINDOW, DraftHead, Proposal, Ranker
from eagle_runtime.core.session import SharedPass
from eagle_runtime.drafting.acceptance import NEWEST, AcceptanceStats, DraftGain
from eagle_runtime.drafting.candidate_pool import MatchedChain, Pool
from eagle_runtime.drafting.cost_measurement import CycleTimer
from eagle_runtime.drafting.cost_model import HEAD_ROWS, LARGEST, Costs, Seconds
from eagle_runtime.drafting.cost_storage import CostSource
from eagle_runtime.drafting.coupling import RankedHead
from eagle_runtime.drafting.datastore import NOTHING, Datastore
from eagle_runtime.drafting.head import NEVER, Scratch
from eagle_runtime.drafting.matches import EarlierText, NgramIndex, PredictedText, longest_match
from eagle_runtime.sampling.grammar_matcher import Lookahead

MAX_LEVELS = 10  # below the root that the head grows [-4.2 %, -1.0 %]
MAX_MATCHED = 24  # tokens of an n-gram match [+1.0 %, -4.4 %]
# What a draft costs where texts share a pass, in plain tokens, and no table has: the host's work after a larger
# verification; and a text that is ahead leaves the pass earlier, which then costs the others more.
UNCOUNTED = 0.15
CHILD_CHANCES = (0.6, 0.15)  # mean chances of a node's two best children before any level was seen [-2.9 %, -0.7 %]


class CostAwareDrafter(Drafter):
    """Sizes every tree by the costs. One object per generation; what is learned of acceptance outlives it."""

    def __init__(
        self,
        head: DraftHead | None,
        costs: CostSource,
        acceptance: AcceptanceStats,
        *,
        top_k: int = 10,
        lookup: bool = False,
        index: EarlierText | None = None,
        predicted: PredictedText | None = None,
        lookahead: Lookahead | None = None,
        datastore: Datastore | None = None,
        ranker: Ranker | None = None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """head: proposes tokens; without one the tree holds n-gram matches alone. costs: learn from each cycle's
        passes. top_k: size of the beam, and children per node. lookup: whether n-gram matches are candidates too.
        index: finds them, and the head's chances include its matches already; None makes an NgramIndex. predicted: a
        text that is searched for matches before the output is. datastore: a text that is searched where neither has a
        match as long. lookahead: says which matches a constraint allows. ranker: orders the head's proposals."""
        self._head = head if head is None or ranker is None else RankedHead(head, ranker)
        self._costs = costs
        self._timer = CycleTimer(costs, clock)
        self._acceptance = acceptance
        self._clock = clock
        self._gains: dict[int, DraftGain] = {}  # by the number of other texts in the pass
        self._searched: tuple[int, float] | None = None  # these, and what looking for drafts cost in plain tokens
        self._decided = -1, False  # length of the text for which it was decided whether to pause in a shared pass
        self._top_k = 0 if head is None else min(top_k, head.top_k, head.scratch)
        self._levels = 0 if head is None else min(MAX_LEVELS, 1 + head.scratch // self._top_k)
        self._index = index if index is not None else NgramIndex() if lookup else None
        self._predicted = predicted
        self._lookahead = lookahead
        self._datastore = datastore
        self._weighed = index is not None and predicted is None
        self._child_chances = np.array(CHILD_CHANCES)
        self._last: _Draft | None = None  # None: the last tree was its root alone
        self._drafted = False  # whether the head has read the prompt

    def reading(self, tokens: Sequence[int]) -> SharedPass | None:
        """As in Drafter: the first pass of the head, if others share it and it pays."""
        others = self._costs.others
        if self._head is None or others == 0 or self._pauses_shared(others, len(tokens)):
            return None
        return self._head.reading(tokens) if self._first_level_pays(self._costs.now, len(tokens)) else None

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        self._searched, others = None, self._costs.others
        if others == 0:
            return self._grown(tokens, max_nodes)
        if self._pauses_shared(others, len(tokens)):
            return root_only(tokens[-1])
        began = self._clock()
        tree = self._grown(tokens, max_nodes)
        self._searched = others, (self._clock() - began) / self._costs.now.plain_at(len(tokens))
        return tree

    def _pauses_shared(self, others: int, length: int) -> bool:
        """Whether drafts lose of late where so many other texts share the pass: then nothing is even looked for, since
        what each text's host work takes is more than a drafted token saves there."""
        if self._decided[0] != length:
            self._decided = length, self._gain(others).pauses()
        return self._decided[1]

    def _gain(self, others: int) -> DraftGain:
        if others not in self._gains:
            self._gains[others] = DraftGain(self._acceptance.usual_gain(others))
        return self._gains[others]

    def _grown(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        self._timer.begin(len(tokens) - 1)
        most = min(max_nodes, LARGEST)
        chain = self._matched_chain(tokens, most - 1)
        if self._costs.asks_for_plain:
            return root_only(tokens[-1])
        others = self._costs.others
        paused = self._head is None or (others == 0 and self._gain(0).pauses())
        if paused and chain is None:
            return root_only(tokens[-1])
        costs = self._costs.now
        if others:
            paused = paused or not self._first_level_pays(costs, len(tokens))
            if paused and (chain is None or not one_more_pays(costs, len(tokens), float(np.exp(chain.values[0])))):
                return root_only(tokens[-1])
        verify = costs.target.at(len(tokens))[1 : most + 1]
        plain = costs.plain_at(len(tokens))
        pool = Pool()
        spent, levels = (0.0, 0) if paused else self._draft(pool, chain, tokens, costs, verify)
        if chain is not None:
            chain.append_to(pool)
        self._last = _best_tree(pool, tokens[-1], verify, plain, spent, levels)
        return self._last.tree

    def learn(self, step: Step) -> None:
        """Count what was accepted of the last tree, and report the cycle's seconds to the costs."""
        last, self._last = self._last, None
        if last is not None:
            self._acceptance.learn(last.tree, step.path, last.log_probs, last.matches)
            if self._head is not None and last.levels:
                if len(self._head.row_counts) > 1:
                    self._acceptance.levels.learn(last.tree, ~np.isnan(last.log_probs), last.levels)
                if self._searched is None:
                    self._gain(0).note(len(step.tokens), last.cost)
        if self._searched is not None:
            others, looking = self._searched
            cost = UNCOUNTED + (1.0 if last is None else last.cost)
            # The table's seconds of a head's level have the host's work in them.
            self._gain(others).note(len(step.tokens), cost if last is not None and last.levels else cost + looking)
        self._timer.end(step.nodes)

    def _first_level_pays(self, costs: Costs, context: int) -> bool:
        """Whether the head's first level and the best node of it are expected to bring what they cost. What drafts lost
        of late does not say so where other texts share the pass."""
        assert self._head is not None and costs.head is not None
        level = costs.head.of(1, self._head.cache.length)
        return one_more_pays(costs, context, float(self._child_chances[0]), level)

    def _matched_chain(self, tokens: Sequence[int], most: int) -> MatchedChain | None:
        """The longest n-gram match's continuation of at most `most` tokens, if there is one."""
        most = min(most, MAX_MATCHED)
        matched, length = longest_match(self._index, self._predicted, tokens, most)
        store = self._datastore
        hits = NOTHING if store is None else store.continuations(tokens, most, MAX_MATCHED, beyond=length)
        if hits.length > length:
            path = hits.main_path()
            tokens_of_path = hits.tokens[path].tolist()
            if self._lookahead is None:
                return MatchedChain(tokens_of_path, hits.length, self._acceptance, hits.shares()[path], hits)
            matched, length = tokens_of_path, hits.length
        if self._lookahead is not None:
            matched = self._lookahead.cut(matched)
        return MatchedChain(matched, length, self._acceptance, weighed=self._weighed) if matched else None

    def _draft(
        self, pool: Pool, chain: MatchedChain | None, tokens: Sequence[int], costs: Costs, verify: Seconds
    ) -> tuple[float, int]:
        """Grow the pool with the head while that pays; returns the seconds that the table gives its passes, and how
        many levels it could have grown."""
        head, k = self._head, self._top_k
        assert head is not None and costs.head is not None
        self._timer.start_lap()
        context = head.cache.length
        seconds = costs.head.at(context)
        read = min(head.unread, WINDOW)
        counts, free = head.row_counts, head.free_levels
        size, levels = self._acceptance.levels.choose(counts, seconds, verify) if free else (None, self._levels)
        levels = min(self._levels, levels)
        proposal = head.catch_up(tokens, rows=size)
        # The prompt is read once, and that says nothing about the cost of drafts. Rows left unread in a pause do.
        charged, self._drafted = max(1, read) if self._drafted else 1, True
        if size is not None:
            spent, seconds = float(seconds[size]), np.zeros_like(seconds)
        else:
            spent = float(seconds[min(charged, LARGEST)]) * max(1.0, charged / LARGEST)
        frontier, above = np.array([-1]), np.zeros(1, np.float32)
        scratch_rows = np.array([-1])
        fed = 0
        count = read if context and read <= HEAD_ROWS[-1] else 0  # rows of the pass, 0 for one that is not learned from
        whole = size if size is not None and count else 0  # of the only pass, timed with all levels
        with Scratch(head) as scratch:
            while True:
                start = pool.size
                values = self._add_level(pool, chain, proposal, frontier, above)
                best = best_first(values, k)
                timed, count = count, self._worth_growing(pool, chain, values[best], verify, spent, seconds)
                ended = count == 0 or len(pool.values) == levels
                if ended or not free:
                    self._timer.end_lap(whole if free else timed, context)
                if ended:
                    return spent, levels
                context = context if free else head.cache.length
                best = best[:count]
                frontier, above = start + best, values[best]
                rows = best // k  # of the last proposal
                proposal = scratch.feed(pool.tokens[-1][best], proposal.hidden[rows], scratch_rows[rows])
                scratch_rows = fed + np.arange(count)
                fed += count
                spent += float(seconds[count])

    def _add_level(
        self, pool: Pool, chain: MatchedChain | None, proposal: Proposal, frontier: Int, above: Float
    ) -> Float:
        """Add the children of pool nodes `frontier`, whose values are `above`; returns the children's values."""
        k = self._top_k
        log_probs = np.fmax(proposal.log_probs[:, :k], np.float32(NEVER))
        corrected = self._acceptance.corrected(log_probs)
        values = (above[:, None] + corrected).ravel()
        tokens, parents = proposal.tokens[:, :k].ravel(), np.repeat(frontier, k)
        matches = np.zeros(len(values), np.int64)
        if chain is not None:
            chain.follow(tokens, parents, values, matches, pool.size)
        means = np.exp(corrected[:, :2]).sum(0) / len(corrected)
        self._child_chances[: len(means)] += NEWEST * (means - self._child_chances[: len(means)])
        pool.add(tokens, parents, values, log_probs.ravel(), matches)
        return values

    def _worth_growing(
        self, pool: Pool, chain: MatchedChain | None, level: Float, verify: Seconds, spent: float, seconds: Seconds
    ) -> int:
        """Returns how many of the newest level's best nodes the head should grow children of. level: their values, best
        first. Each node is taken to have two children of the mean chances of late."""
        left = [] if chain is None else [chain.values_left]
        candidates = np.exp(np.concatenate([*pool.values, *left]))
        nodes, rate = best_size(candidates, verify, spent)
        best, second = self._child_chances
        chances = np.exp(level)
        next_node = verify[min(nodes, len(verify) - 1)] - verify[min(nodes, len(verify) - 1) - 1]
        count = int(np.count_nonzero(chances * best > rate * next_node))
        if count == 0:
            return 0
        with_children = np.concatenate([candidates, chances[:count] * best, chances[:count] * second])
        return count if best_size(with_children, verify, spent + float(seconds[count]))[1] > rate else 0


class _Draft(NamedTuple):
    """A tree as it was returned, log_probs [N] and matches [N] of its nodes as in AcceptanceStats.learn, the most
    levels that the head could have grown (0: it took no part), and the cost of all passes in tokens without drafts."""

    tree: Tree
    log_probs: Float
    matches: Int
    levels: int
    cost: float


def one_more_pays(costs: Costs, context: int, chance: float, spent: float = 0.0) -> bool:
    """Whether a node under the root that is accepted with this chance has a higher rate than the root alone. spent:
    seconds of drafting it."""
    return (1 + chance) * costs.plain_at(context) >= spent + costs.target.of(2, context)


def best_size(chances: Seconds, verify: Seconds, spent: float) -> tuple[int, float]:
    """Returns the number of nodes, root included, with the highest rate, and that rate in tokens per second.

    chances [M]: of candidates; verify[n - 1]: seconds for n nodes; spent: seconds of drafting."""
    # Of some twenty candidates: lists are faster than arrays.
    seconds = verify.tolist()
    tokens, best, rate = 1.0, 1, 1 / (seconds[0] + spent)
    for nodes, (chance, cost) in enumerate(zip(sorted(chances.tolist(), reverse=True), seconds[1:], strict=False), 2):
        tokens += chance
        if tokens > rate * (cost + spent):
            best, rate = nodes, tokens / (cost + spent)
    return best, rate


def _best_tree(pool: Pool, root: int, verify: Seconds, plain: float, spent: float, levels: int) -> _Draft:
    """The nodes of the pool with the highest rate; plain: seconds of a token without drafts."""
    values = np.concatenate(pool.values)
    nodes, _ = best_size(np.exp(values), verify, spent)
    kept = np.sort(best_first(values, nodes - 1))
    tree = subtree(root, np.concatenate(pool.tokens), np.concatenate(pool.parents), values, kept)
    log_probs = np.concatenate([np.full(1, np.nan, np.float32), np.concatenate(pool.log_probs)[kept]])
    matches = np.concatenate([np.zeros(1, np.int64), np.concatenate(pool.matches)[kept]])
    return _Draft(tree, log_probs, matches, levels, float((spent + verify[nodes - 1]) / plain))
