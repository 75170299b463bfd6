"""Compares two engines of one bundle: the differences of their outputs over the same forward passes on the same inputs.

The forward passes are those of decoding: a prompt, a tree after it, and a second tree after a path of the first; for
the head the prompt and two levels of a growing tree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from eagle_runtime.drafting.head import Head, Scratch
from eagle_runtime.session.protocol import Session
from eagle_runtime.target import Features, Target
from eagle_runtime.tree import Int, Tree

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
    reference: Sequence[Session],
    other: Sequence[Session],
    vocab_size: int,
    prompts: Sequence[Sequence[int]],
    seed: int = 0,
) -> list[Difference]:
    """Returns the difference of each output between two engines' sessions of one bundle: of the target and, if it has
    one, the head. Both heads read the reference's features, so that a difference does not count twice."""
    rng = np.random.default_rng(seed)
    capacity = max(map(len, prompts)) + 2 * NODES
    targets = [Target(sessions[0], capacity) for sessions in (reference, other)]
    sessions = [_Recorded(session) for pair in (reference, other) for session in pair[1:]]
    heads = [(session, Head(cast(Session, session), capacity, 2 * CHILDREN)) for session in sessions]
    tallies: dict[tuple[str, str], _Tally] = {}
    for prompt in prompts:
        trees = [_random_tree(rng, vocab_size) for _ in range(2)]
        levels = rng.integers(0, vocab_size, (2, CHILDREN))
        ours, theirs = (_target_rows(target, prompt, trees) for target in targets)
        features = ours[1].values
        for (session, head), rows in zip(heads, (ours, theirs), strict=False):  # none without a head
            rows.extend(_head_rows(session, head, prompt, features, levels))
        for one, two in zip(ours, theirs, strict=True):
            tallies.setdefault((one.graph, one.output), _Tally()).add(one, two)
    return [tally.difference(*key) for key, tally in tallies.items()]


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
    logits, features = target.prefill(prompt)
    rows = _verified(logits[None], features)
    for tree in trees:
        rows += _verified(*target.verify(tree))
        target.cache.keep(_path(tree))
    return rows


def _verified(logits: Array, features: Features) -> list[_Rows]:
    best = logits.argmax(-1).astype(np.int64)
    return [_Rows("target", "logits", logits.copy(), best), _Rows("target", "features", np.array(features))]


def _head_rows(session: _Recorded, head: Head, prompt: Sequence[int], features: Array, levels: Int) -> list[_Rows]:
    """Returns the head's outputs. features [n, Hd]: of the prompt. levels [2, CHILDREN]: tokens of the tree's
    levels."""
    head.cache.truncate(0)
    head.observe([*prompt[1:], int(levels[0, 0])], features)
    rows = session.rows()
    hidden = np.repeat(features[-1:], CHILDREN, 0)
    nested = np.arange(CHILDREN)[::-1] // 2  # two children for each of the last two nodes of the first level
    with Scratch(head) as scratch:
        for tokens, parents in zip(levels, (np.full(CHILDREN, -1), nested), strict=True):
            scratch.feed(tokens, hidden, parents)
            rows += session.rows()
    return rows


def _random_tree(rng: np.random.Generator, vocab_size: int) -> Tree:
    parents = np.array([-1, *(int(rng.integers(0, node)) for node in range(1, NODES))])
    return Tree(rng.integers(0, vocab_size, NODES), parents, np.zeros(NODES, np.float32))


def _path(tree: Tree) -> Int:
    """Returns the path from the root to the last node."""
    path = [tree.num_nodes - 1]
    while path[0]:
        path.insert(0, int(tree.parents[path[0]]))
    return np.array(path, np.int64)
