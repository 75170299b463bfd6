"""The draft head of a pair: proposes the next tokens of verified rows and of the nodes of a growing tree.

Shapes: T rows of one forward pass, R rows that are proposed for, k proposed tokens per row, Hd width of features.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np

from eagle_runtime.base.errors import EagleWarning
from eagle_runtime.base.tree import Float, Int, additive_mask
from eagle_runtime.core.head import WINDOW, DraftHead, HeadOfText, HeadSnapshot, Proposal, Ranker, States
from eagle_runtime.core.session import Session, SharedPass
from eagle_runtime.core.target import Features, Floating, causal, row_numbers

MOST_JOINED = 16  # rows of a text that are read in a pass with those of others: after a verification they are fewer
MOST_AHEAD = 24  # rows that are read ahead, as cost_aware.MAX_MATCHED
SCRATCH = 512  # rows that growing one tree may use: as many as a prompt's chunk, and ten times a usual tree
NEVER = -60.0  # log-probability of a token that cannot come: finite, so that sums stay numbers


class Head(HeadOfText):
    """The draft head, and what it has read of one text.

    Committed rows of its cache hold verified tokens with target features only: row i pairs the target's feature at
    position first + i with the token after it. Scratch rows of a growing tree follow them for one draft. Features of
    verified rows wait until the head reads them, the last WINDOW of them: what was before is not read."""

    most_ahead, keeps_ahead = MOST_AHEAD, True

    def __init__(self, session: Session, capacity: int, scratch: int, vocab_size: int = 2**62) -> None:
        """capacity: verified tokens; scratch: rows that growing one tree may need beyond them; vocab_size: of the
        target, whose ids the head should return."""
        self._session = session
        self.scratch = scratch
        self.cache = session.new_cache(capacity + scratch)
        self.top_k = int(session.outputs["token_ids"].shape[2])
        dtype = session.inputs["tree_mask"].dtype
        self._causal = additive_mask(causal(WINDOW), dtype)
        # Additive masks of scratch rows among each other; the last row sees none of them.
        self._scratch_masks = additive_mask(np.zeros((scratch + 1, scratch), np.bool_), dtype)
        self._feature_dtype = session.inputs["features"].dtype
        self._first = 0  # position of the feature in the first row of the cache
        self._noted: list[Features] = []  # that were not read yet
        self._noted_from = 0  # position of the first of them; past the last row's if some were dropped in between
        self._unread = 0  # rows of features in _noted
        self._read: Proposal | None = None  # for the last row, which was read in a pass with those of other texts
        self._output_check = OutputCheck(vocab_size)

    @property
    def unread(self) -> int:
        return self._unread

    def note(self, features: Features) -> None:
        self._read = None
        self._noted.append(features)
        self._unread += len(features)
        while self._unread - len(self._noted[0]) >= WINDOW:
            self._unread -= len(self._noted[0])
            self._noted_from += len(self._noted.pop(0))

    def truncate(self, length: int) -> None:
        """Forget the features from position `length` on, and what was read with them; what is noted next is of that
        position. Where features before it were not noted, or were not kept, all is forgotten."""
        self._read = None
        if not self._first <= length <= self._noted_from + self._unread:
            self.cache.truncate(0)
            self._first = self._noted_from = length
            self._noted, self._unread = [], 0
            return
        self.cache.truncate(min(self.cache.length, length - self._first))
        if (kept := max(0, length - self._noted_from)) < self._unread:
            self._noted = [self._session.joined(self._noted)[:kept]] if kept else []
            self._unread = kept
        self._noted_from = min(self._noted_from, length)

    def snapshot(self) -> HeadSnapshot:
        pending = [np.asarray(part) for part in self._noted]
        return HeadSnapshot(tuple(self.cache.read()), self._first, self._noted_from, pending)

    def restore(self, snapshot: HeadSnapshot) -> None:
        self.cache.write(snapshot.rows)
        self._first, self._noted_from = snapshot.first, snapshot.noted_from
        self._noted = list(snapshot.pending)
        self._unread = sum(map(len, snapshot.pending))

    def catch_up(self, tokens: Sequence[int], ranker: Ranker | None = None, rows: int | None = None) -> Proposal:
        if self._read is not None:
            proposal, self._read = self._read, None
            return proposal
        proposal = self._run(*self._rows_to_read(*self._to_read(tokens)))
        self._have_read()
        return proposal

    def reading(self, tokens: Sequence[int]) -> SharedPass | None:
        """As in DraftHead: None for a text of which it has read nothing."""
        if not self._session.joins or not 0 < self._unread <= MOST_JOINED:
            return None
        ids, features = self._to_read(tokens)
        if self.cache.length == 0:
            return None
        feeds = self._feeds(*self._rows_to_read(ids, features))
        return SharedPass(self._session, self.cache, lambda: feeds, partial(self._take, feeds["position_ids"]))

    def _take(self, positions: Int, out: Mapping[str, Any]) -> None:
        """Take the outputs of a pass of `reading`; those of a second run, after an interrupt, are of no use."""
        if self._read is None:
            self._read = self._proposal(positions, out)
            self._have_read()

    def read_ahead(self, tokens: Sequence[int], ahead: Sequence[int], rows: int | None = None) -> Proposal:
        """As in DraftHead. The rows ahead take the last feature that is known in place of their own."""
        ids, features = self._to_read(tokens)
        numbers = row_numbers(len(ids) + len(ahead))
        read = np.concatenate([ids, np.array(ahead, np.int64)])
        positions, mask = self.cache.length + numbers, self._causal[: len(read), : len(read)]
        proposal = self._run(read, features[np.minimum(numbers, len(ids) - 1)], positions, mask, numbers[-1:])
        self._have_read()
        return proposal

    def _to_read(self, tokens: Sequence[int]) -> tuple[Int, Features]:
        """Returns the tokens [n] and features [n, Hd] of the rows to read next, after those in the cache."""
        count, end = min(self._unread, WINDOW), self._noted_from + self._unread
        features = self._noted[0] if len(self._noted) == 1 else self._session.joined(self._noted)
        if self._first + self.cache.length != end - count:
            self.cache.truncate(0)
            self._first = end - count
        return np.array(tokens[len(tokens) - count :], np.int64), features[len(features) - count :]

    def _rows_to_read(self, ids: Int, features: Features) -> tuple[Int, Features, Int, Floating, Int]:
        """Returns what _run takes for verified rows after those in the cache; proposals are for the last."""
        numbers = row_numbers(len(ids))
        return ids, features, self.cache.length + numbers, self._causal[: len(ids), : len(ids)], numbers[-1:]

    def _have_read(self) -> None:
        """The rows are in the cache."""
        self._noted, self._unread, self._noted_from = [], 0, self._noted_from + self._unread

    def feed(self, tokens: Int, hidden: States, parents: Int, committed: int, depth: int) -> Proposal:
        # The root's children are fed at the position right after the committed rows, each level one further.
        positions = np.full(len(tokens), committed + depth, np.int64)
        mask = self._scratch_mask(parents, self.cache.length - committed)
        return self._run(tokens, hidden, positions, mask, row_numbers(len(tokens)))

    def _scratch_mask(self, parents: Int, fed: int) -> Floating:
        """Returns additive masks [T, fed + T] of new scratch rows that follow `fed` others: each sees what its parent
        sees, and itself. parents [T]: scratch rows, -1 for those that see no other. Valid until the next call."""
        end = fed + len(parents)
        self._scratch_masks[fed:end, :end] = self._scratch_masks[parents, :end]
        rows = np.arange(fed, end)
        self._scratch_masks[rows, rows] = 0
        return self._scratch_masks[fed:end, :end]

    def _run(self, tokens: Int, features: States, positions: Int, mask: Floating, wanted: Int) -> Proposal:
        """One forward pass over T rows, which stay in the cache. mask [T, L], additive, says which of the last L rows
        (these T included) each may see; wanted [R]: the rows whose proposals are returned."""
        feeds = self._feeds(tokens, features, positions, mask, wanted)
        return self._proposal(positions, self._session.run(feeds, self.cache))

    def _feeds(self, tokens: Int, features: States, positions: Int, mask: Floating, wanted: Int) -> dict[str, Any]:
        if isinstance(features, np.ndarray):
            features = np.ascontiguousarray(features, self._feature_dtype)
        return {
            "input_ids": tokens,
            "features": features,
            "position_ids": positions,
            "tree_mask": mask,
            "logit_rows": wanted,
        }

    def _proposal(self, positions: Int, out: Mapping[str, Any]) -> Proposal:
        """Commit the rows of a pass at these positions."""
        self.cache.advance(len(positions))
        token_ids, log_probs = self._output_check.checked(out["token_ids"], out["log_probs"])
        # Row i holds the token at i + 1, and proposes the one after it.
        position = self._first + int(positions[-1]) + 2
        return Proposal(token_ids, log_probs, self._session.joined([out["hidden"]]), position)


def nothing(rows: int, top_k: int, position: int) -> Proposal:
    """Returns proposals that never come, of a head that looks at no hidden states."""
    shape = (rows, top_k)
    return Proposal(np.zeros(shape, np.int64), np.full(shape, NEVER, np.float32), np.zeros(rows, np.int64), position)


class OutputCheck:
    """Makes a head's output fit for trees whatever the head computes: ids that exist, log-probabilities that are
    numbers, best first. A broken head costs drafts, never an error or another output."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._warned = False

    def checked(self, token_ids: Int, log_probs: Float) -> tuple[Int, Float]:
        """Returns copies of a forward pass's tokens [R, k] and log-probabilities [R, k]. Tokens that do not exist, and
        those whose log-probability is NaN or infinite, get NEVER; a warning says so once."""
        # A log-probability that rounds above 0 would let a child outrank its parent.
        bounded: Float = np.minimum(log_probs, 0, dtype=np.float32)
        # Quickly, as every level of a tree comes here: for some ten numbers lists are faster than arrays.
        exist = all(min(row) >= 0 and max(row) < self._vocab_size for row in token_ids.tolist())
        if exist and all(map(_is_sound, log_probs.tolist())):
            return token_ids.copy(), bounded
        outside = (token_ids < 0) | (token_ids >= self._vocab_size)
        wrong = outside | np.isnan(log_probs) | np.isposinf(log_probs)
        if wrong.any() and not self._warned:
            self._warned = True
            warnings.warn(
                "the draft head computes what it should not (NaN, infinities, or ids outside the vocabulary): drafts "
                "are lost, but the output does not change; export the head again, or in fp32",
                EagleWarning,
                stacklevel=2,
            )
        bounded = np.where(wrong, np.float32(NEVER), np.maximum(bounded, np.float32(NEVER)))
        order = np.argsort(-bounded, axis=1, kind="stable")
        tokens = np.where(outside, 0, token_ids)
        return np.take_along_axis(tokens, order, 1), np.take_along_axis(bounded, order, 1)


def _is_sound(log_probs: list[float]) -> bool:
    """Whether a row's log-probabilities are numbers, best first; the sum is NaN where one of them is."""
    ordered = log_probs == sorted(log_probs, reverse=True)
    return ordered and NEVER <= log_probs[0] < math.inf and sum(log_probs) > -math.inf


class Scratch:
    """Rows of one growing tree, level by level, after the head's committed rows; dropped when the block ends.

    with Scratch(head) as scratch:
        proposal = scratch.feed(tokens, hidden, parents)   # one level
    """

    def __init__(self, head: DraftHead) -> None:
        self._head = head
        self._committed = head.cache.length
        self._depth = -1

    def feed(self, tokens: Int, hidden: States, parents: Int) -> Proposal:
        """Feed one level of the tree; returns a proposal for each of its nodes (R = T).

        tokens [T]; hidden [T, Hd]: the state that proposed each; parents [T]: the scratch row of each one's parent, -1
        under the root. Scratch rows count up in the order fed."""
        self._depth += 1
        return self._head.feed(tokens, hidden, parents, self._committed, self._depth)

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self._head.cache.truncate(self._committed)
