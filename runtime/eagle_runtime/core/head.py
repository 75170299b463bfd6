"""What drafters and texts ask of a draft head, which proposes the next tokens of verified rows and of the nodes of a
growing tree.

Shapes: R rows that are proposed for, k proposed tokens per row, Hd width of features.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Float, Int
from eagle_runtime.core.cache import Cache
from eagle_runtime.core.session import SharedPass, Weights
from eagle_runtime.core.target import Features

# Rows that the head reads in one forward pass. Proposals depend on near tokens, heads are trained on short texts, and
# reading thousands of rows would cost as much as many drafts (as in MagicDec, arXiv 2408.11049). On the pair of
# tools/demo_pair after 3000 tokens, greedy tau is 4.4 with a window of 256, 4.2 to 4.4 with 64 to 1024, 3.9 without.
WINDOW = 256
ONE_ROW = range(1, 2)  # DraftHead.row_counts of heads that draft one level at a time
States = Features | Int  # hidden states, or what stands for them where they never leave an engine


@dataclass(frozen=True, slots=True)
class Proposal:
    """The head's output for R rows: the k likeliest next tokens of each, best first, and its own hidden states.

    tokens [R, k]: ids of the target's vocabulary; log_probs [R, k]; hidden [R, Hd]; position: the absolute position in
    the text that the tokens are proposed for, the same for all rows."""

    tokens: Int
    log_probs: Float
    hidden: States
    position: int


class Ranker(Protocol):
    """Turns a head's probabilities into chances to be emitted (drafting.coupling)."""

    def rank(self, tokens: Int, log_probs: Float, position: int) -> tuple[Int, Float]:
        """Returns the candidates [R, k] of a position, best first, and the log-chances [R, k] that they are emitted.
        tokens, log_probs [R, k]: the head's, best first."""

    def weights(self, position: int, levels: int, known: Int | None) -> Weights:
        """Returns the ranking of tokens for `levels` positions from `position` on. known: the target's ids of the
        tokens that the head knows; None for all."""


class DraftHead(Protocol):
    """What a drafter asks of a head: a Head, or one whose proposals are ranked (coupling.RankedHead).

    top_k: tokens proposed per row (k). scratch: rows that growing one tree may use. free_levels: whether `feed` runs no
    forward pass, as `catch_up` has computed all levels. row_counts: how many rows the forward pass of `catch_up` may
    have besides the verified rows that it reads. A head whose levels cost no pass of their own may have several, and
    offers a choice if fewer rows draft the same tokens on fewer levels. most_ahead: how many tokens that will follow
    the text it can read before they do; keeps_ahead: whether their rows stay in its cache, until that is cut to the
    rows before."""

    cache: Cache
    top_k: int
    scratch: int
    free_levels: bool = False
    row_counts: range = ONE_ROW
    most_ahead: int = 0
    keeps_ahead: bool = False

    def note(self, features: Features) -> None:
        """Keep features [n, Hd] of verified rows, which follow those that were noted before, until they are read."""

    @property
    def unread(self) -> int:
        """Verified rows that the head has not read yet."""

    def reading(self, tokens: Sequence[int]) -> SharedPass | None:
        """Returns the pass of the next `catch_up` of the same tokens, which may be shared with those of other texts:
        that then returns its proposal and runs none. None where it runs its own."""
        return None

    def catch_up(self, tokens: Sequence[int], ranker: Ranker | None = None, rows: int | None = None) -> Proposal:
        """Read these rows, one or more, or the last WINDOW of them, and commit them; returns the proposal for the last
        one (R = 1): the children of the root. tokens: the text, the root last. ranker: ranks the candidates of a head
        that grows the levels itself (one_call.py); None for their log-probabilities. rows: one of row_counts; None for
        the most."""

    def read_ahead(self, tokens: Sequence[int], ahead: Sequence[int], rows: int | None = None) -> Proposal:
        """As catch_up, but returns the proposal after `ahead`, which follow the root: at most most_ahead."""
        raise AssertionError("the caller looks at most_ahead")

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        """Add scratch rows for one level of a tree; returns a proposal for each (see Scratch.feed).

        committed: rows of the cache before the tree's; depth: of the level, 0 for the root's children."""


class ForgettingHead(DraftHead, Protocol):
    """A head that forgets what a text drops: a draft model (draft_model.py), or a HeadOfText."""

    def truncate(self, length: int) -> None:
        """Forget the features from position `length` on, and what was read with them; what is noted next is of that
        position."""


class HeadOfText(ForgettingHead, Protocol):
    """What a text asks of a head: it reads, forgets and remembers what belongs to the text. A Head, or Medusa's or
    Hydra's heads (ahead_heads.py)."""

    def snapshot(self) -> HeadSnapshot:
        """Returns a copy of what it holds of the text."""

    def restore(self, snapshot: HeadSnapshot) -> None:
        """Hold what another head of the same graph held. Raises ValueError for rows of other shapes."""


@dataclass(frozen=True, slots=True)
class HeadSnapshot:
    """A copy of what a head holds of a text. rows: of its cache (Cache.read); first: position of the feature in the
    first one; pending: features [n, Hd] that it has not read, from position noted_from on."""

    rows: tuple[npt.NDArray[np.generic], ...]
    first: int
    noted_from: int
    pending: Sequence[npt.NDArray[np.floating]]


class WrappedHead(DraftHead):
    """A DraftHead around another one, with its cache and sizes. Subclasses propose: `catch_up` and `feed`."""

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self.cache, self.top_k, self.scratch = head.cache, head.top_k, head.scratch
        self.free_levels, self.row_counts = head.free_levels, head.row_counts

    def note(self, features: Features) -> None:
        self._head.note(features)

    @property
    def unread(self) -> int:
        return self._head.unread
