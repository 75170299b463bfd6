"""Statistics of acceptance: how often the target accepted drafted tokens, by what their drafter gave as their chance.

A head's probabilities are not the frequencies with which its tokens are accepted, and the two differ from text to text;
sizing a tree by expected tokens needs the frequencies. They are counted as trees are verified: of the children of an
accepted node, one is accepted or none.

Shapes: N tree nodes, B bins of log-probabilities, M lengths of n-gram matches.
"""

from __future__ import annotations

import bisect
import math

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import MAX_DEPTH, Float, Int, Tree, node_depths
from eagle_runtime.drafting.cost_model import Seconds

# Figures in brackets: what half and double of a constant change of the tokens per second (python -m studies constants).
# Bins of a head's log-probabilities, each corrected by accepted / expected. Chosen.
EDGES = np.log(np.array([0.003, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97], np.float32))
EDGE_LIST: list[float] = EDGES.tolist()
PRIOR = 3.0  # counted tokens that the prior weighs as much as [-0.8 %, -0.6 %]
MOST_LOG_CHANCE = np.float32(np.log(0.995))  # of a single token; chosen: no tree is ever free of risk
FADE = 0.995  # of all counts, per verification: a text changes as it goes on [-0.6 %, -0.1 %]

# Chance that an n-gram match's token is accepted, by the tokens that matched before it, until counts say otherwise
# [+1.9 %, -3.6 %].
MATCHED = np.array([0.0, 0.0, 0.25, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94])

# DraftGain. Chosen on 11,500 drafts of SmolLM2-135M-Instruct and its EAGLE-3 head (six sets, 12 questions each,
# temperatures 0 and 1; a draft at every position; costs as measured, and with 1.3 and 1.6 times what exceeds a pass of
# one row): 1.40, 1.29 and 1.21 times the speed without drafts. An account of gains and losses that all texts shared had
# 1.40, 1.26 and 1.17. Half and double of each constant change these by less than 0.5 %.
USUAL = 0.3  # tokens that a draft gains, before any was verified
TEXTS = 200  # drafts of all texts that the usual gain follows
DRAFTS = 32  # drafts of a text that its own gain follows
EARLIER, AGAIN = 4.0, 2.0  # drafts that the usual gain counts as when a text begins, and after a pause
FEWEST, MOST = 8, 64  # verifications of the first pause, and of the longest: each is twice the one before
WELL = 0.1  # tokens gained per draft after which the next pause is short again

NEWEST = 0.05  # weight of the newest draft in a mean that follows the text [-0.1 %, -0.7 %]
# LevelGains: tokens that a level brings for each token of the level above, and its nodes, before any was drafted; after
# how many drafts all levels are drafted again, chosen. The first two are assumed, and forgotten after some 20 drafts.
GAIN, NODES, LOOK = 0.75, 1.0, 16


def match_kinds(lengths: Int) -> Int:
    """lengths [n]: tokens that matched before each token of an n-gram match, 2 or more -> the bins [n] it is counted
    in."""
    return np.minimum(lengths, len(MATCHED) - 1)


class AcceptanceStats:
    """Counts of drafted and accepted tokens, and what else is learned from verified trees."""

    def __init__(self) -> None:
        bins = len(EDGES) + 1
        self._counts = np.zeros((2, bins))  # of proposed tokens: the sums of their chances, and those accepted
        self._log_ratios = np.zeros(bins, np.float32)  # of accepted to expected, the prior included
        self._matches = PRIOR * np.stack([np.ones(len(MATCHED)), MATCHED])  # tokens of matches tried, and accepted
        self._usual_gains = {0: UsualGain()}
        self.levels = LevelGains()

    def usual_gain(self, others: int = 0) -> UsualGain:
        """What a draft gained of late where `others` more texts shared the pass."""
        return self._usual_gains.setdefault(others, UsualGain(WELL))

    def corrected(self, log_probs: Float) -> Float:
        """A head's log-probabilities of children given that their parent is accepted -> their log-chances to be
        accepted, of the same shape."""
        corrected: Float = np.minimum(log_probs + self._log_ratios[np.searchsorted(EDGES, log_probs)], MOST_LOG_CHANCE)
        return corrected

    def matched(self, matches: Int) -> Float:
        """matches [n], as match_kinds returns them -> log-chances [n] of the tokens given the one before each."""
        chance = self._matches[1, matches] / self._matches[0, matches]
        log_chance: Float = np.log(np.clip(chance, 1e-3, 0.995)).astype(np.float32)
        return log_chance

    def learn(self, tree: Tree, path: Int, log_probs: Float, matches: Int) -> None:
        """Count a verified tree. path: the accepted nodes, root first. log_probs [N]: the head's of each node given its
        parent, NaN for nodes that it did not propose; matches [N]: as match_kinds returns them, 0 for nodes of none."""
        self._counts *= FADE
        self._matches *= FADE
        accepted = set(path.tolist())
        of_nodes = zip(tree.parents.tolist(), log_probs.tolist(), matches.tolist(), strict=True)
        for node, (parent, log_prob, kind) in enumerate(of_nodes):  # a few nodes: arrays would take longer
            if parent not in accepted:
                continue
            counted = 1, node in accepted
            if not math.isnan(log_prob):
                self._counts[:, bisect.bisect_left(EDGE_LIST, log_prob)] += math.exp(log_prob), counted[1]
            if kind > 0:
                self._matches[:, kind] += counted
        sums = self._counts + PRIOR
        self._log_ratios = np.log(sums[1] / sums[0]).astype(np.float32)


class UsualGain:
    """What a draft gained of late, whatever the text: tokens it brought, less the cost of all its forward passes in
    verifications of one token."""

    def __init__(self, tokens: float = USUAL) -> None:
        self.tokens = tokens

    def note(self, gain: float) -> None:
        """Count a draft."""
        self.tokens += (gain - self.tokens) / TEXTS


class DraftGain:
    """Decides whether the head may draft for a text: it pauses while its drafts lose.

    A draft that cost 1.5 verifications of one token and brought 2 tokens gained 0.5. The mean over the text's drafts,
    the newest of which weigh most, begins with the usual gain. Once it is negative the head pauses for a while, and
    for twice as long if a trial after that loses too."""

    def __init__(self, usual: UsualGain) -> None:
        """usual: of all texts; it learns from this one too."""
        self._usual = usual
        self._sum, self._weight = EARLIER * usual.tokens, EARLIER
        self._left, self._next = 0, FEWEST  # verifications of this pause, and of the next

    def pauses(self) -> bool:
        """Returns whether the head pauses in the coming verification; to be called once for each."""
        self._left -= self._left > 0
        return self._left > 0

    def note(self, tokens: int, cost: float) -> None:
        """Count a verification with drafts of the head. tokens: emitted; cost: of all passes, in verifications of one
        token."""
        gain, kept = tokens - cost, 1 - 1 / DRAFTS
        self._usual.note(gain)
        self._sum, self._weight = kept * self._sum + gain, kept * self._weight + 1
        if self._sum < 0:
            self._left, self._next = self._next + 1, min(2 * self._next, MOST)
            self._sum, self._weight = AGAIN * max(self._usual.tokens, WELL), AGAIN
        elif self._sum > WELL * self._weight:
            self._next = FEWEST


class LevelGains:
    """How many rows a block should have, which its one forward pass has to know beforehand.

    The trees of late say how many tokens each level can be expected to bring for each token of the level above, and how
    many nodes that takes. Levels that are not drafted keep what they were last seen to bring. Without this, `eagle`
    emits 4.7 % fewer tokens per second at temperature 1, 2.5 % fewer at 0.7 and 0.3 % more at 0 (24 prompts, block head
    of tools/demo_pair in int8, costs fixed to those of the pair grown to 1 B on one thread of an EPYC, Zen 5)."""

    def __init__(self) -> None:
        self._above = np.ones(MAX_DEPTH)  # running means: tokens of the level above,
        self._gained = GAIN * self._above  # tokens of the level,
        self._nodes = NODES * self._above  # and its nodes
        self._drafts = 0

    def choose(self, counts: range, seconds: Seconds, verify: Seconds) -> tuple[int, int]:
        """Returns how many rows to draft, and how many levels these rows can draft at most.

        The number of rows is the one of `counts` that promises the highest rate. The fewest rows draft one level, and
        each further row drafts one more; a head that leaves no choice may draft any number of levels. seconds[r]: what
        a pass of r rows takes; verify[n - 1]: what the verification of n nodes takes."""
        self._drafts += 1
        if len(counts) == 1:
            return counts[-1], MAX_DEPTH
        if self._drafts % LOOK == 1:
            return counts[-1], len(counts)
        levels = min(len(counts), MAX_DEPTH)
        reached = np.cumprod(self._gained[:levels] / self._above[:levels])
        above = np.concatenate([np.ones(1), reached[:-1]])
        nodes = np.cumsum(above * self._nodes[:levels] / self._above[:levels])
        cost = np.interp(nodes, np.arange(len(verify)), verify) + seconds[counts.start : counts.start + levels]
        best = int(((1 + np.cumsum(reached)) / cost).argmax())
        return counts[best], best + 1

    def learn(self, tree: Tree, proposed: npt.NDArray[np.bool_], levels: int) -> None:
        """Count a tree. proposed [N]: its nodes that the head proposed, which has drafted so many levels."""
        depths = node_depths(tree.parents)[proposed]
        gained = np.bincount(depths, np.exp(tree.scores[proposed]), levels + 1)[: levels + 1]
        nodes = np.bincount(depths, minlength=levels + 1)[: levels + 1]
        gained[0] = 1
        for sums, newest in ((self._above, gained[:-1]), (self._gained, gained[1:]), (self._nodes, nodes[1:])):
            sums[:levels] += NEWEST * (newest - sums[:levels])


Acceptance = dict[tuple[str, bool, bool], AcceptanceStats]  # by (method, whether greedy, whether constrained)
