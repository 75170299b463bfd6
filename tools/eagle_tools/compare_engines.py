"""Compares two engines of one bundle: the differences of their outputs over the same forward passes on the same inputs.

The forward passes are those of decoding: a prompt, a tree after it, and a second tree after a path of the first; for
the head the prompt and two levels of a growing tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Int, Tree
from eagle_runtime.core.session import OneCallSession, Session
from eagle_runtime.core.target import Features, Target
from eagle_runtime.drafting.head import Head, Scratch
from eagle_runtime.drafting.one_call import UNWEIGHTED

NODES = 15  # nodes of a compared tree
CHILDREN = 4  # nodes of a compared level

Array = npt.NDArray[Any]


@dataclass(frozen=True, slots=True)
class Difference:
    """The difference of one output over all forward passes. largest: maximum absolute difference. scale: maximum
    absolute value of the reference. agreement: share of rows that rank the same token first; None for outputs without
    ranks."""

    graph: str
    output: str
    largest: float
    scale: float
    agreement: float | None


@dataclass(frozen=True, slots=True)
class _Rows:
    """One output of a forward pass. best [n]: the token that each row ranks first."""

    graph: str
    output: str
    values: Array
    best: Int | None = None


def compare_sessions(
    reference: Sequence[Session], other: Sequence[Session], vocab_size: int, prompts: Sequence[Sequence[int]]
) -> list[Difference]:
    """Returns the difference of each output between two engines' sessions of one bundle: of the target and, if it has
    one, the head. Both heads read the reference's features, so that a difference does not count twice."""
    rng = np.random.default_rng(0)
    capacity = max(map(len, prompts)) + 2 * NODES
    targets = [Target(sessions[0], capacity) for sessions in (reference, other)]
    sessions = [session for pair in (reference, other) for session in pair[1:]]
    heads = [_OneCall(one) if isinstance(one, OneCallSession) else _ByLevels(one, capacity) for one in sessions]
    depth = min((head.levels for head in heads), default=0)
    tallies: dict[tuple[str, str], _Tally] = {}
    for prompt in prompts:
        trees = [_random_tree(rng, vocab_size) for _ in range(2)]
        levels = rng.integers(0, vocab_size, (2, CHILDREN))
        ours, theirs = (_target_rows(target, prompt, trees) for target in targets)
        features = ours[1].values
        for head, rows in zip(heads, (ours, theirs), strict=False):  # none without a head
            rows.extend(head.rows(prompt, features, levels[:depth]))
        for one, two in zip(ours, theirs, strict=True):
            tallies.setdefault((one.graph, one.output), _Tally()).add(one, two)
    return [tally.difference(*key) for key, tally in tallies.items()]


class _OneCall:
    """The head of a session that drafts whole trees: what it proposes after a prompt can be compared, and no levels."""

    levels = 0

    def __init__(self, session: OneCallSession) -> None:
        self._session = session

    def rows(self, prompt: Sequence[int], features: Array, levels: Int) -> list[_Rows]:
        """As in _ByLevels."""
        session = self._session
        tokens = np.array([*prompt[1:], int(prompt[0])], np.int64)
        cache = session.new_cache(len(prompt) + session.most_rows)
        for start in range(0, len(tokens), session.most_rows):
            piece = slice(start, start + session.most_rows)
            drafted = session.draft(tokens[piece], features[piece], UNWEIGHTED, cache)
            cache.advance(len(tokens[piece]))
        return [_Rows("draft", "log_probs", drafted.root_log_probs[None], drafted.root_tokens[:1])]


class _ByLevels:
    """The head of a session that computes level by level."""

    levels = 2

    def __init__(self, session: Session, capacity: int) -> None:
        self._session = _Recorded(session)
        self._head = Head(cast(Session, self._session), capacity, 2 * CHILDREN)

    def rows(self, prompt: Sequence[int], features: Array, levels: Int) -> list[_Rows]:
        """Returns the head's outputs. features [n, Hd]: of the prompt. levels [n, CHILDREN]: tokens of the tree's
        levels, two or none; of none, only what is proposed after the prompt."""
        head, session = self._head, self._session
        head.cache.truncate(0)
        head.note(features)
        head.catch_up([*prompt[1:], int(prompt[0])])
        rows = session.rows()
        hidden = np.repeat(features[-1:], CHILDREN, 0)
        nested = np.arange(CHILDREN)[::-1] // 2  # two children for each of the last two nodes of the first level
        with Scratch(head) as scratch:
            for tokens, parents in zip(levels, (np.full(CHILDREN, -1), nested), strict=False):
                scratch.feed(tokens, hidden, parents)
                rows += session.rows()
        return rows if len(levels) else rows[:1]


class _Recorded:
    """A head's session that keeps the outputs of its last forward pass. Head replaces NaN and infinities in them, and
    a comparison must see those."""

    def __init__(self, session: Session) -> None:
        self._session = session
        self.inputs, self.outputs = session.inputs, session.outputs
        self.new_cache, self.joined = session.new_cache, session.joined
        self.last: dict[str, Any] = {}

    def run(self, feeds: Mapping[str, Any], cache: Any) -> dict[str, Any]:
        self.last = self._session.run(feeds, cache)
        return self.last

    def rows(self) -> list[_Rows]:
        """Returns copies of the last forward pass's outputs."""
        log_probs, best = np.array(self.last["log_probs"]), np.array(self.last["token_ids"])[:, 0]
        return [_Rows("draft", "log_probs", log_probs, best), _Rows("draft", "hidden", np.array(self.last["hidden"]))]


class _Tally:
    """Sums up the differences of one output."""

    def __init__(self) -> None:
        self._largest = self._scale = 0.0
        self._same: list[bool] = []

    def add(self, one: _Rows, two: _Rows) -> None:
        """Add the rows of a forward pass. one: by the reference."""
        difference = np.abs(one.values.astype(np.float64) - two.values)
        self._largest = max(self._largest, float(np.where(np.isnan(difference), np.inf, difference).max()))
        self._scale = max(self._scale, float(np.abs(one.values).max()))
        if one.best is not None and two.best is not None:
            self._same += (one.best == two.best).tolist()

    def difference(self, graph: str, output: str) -> Difference:
        agreement = float(np.mean(self._same)) if self._same else None
        return Difference(graph, output, self._largest, self._scale, agreement)


def _target_rows(target: Target, prompt: Sequence[int], trees: Sequence[Tree]) -> list[_Rows]:
    last, features = target.prefill(prompt)
    rows = _verified(last[None], features)
    for tree in trees:
        logits, features = target.verify(tree)
        rows += _verified(np.asarray(logits), features)
        target.cache.keep(_path(tree))
    return rows


def _verified(logits: Array, features: Features) -> list[_Rows]:
    best = logits.argmax(-1).astype(np.int64)
    return [_Rows("target", "logits", logits.copy(), best), _Rows("target", "features", np.array(features))]


def _random_tree(rng: np.random.Generator, vocab_size: int) -> Tree:
    parents = np.array([-1, *(int(rng.integers(0, node)) for node in range(1, NODES))])
    return Tree(rng.integers(0, vocab_size, NODES), parents, np.zeros(NODES, np.float32))


def _path(tree: Tree) -> Int:
    """Returns the path from the root to the last node."""
    path = [tree.num_nodes - 1]
    while path[0]:
        path.insert(0, int(tree.parents[path[0]]))
    return np.array(path, np.int64)
