"""Medusa's and Hydra's heads (eagle_export.heads.ahead): one small network for every position after the root.

To a drafter they are a head like any other. They keep no keys or values and read the newest feature alone, so there is
nothing to catch up on. Beyond the last position that a head is for, nothing is proposed: log-probabilities of NEVER.

Shapes: D heads, k tokens per row.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_runtime.base.tree import Float, Int
from eagle_runtime.core.cache import NoRows
from eagle_runtime.core.head import HeadOfText, HeadSnapshot, Proposal, Ranker, States
from eagle_runtime.core.session import Session
from eagle_runtime.core.target import Features
from eagle_runtime.drafting.head import NEVER, OutputCheck

# The 63 choices of Medusa-1 (its authors call them mc_sim_7b_63): a choice lists child ranks from the root.
MEDUSA_CHOICES: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,), (4,), (5,), (6,), (7,), (8,), (9,), (0, 0), (0, 1), (0, 2), (0, 3), (0, 4), (0, 5),
    (0, 6), (0, 7), (0, 8), (0, 9), (1, 0), (1, 1), (1, 2), (1, 3), (1, 4), (1, 5), (1, 6), (2, 0), (2, 1), (2, 2),
    (3, 0), (3, 1), (4, 0), (5, 0), (6, 0), (7, 0), (8, 0), (9, 0), (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 0, 3),
    (0, 0, 4), (0, 0, 5), (0, 0, 6), (0, 0, 7), (0, 0, 8), (0, 0, 9), (0, 1, 0), (0, 1, 1), (0, 1, 2), (0, 2, 0),
    (0, 2, 1), (0, 3, 0), (0, 4, 0), (0, 5, 0), (0, 6, 0), (0, 7, 0), (1, 0, 0), (1, 0, 1), (2, 0, 0), (0, 0, 0, 0),
    (0, 0, 0, 1),
)  # fmt: skip


class AheadHeads(HeadOfText):
    """What both kinds have in common: the newest feature of a text, and the position after it.

    The cache holds nothing; its length counts verified rows."""

    def __init__(self, session: Session, capacity: int, scratch: int, heads: int, top_k: int, vocab_size: int) -> None:
        """capacity: verified tokens; scratch: rows that growing one tree may ask for; heads: D; vocab_size: of the
        target, whose ids the heads should return."""
        self._session = session
        self.scratch = scratch
        self.cache = NoRows(capacity + scratch)
        self.top_k = top_k
        self._heads = heads
        self.most_ahead = heads - 1
        self._dtype = session.inputs["features"].dtype
        self._feature: Float | None = None  # [1, H]
        self._end = 0  # the position after it
        self._read = True  # whether children of the root were proposed from it
        self._position = 0  # that the root's children are for
        self._output_check = OutputCheck(vocab_size)

    @property
    def unread(self) -> int:
        """1 if there is a feature that it has not drafted from, else 0: what was before the newest is not read."""
        return int(not self._read)

    def note(self, features: Features) -> None:
        self._feature = np.array(features[len(features) - 1 :], self._dtype)  # small, so it may come from a GPU
        self._end += len(features)
        self._read = False

    def truncate(self, length: int) -> None:
        if length != self._end:
            self._feature, self._end, self._read = None, length, True
        self.cache.truncate(min(self.cache.length, length))

    def snapshot(self) -> HeadSnapshot:
        pending = [] if self._feature is None else [self._feature.copy()]
        return HeadSnapshot((), 0, self._end - len(pending), pending)

    def restore(self, snapshot: HeadSnapshot) -> None:
        self.cache.write(snapshot.rows)
        self._end = snapshot.noted_from + sum(map(len, snapshot.pending))
        self._feature = np.array(snapshot.pending[-1][-1:], self._dtype) if snapshot.pending else None
        self._read = self._feature is None

    def catch_up(self, tokens: Sequence[int], ranker: Ranker | None = None, rows: int | None = None) -> Proposal:
        return self.read_ahead(tokens, ())

    def _take_feature(self, tokens: Sequence[int]) -> Float:
        """Returns the newest feature [1, H], which counts as read from now on. tokens: the text, the root last."""
        assert self._feature is not None, "a verified row comes before every draft"
        self.cache.truncate(0)
        self.cache.advance(min(self._end, self.cache.room))
        self._read, self._position = True, len(tokens)
        return self._feature

    def _nothing(self, count: int, depth: int) -> Proposal:
        """Proposals [count, k] that never come, for children at a depth that no head is for."""
        ids = np.tile(np.arange(self.top_k), (count, 1))
        chances = np.full((count, self.top_k), NEVER, np.float32)
        return Proposal(ids, chances, np.zeros(count, np.int64), self._position + depth)


class MedusaHeads(AheadHeads):
    """Heads that look at the feature alone: one forward pass proposes for all depths, whatever stands above."""

    free_levels = True

    def __init__(self, session: Session, capacity: int, scratch: int, vocab_size: int = 2**62) -> None:
        """As in AheadHeads."""
        _, heads, top_k = (int(size) for size in session.outputs["log_probs"].shape)
        super().__init__(session, capacity, scratch, heads, top_k, vocab_size)
        self._proposed: tuple[Int, Float] = (np.empty((0, top_k), np.int64), np.empty((0, top_k), np.float32))

    def read_ahead(self, tokens: Sequence[int], ahead: Sequence[int], rows: int | None = None) -> Proposal:
        """As in DraftHead: the heads of the positions ahead are left out."""
        out = self._session.run({"features": self._take_feature(tokens)}, self.cache)
        ids, log_probs = self._output_check.checked(out["token_ids"], out["log_probs"])
        ids, log_probs = self._proposed = ids[len(ahead) :], log_probs[len(ahead) :]
        self._position += len(ahead)
        return Proposal(ids[:1], log_probs[:1], np.zeros(1, np.int64), self._position)

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        """As in DraftHead, without a forward pass."""
        count, place = len(tokens), depth + 1
        ids, log_probs = self._proposed
        if place >= len(ids):
            return self._nothing(count, place)
        rows = np.full(count, place)
        return Proposal(ids[rows], log_probs[rows], np.zeros(count, np.int64), self._position + place)


class HydraHeads(AheadHeads):
    """Heads that also read the tokens since the feature: a forward pass for every level. The `hidden` of proposals
    numbers the paths of the tree that is growing."""

    def __init__(self, session: Session, capacity: int, scratch: int, vocab_size: int = 2**62) -> None:
        """As in AheadHeads."""
        names = [name for name in session.inputs if name.startswith("paths.")]
        top_k = int(session.outputs["log_probs.0"].shape[2])
        super().__init__(session, capacity, scratch, len(names), top_k, vocab_size)
        self._no_paths = {name: np.empty((0, depth + 1), np.int64) for depth, name in enumerate(names)}
        self._paths: Int = np.empty((0, len(names)), np.int64)  # of all fed rows: the root and the tokens after it
        self._ahead = 0  # of these tokens, those that were read ahead

    def read_ahead(self, tokens: Sequence[int], ahead: Sequence[int], rows: int | None = None) -> Proposal:
        """As in DraftHead: every path begins with the tokens ahead."""
        self._take_feature(tokens)
        self._ahead = len(ahead)
        self._paths = np.zeros((1, self._heads), np.int64)
        self._paths[0, : 1 + self._ahead] = [tokens[-1], *ahead]
        return self._level(self._paths, self._ahead)

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        place = self._ahead + depth + 1
        if place >= self._heads:
            return self._nothing(len(tokens), place)
        paths: Int = self._paths[np.asarray(hidden)]
        paths[:, place] = tokens
        self._paths = np.concatenate([self._paths, paths])
        return self._level(paths, place)

    def _level(self, paths: Int, depth: int) -> Proposal:
        """One forward pass over the newest paths, of `depth` tokens after the root."""
        feeds = {"features": self._feature, **self._no_paths, f"paths.{depth}": paths[:, : depth + 1]}
        out = self._session.run(feeds, self.cache)
        proposed = self._output_check.checked(out[f"token_ids.{depth}"], out[f"log_probs.{depth}"])
        states = len(self._paths) - len(paths) + np.arange(len(paths))
        return Proposal(*proposed, states, self._position + depth)
