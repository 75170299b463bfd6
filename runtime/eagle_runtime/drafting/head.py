"""The draft head of a pair: proposes the next tokens of verified rows and of the nodes of a growing tree.

Shapes: T rows of one forward pass, R rows that are proposed for, k proposed tokens per row, Hd width of features.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from eagle_runtime.drafting.coupling import NEVER, Ranker
from eagle_runtime.errors import EagleWarning
from eagle_runtime.session.protocol import Session
from eagle_runtime.target import Features, Floating, causal, row_numbers
from eagle_runtime.tree import Float, Int, additive_mask

WINDOW = 256  # rows that the head reads in one go


@dataclass(frozen=True, slots=True)
class Proposal:
    """The head's output for T rows: its k likeliest next tokens per row, best first, and its own hidden state.

    tokens [T, k] target ids, log_probs [T, k], hidden [T, Hd]."""

    tokens: Int
    log_probs: Float
    hidden: Features


class Head:
    """The draft head. Settled rows of its cache hold verified tokens with target features only; row i pairs the
    target's feature at position i with the token at i + 1, counted from where it began to read. Rows of a growing tree
    stand behind them for one draft.

    Of a prompt longer than WINDOW it reads the last WINDOW rows alone: proposals depend on what is near, heads learned
    from short texts, and a forward pass over thousands of rows would cost as much as many drafts (as in MagicDec,
    arXiv 2408.11049).
    On the pair of tools/demo_pair behind 3000 tokens, greedy tau is 4.4 with a window of 256, 4.2 to 4.4 with 64 to
    1024, and 3.9 without one."""

    def __init__(self, session: Session, capacity: int, scratch: int, vocab_size: int = 2**62) -> None:
        """capacity: verified tokens; scratch: rows that growing one tree may need beyond them; vocab_size: of the
        target, whose ids the head should name."""
        self._session = session
        self._scratch = scratch
        self.cache = session.new_cache(capacity + scratch)
        self.top_k = int(session.outputs["token_ids"].shape[2])
        dtype = session.inputs["tree_mask"].dtype
        self._causal = additive_mask(causal(WINDOW), dtype)
        # Additive masks of scratch rows among each other; the last row sees none of them.
        self._scratch_masks = additive_mask(np.zeros((scratch + 1, scratch), np.bool_), dtype)
        self._feature_dtype = session.inputs["features"].dtype
        self._ranker: Ranker | None = None
        self._unread = 0  # tokens before that of the first row
        self._named = _NamedTokens(vocab_size)  # shared by all that are coupled

    def coupled(self, ranker: Ranker) -> Head:
        """This head, with the same cache, guessing what will be emitted in place of what is likely."""
        other = copy.copy(self)
        other._ranker = ranker
        return other

    @property
    def scratch(self) -> int:
        """Rows that growing one tree may use."""
        return self._scratch

    def joined(self, parts: Sequence[Features]) -> Features:
        """Rows of features, one part below the other."""
        rows: Features = self._session.joined(parts)
        return rows

    def observe(self, tokens: Sequence[int], features: Features) -> Proposal:
        """Settle verified rows; returns the proposal of the last one (T = 1): the children of the root.

        tokens [n]: the token after each feature row, the root last; features [n, Hd]: the target's. Into an empty cache
        come the prompt's; of more than WINDOW rows the last are read, and all before them forgotten."""
        assert len(tokens) == len(features) > 0
        if self._ranker is not None:
            self._ranker.learn(tokens[0])
        if self.cache.length == 0:
            self._unread = 0
        if (skipped := len(tokens) - WINDOW) > 0:
            self._unread += self.cache.length + skipped
            self.cache.truncate(0)
            tokens, features = tokens[skipped:], features[skipped:]
        ids = np.array(tokens, np.int64)
        numbers = row_numbers(len(ids))
        mask = self._causal[: len(ids), : len(ids)]
        proposal = self._run(ids, features, self.cache.length + numbers, mask, numbers[-1:])
        self.cache.advance(len(ids))
        return self.decided(proposal, self.cache.length, awaited=True)

    def decided(self, proposal: Proposal, row: int, *, awaited: bool = False) -> Proposal:
        """A proposal of the tokens that the committed row `row` will hold, as far as that can be foreseen.
        awaited: the first token observed next is what came of it."""
        if self._ranker is None:
            return proposal
        position = self._unread + row + 1
        tokens, log_probs = self._ranker.decide(proposal.tokens, proposal.log_probs, position, awaited=awaited)
        return Proposal(tokens, log_probs, proposal.hidden)

    def scratch_mask(self, parents: Int, fed: int) -> Floating:
        """Additive masks [T, fed + T] of new scratch rows behind `fed` others: each sees what its parent sees, and
        itself. parents [T]: scratch rows, -1 for those that see no other. Valid until the next call."""
        end = fed + len(parents)
        self._scratch_masks[fed:end, :end] = self._scratch_masks[parents, :end]
        rows = np.arange(fed, end)
        self._scratch_masks[rows, rows] = 0
        return self._scratch_masks[fed:end, :end]

    def _run(self, tokens: Int, features: Features, positions: Int, mask: Floating, wanted: Int) -> Proposal:
        """T rows; mask [T, L], additive, says which of the last L rows (these T included) each may see; wanted [R]: the
        rows whose proposals are returned."""
        if isinstance(features, np.ndarray):
            features = np.ascontiguousarray(features, self._feature_dtype)
        out: dict[str, Any] = self._session.run(
            {
                "input_ids": tokens,
                "features": features,
                "position_ids": positions,
                "tree_mask": mask,
                "logit_rows": wanted,
            },
            self.cache,
        )
        named, log_probs = self._named.checked(out["token_ids"], out["log_probs"])
        return Proposal(named, log_probs, self._session.joined([out["hidden"]]))


class _NamedTokens:
    """What a head names, made fit for trees and races whatever it computes: ids that exist, log-chances that are
    numbers, best first. A broken head costs drafts, never an error or another output."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._warned = False

    def checked(self, token_ids: Int, log_probs: Float) -> tuple[Int, Float]:
        """Copies of a pass's tokens [R, k] and log-chances [R, k]. What is no number, and tokens that do not exist,
        get the chance of what never comes; a warning says so once."""
        # A log-probability that rounds above 0 would let a child outrank its parent.
        chances: Float = np.minimum(log_probs, 0, dtype=np.float32)
        if (  # quickly, as every level of a tree comes here; NaN fails every comparison
            token_ids.view(np.uint64).max() < self._vocab_size
            and (chances[:, :-1] >= chances[:, 1:]).all()
            and chances[:, -1].min() > -np.inf
            and chances[:, 0].min() >= NEVER
            and log_probs[:, 0].max() < np.inf
        ):
            return token_ids.copy(), chances
        outside = (token_ids < 0) | (token_ids >= self._vocab_size)
        wrong = outside | np.isnan(log_probs) | np.isposinf(log_probs)
        if wrong.any() and not self._warned:
            self._warned = True
            warnings.warn(
                "the draft head computes what it should not (NaN, infinities, or ids outside the vocabulary): drafts "
                "are lost, though not a token of the output is another; export the head again, or in "
                "fp32",
                EagleWarning,
                stacklevel=2,
            )
        chances = np.where(wrong, np.float32(NEVER), np.maximum(chances, np.float32(NEVER)))
        order = np.argsort(-chances, axis=1, kind="stable")
        tokens = np.where(outside, 0, token_ids)
        return np.take_along_axis(tokens, order, 1), np.take_along_axis(chances, order, 1)


class Scratch:
    """Rows of one growing tree, level by level, behind the head's committed rows; gone when the block ends.

    with Scratch(head) as scratch:
        proposal = scratch.feed(tokens, hidden, parents)   # one level
    """

    def __init__(self, head: Head) -> None:
        self._head = head
        self._committed = head.cache.length
        self._depth = 0

    def feed(self, tokens: Int, hidden: Features, parents: Int) -> Proposal:
        """One level of the tree: tokens [T], the hidden state each follows from [T, Hd], and the scratch row of
        each one's parent [T], -1 under the root. Scratch rows count up in the order fed."""
        head, new = self._head, len(tokens)
        # The root's children are fed at the position right after the committed rows, each level one further; what they
        # proposal would be committed in the row after theirs.
        position = self._committed + self._depth
        mask = head.scratch_mask(parents, head.cache.length - self._committed)
        proposal = head._run(tokens, hidden, np.full(new, position, np.int64), mask, row_numbers(new))
        head.cache.advance(new)
        self._depth += 1
        return head.decided(proposal, position + 1)

    def __enter__(self) -> Scratch:
        return self

    def __exit__(self, *_: object) -> None:
        self._head.cache.truncate(self._committed)
