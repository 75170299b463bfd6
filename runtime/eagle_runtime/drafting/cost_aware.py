"""Draft trees sized by what they cost and what they are likely to bring.

The chances of a tree's nodes to be accepted add up to the drafted tokens that a verification can be expected to
accept, so a tree of n nodes is worth

    rate(n) = (1 + chances of the n - 1 best nodes) / (seconds of drafting + seconds of verifying n nodes)

tokens per second (Sequoia, arXiv 2402.12374; OPT-Tree, arXiv 2406.17276). The head goes on for another level while
that promises a higher rate; the nodes kept are those with the highest. Where drafting lost time of late, the head rests
for a while. Costs may be fixed or learned from the passes themselves (learned_costs); with these trees depend on the
clock, but never what is emitted.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from eagle_runtime.accept import Step
from eagle_runtime.drafting.acceptance import DENIED, NAMED, UNASKED, AcceptanceStats, Gain, match_of
from eagle_runtime.drafting.costs.tables import LARGEST, Costs, CostSource, Kind, Seconds
from eagle_runtime.drafting.costs.timer import CycleTimer
from eagle_runtime.drafting.head import WINDOW, DraftHead, Proposal, Scratch
from eagle_runtime.drafting.lookup import Suffixes
from eagle_runtime.target import Features
from eagle_runtime.tree import Float, Int, Tree, best_first, root_only, subtree

DEEPEST = 10  # levels below the root that the head grows at most
LONGEST_COPY = 24  # looked up tokens
WEIGHT = 0.05  # of a level in the running means of its nodes' best children
BEST_CHILD, SECOND_CHILD = 0.6, 0.15  # those means before any level was seen
USUAL = 4  # nodes of a level that usually have children
OF_NAN = np.float32(-1e9)  # log-chance of what a head that computes NaN says; all others are above it


class Pool:
    """Candidates under the root, parents before children. Log-chances [M] of the whole path down to each; parents [M]
    in the pool, -1 under the root; log_probs [M]: what the head said given the parent, NaN: nothing; matches [M]: what
    a looked up token counts as (acceptance.match_of), 0 for others."""

    def __init__(self) -> None:
        self.tokens: list[Int] = []
        self.parents: list[Int] = []
        self.values: list[Float] = []
        self.log_probs: list[Float] = []
        self.matches: list[Int] = []
        self.size = 0

    def add(self, tokens: Int, parents: Int, values: Float, log_probs: Float, matches: Int) -> None:
        """One level, or a chain."""
        self.tokens.append(tokens)
        self.parents.append(parents)
        self.values.append(values)
        self.log_probs.append(log_probs)
        self.matches.append(matches)
        self.size += len(tokens)


class Copy:
    """A looked up chain that the head's tree may run along: `met` of its tokens are nodes of the pool so far, `at`
    being the last of them (-1: the root)."""

    def __init__(self, tokens: Sequence[int], length: int, acceptance: AcceptanceStats) -> None:
        """length: of the match."""
        self._acceptance = acceptance
        self.tokens = np.array(tokens, np.int64)
        self.matches = match_of(length + np.arange(len(tokens)), UNASKED)
        self.values: Float = np.cumsum(acceptance.matched(self.matches), dtype=np.float32)
        self.met = 0
        self.at = -1

    @property
    def rest(self) -> Float:
        """Log-chances of the tokens that are not in the pool."""
        return self.values[self.met :]

    def gain(self, verify: Seconds, plain: float) -> float:
        """Tokens that it promises by itself for the cost of one. verify[n - 1]: seconds for n nodes; plain: of a token
        without drafts."""
        return best_size(np.exp(self.values), verify, 0.0)[1] * plain

    def meet(self, tokens: Int, parents: Int, values: Float, matches: Int, first: int) -> None:
        """A new level of the pool, beginning at index `first`: if one of its nodes is the chain's next token, it is
        worth at least what the match says, in place. If the head did not name that token, the chain is worth less."""
        children = parents == self.at
        if self.met == len(self.tokens) or not children.any():
            return
        found = np.flatnonzero(children & (tokens == self.tokens[self.met]))
        asked = match_of(self.matches[self.met], NAMED if len(found) else DENIED)
        before, now = self._acceptance.matched(np.array([self.matches[self.met], asked]))
        self.matches[self.met] = asked
        self.values[self.met :] += now - before
        if len(found) == 0:
            return
        node = found[0]
        matches[node] = asked
        self.values[self.met :] += max(np.float32(0), values[node] - self.values[self.met])
        values[node] = self.values[self.met]
        self.at = first + int(node)
        self.met += 1

    def append_to(self, pool: Pool) -> None:
        """Add the tokens that the head's nodes did not meet, as a chain behind those that they did."""
        count = len(self.rest)
        if count == 0:
            return
        parents = np.arange(pool.size - 1, pool.size - 1 + count)
        parents[0] = self.at
        unsaid = np.full(count, np.nan, np.float32)
        pool.add(self.tokens[self.met :], parents, self.rest, unsaid, self.matches[self.met :])


class CostAwareDrafter:
    """Sizes every tree by the costs. One object per generation; what was learned stays in `acceptance`."""

    def __init__(
        self,
        head: DraftHead | None,
        costs: CostSource,
        acceptance: AcceptanceStats,
        *,
        top_k: int = 10,
        copies: bool = False,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        """head: None drafts by lookup alone. costs: are told of each pass of the head. top_k: beam, and children per
        node. copies: whether what followed the same tokens before is a candidate too."""
        self._head = head
        self._source = costs
        self._timer = CycleTimer(costs, clock)
        self._acceptance = acceptance
        self._top_k = 0 if head is None else min(top_k, head.top_k, head.scratch // DEEPEST)
        self._suffixes = Suffixes() if copies else None
        self._unread: list[Features] = []  # rows that the head has not observed
        self._children = np.array([BEST_CHILD, SECOND_CHILD])
        self._gain = Gain()
        self._last: _Draft | None = None  # None: the last tree was bare
        self._begun = False

    def grow(self, tokens: Sequence[int], features: Features, max_nodes: int) -> Tree:
        if not self._begun:  # not before: until its first step another generation may have the cache
            self._begun = True
            if self._head is not None:
                self._head.cache.truncate(0)
        self._timer.begin(len(tokens) - 1)
        if self._head is not None:
            self._unread.append(features)
        most = min(max_nodes, LARGEST)
        copy = self._copy(tokens, most - 1)
        if self._source.asks_for_plain:
            return root_only(tokens[-1])
        rests = self._head is None or self._acceptance.budget.rests()
        if rests and copy is None:
            return root_only(tokens[-1])
        costs = self._source.now
        verify = costs.target.at(len(tokens))[1 : most + 1]
        plain = costs.plain_at(len(tokens))
        drafted = not rests and (copy is None or copy.gain(verify, plain) <= self._gain.rate)
        pool = Pool()
        spent = self._draft(pool, copy, tokens, costs, verify) if drafted else 0.0
        if copy is not None:
            copy.append_to(pool)
        self._last = _chosen(pool, tokens[-1], verify, plain, spent, drafted)
        return self._last.tree

    def learn(self, step: Step) -> None:
        """Count what was accepted of the last tree, and report the cycle's seconds to the costs."""
        last, self._last = self._last, None
        if self._head is not None:
            self._head.learn(int(step.tokens[0]))
        if last is not None:
            self._acceptance.learn(last.tree, step.path, last.log_probs, last.matches)
            if last.drafted:
                self._acceptance.budget.note(len(step.tokens), last.cost)
                self._gain.note(len(step.tokens), last.cost)
        self._timer.end(1 if last is None else last.tree.num_nodes)

    def _copy(self, tokens: Sequence[int], most: int) -> Copy | None:
        if self._suffixes is None:
            return None
        self._suffixes.extend(tokens)
        place, length = self._suffixes.match()
        if length == 0:
            return None
        copied = self._suffixes.continuation(place, min(most, LONGEST_COPY))
        return Copy(copied, length, self._acceptance)

    def _draft(self, pool: Pool, copy: Copy | None, tokens: Sequence[int], costs: Costs, verify: Seconds) -> float:
        """Grow the pool with the head while that pays; returns the seconds that its passes are taken to cost."""
        head, k = self._head, self._top_k
        assert head is not None and costs.head is not None
        self._timer.start_lap()
        context = head.cache.length
        seconds = costs.head.at(context)
        first = (costs.first or costs.head).at(context)
        features = self._unread[0] if len(self._unread) == 1 else head.joined(self._unread)
        self._unread = []
        # The prompt is read once; what it cost says nothing about drafts. What a rest left unread does.
        read = min(len(features), WINDOW) if context else 1
        proposal = head.observe(tokens[len(tokens) - len(features) :], features)
        spent = float(first[min(read, LARGEST)]) * max(1.0, read / LARGEST)
        frontier = np.array([-1])
        above = np.zeros(1, np.float32)
        scratch_rows = np.array([-1])
        fed = 0
        kind: Kind = "first"
        picked = read if context and read <= LARGEST else 0  # rows of the pass, if it is one to learn from
        with Scratch(head) as scratch:
            while True:
                start = pool.size
                values = self._add_level(pool, copy, proposal, frontier, above)
                best = best_first(values, k)
                grown, picked = picked, self._worth_growing(pool, copy, values[best], verify, spent, seconds)
                self._timer.end_lap(kind, grown, context)
                if picked == 0 or len(pool.values) == DEEPEST:
                    return spent
                kind, context = "head", head.cache.length
                best = best[:picked]
                frontier, above = start + best, values[best]
                rows = best // k  # of the last proposal
                proposal = scratch.feed(pool.tokens[-1][best], proposal.hidden[rows], scratch_rows[rows])
                scratch_rows = fed + np.arange(picked)
                fed += picked
                spent += float(seconds[picked])

    def _add_level(self, pool: Pool, copy: Copy | None, proposal: Proposal, frontier: Int, above: Float) -> Float:
        """Add the children of pool nodes `frontier`, whose log-chances are `above`; returns their log-chances."""
        k = self._top_k
        log_probs = np.fmax(proposal.log_probs[:, :k], OF_NAN)
        corrected = self._acceptance.corrected(log_probs)
        values = (above[:, None] + corrected).ravel()
        tokens, parents = proposal.tokens[:, :k].ravel(), np.repeat(frontier, k)
        matches = np.zeros(len(values), np.int64)
        if copy is not None:
            copy.meet(tokens, parents, values, matches, pool.size)
        seen = np.exp(corrected[:, :2]).sum(0) / len(corrected)
        self._children[: len(seen)] += WEIGHT * (seen - self._children[: len(seen)])
        pool.add(tokens, parents, values, log_probs.ravel(), matches)
        return values

    def _worth_growing(
        self, pool: Pool, copy: Copy | None, level: Float, verify: Seconds, spent: float, seconds: Seconds
    ) -> int:
        """How many of the newest level's best nodes, log-chances best first, the head should grow children of.

        Each is taken to have the two best children that nodes had on the mean of late."""
        rest = [] if copy is None else [copy.rest]
        have = np.exp(np.concatenate([*pool.values, *rest]))
        nodes, rate = best_size(have, verify, spent)
        best, second = self._children
        chances = np.exp(level)
        next_node = verify[min(nodes, len(verify) - 1)] - verify[min(nodes, len(verify) - 1) - 1]
        count = int(np.count_nonzero(chances * best > rate * next_node))
        if count == 0:
            return 0
        hoped = np.concatenate([have, chances[:count] * best, chances[:count] * second])
        return count if best_size(hoped, verify, spent + float(seconds[count]))[1] > rate else 0


class _Draft(NamedTuple):
    """A tree as it was handed out: what each node's drafter said of it (as in AcceptanceStats.learn), whether the
    head took part, and the cost of all passes in tokens without drafts."""

    tree: Tree
    log_probs: Float
    matches: Int
    drafted: bool
    cost: float


def best_size(chances: Seconds, verify: Seconds, spent: float) -> tuple[int, float]:
    """The number of nodes, root included, with the highest rate, and that rate in tokens per second.

    chances [M]: of candidates; verify[n - 1]: seconds for n nodes; spent: seconds of drafting."""
    best = np.sort(chances)[::-1][: len(verify) - 1]
    tokens = np.ones(1 + len(best))
    tokens[1:] += np.cumsum(best)
    rates = tokens / (verify[: len(tokens)] + spent)
    nodes = int(rates.argmax())
    return nodes + 1, float(rates[nodes])


def _chosen(pool: Pool, root: int, verify: Seconds, plain: float, spent: float, drafted: bool) -> _Draft:
    """plain: seconds of a token without drafts."""
    nothing, none = np.full(1, np.nan, np.float32), np.zeros(1, np.int64)
    values = np.concatenate(pool.values)
    nodes, _ = best_size(np.exp(values), verify, spent)
    kept = np.sort(best_first(values, nodes - 1))
    tree = subtree(root, np.concatenate(pool.tokens), np.concatenate(pool.parents), values, kept)
    log_probs = np.concatenate([nothing, np.concatenate(pool.log_probs)[kept]])
    matches = np.concatenate([none, np.concatenate(pool.matches)[kept]])
    return _Draft(tree, log_probs, matches, drafted, float((spent + verify[nodes - 1]) / plain))
