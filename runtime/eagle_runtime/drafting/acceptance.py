"""What drafted tokens turned out to be worth: how often the target took them, by what their drafter said of them.

A head's probabilities are no frequencies, and differ from text to text; sizing a tree by expected tokens needs the
frequencies. They are counted as trees are verified: whenever a node is accepted, one of its children is, or none.
"""

from __future__ import annotations

import numpy as np

from eagle_runtime.drafting.coupling import NoiseWeight
from eagle_runtime.tree import Float, Int, Tree

# A head's probabilities are corrected in these bins, by accepted / expected; PRIOR counts as much as seen evidence.
EDGES = np.log(np.array([0.003, 0.01, 0.03, 0.1, 0.2, 0.35, 0.5, 0.65, 0.8, 0.9, 0.97], np.float32))
PRIOR = 3.0
CERTAIN = np.float32(np.log(0.995))  # nothing is surer than this
FADE = 0.995  # per verification: a text changes as it goes on

# Chance that a looked up token is accepted, by how many tokens before it matched, until counts say otherwise.
MATCHED = np.array([0.0, 0.0, 0.25, 0.4, 0.5, 0.6, 0.65, 0.7, 0.75, 0.8, 0.82, 0.84, 0.86, 0.88, 0.9, 0.92, 0.94])
# These are counted by what the head says of the token: it was not asked, has it among its likeliest, or has not.
UNASKED, NAMED, DENIED = range(3)
OF_DENIED = 0.4  # is left of a chance, until counts say otherwise

# What drafts of the head may lose, in verifications of one token: at first, in a trial after a rest, and for each
# verification that it rests; and the most of what they have won that is set against later losses.
CREDIT, TRIAL, SHARE, SAVED = 4.0, 2.0, 0.02, 12.0

WEIGHT = 0.15  # of the newest verification in a Gain's running sums


def match_of(lengths: Int, verdict: int) -> Int:
    """What looked up tokens are counted as: by the tokens that matched before each, 2 or more, and UNASKED, NAMED or
    DENIED."""
    return verdict * len(MATCHED) + np.minimum(lengths, len(MATCHED) - 1)


class AcceptanceStats:
    """Counts of what was drafted and accepted."""

    def __init__(self) -> None:
        bins = len(EDGES) + 1
        self._expected = np.zeros(bins)
        self._accepted = np.zeros(bins)
        self._ratios = np.zeros(bins, np.float32)  # log-ratios of these, the prior included
        self._tried_matches = np.full(3 * len(MATCHED), PRIOR)
        self._accepted_matches = PRIOR * np.concatenate([MATCHED, MATCHED, OF_DENIED * MATCHED])
        self.budget = DraftBudget()
        self.noise_weight = NoiseWeight()

    def corrected(self, log_probs: Float) -> Float:
        """A head's log-probabilities of children given that their parent is accepted -> the target's, as counted."""
        corrected: Float = np.minimum(log_probs + self._ratios[np.searchsorted(EDGES, log_probs)], CERTAIN)
        return corrected

    def matched(self, matches: Int) -> Float:
        """Log-chances of looked up tokens given the one before. matches: as match_of returns them."""
        chance = self._accepted_matches[matches] / self._tried_matches[matches]
        log_chance: Float = np.log(np.clip(chance, 1e-3, 0.995)).astype(np.float32)
        return log_chance

    def learn(self, tree: Tree, path: Int, log_probs: Float, matches: Int) -> None:
        """Count a verified tree. path: what was accepted of it, root first. log_probs [N]: what the head said of each
        node given its parent, NaN where it said nothing; matches [N]: as match_of returns them, 0: not looked up."""
        for counts in (self._expected, self._accepted, self._tried_matches, self._accepted_matches):
            counts *= FADE
        taken = np.zeros(tree.num_nodes + 1, np.bool_)  # the last slot serves the root's parent, -1
        taken[path] = True
        seen, taken = taken[tree.parents], taken[:-1]  # seen: a child of an accepted node
        drafted = np.flatnonzero(seen & (~np.isnan(log_probs)))
        bins = np.searchsorted(EDGES, log_probs[drafted])
        self._expected += np.bincount(bins, np.exp(log_probs[drafted]), len(self._expected))
        self._accepted += np.bincount(bins, taken[drafted], len(self._accepted))
        self._ratios = np.log((self._accepted + PRIOR) / (self._expected + PRIOR)).astype(np.float32)
        matched = np.flatnonzero(seen & (matches > 0))
        if len(matched):
            kinds = len(self._tried_matches)
            self._tried_matches += np.bincount(matches[matched], minlength=kinds)
            self._accepted_matches += np.bincount(matches[matched], taken[matched], kinds)


class DraftBudget:
    """Whether the head may draft: an account in verifications of one token, which drafts pay the tokens into that they
    brought, and the cost of all passes out of. Overdrawn, the head rests, and every verification without it saves a
    little towards another trial. So whatever the text, drafts lose at most about CREDIT, and SHARE of the rest."""

    def __init__(self) -> None:
        self._balance = CREDIT
        self._rests = False

    def rests(self) -> bool:
        """Whether the head rests in the verification that comes now; to be asked once for each."""
        if self._rests:
            self._balance += SHARE
            self._rests = self._balance < TRIAL
        return self._rests

    def note(self, tokens: int, cost: float) -> None:
        """A verification with drafts of the head. cost: of all passes, in verifications of one token."""
        self._balance = min(self._balance + tokens - cost, SAVED)
        self._rests = self._balance < 0


class Gain:
    """What the head's drafts brought in the text at hand: tokens for the cost of one, over the last verifications."""

    def __init__(self) -> None:
        self._tokens = 0.0  # running sums: tokens emitted,
        self._cost = 0.0  # and what they cost, in verifications of one token

    def note(self, tokens: int, cost: float) -> None:
        """A verification with drafts of the head."""
        self._tokens = (1 - WEIGHT) * self._tokens + tokens
        self._cost = (1 - WEIGHT) * self._cost + cost

    @property
    def rate(self) -> float:
        """Infinite before the first verification."""
        return self._tokens / self._cost if self._cost else np.inf
