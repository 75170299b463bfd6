"""Lookahead decoding (arXiv 2402.02057): the target forecasts several positions at once, as in Jacobi's iteration, and
its forecasts of one pass become n-grams that later passes verify. Needs no head and no other model.

A window of W columns and N - 1 levels holds forecasts of earlier passes. Level 0 is a chain under the root; its column
0 is the root itself. A token of level i and column j was forecast after that of level i - 1 in the same column, so it
is the child of that one. What the target holds likeliest after the newest level completes an n-gram of every column:
the token of level 0, and the N - 1 forecast after it. Then the window moves up by one level. N-grams that begin with
the root are drafted next to the window. So all rows are one tree, of which the verification knows nothing special.

The forecasts are the likeliest tokens at any temperature: an n-gram is drafted at another position than it was forecast
at, where the random numbers of the seed are others.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle_runtime.base.tree import Tree
from eagle_runtime.core.accept import Step
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.drafting.constrained import constrained
from eagle_runtime.drafting.method import Choice, Method, Parts, Trees
from eagle_runtime.sampling.grammar_matcher import Lookahead


@dataclass(frozen=True, slots=True)
class Window:
    """columns: W in the paper; size: N, of n-grams, 2 or more; ngrams: G, those that are drafted at most."""

    columns: int = 3
    size: int = 3
    ngrams: int = 3


class JacobiDrafter(Drafter):
    """Grows the window and the n-grams that fit into one tree. One object per generation."""

    def __init__(self, window: Window | None = None, lookahead: Lookahead | None = None) -> None:
        """lookahead: of a constraint, which cuts n-grams; the window is not cut, since its tokens are not expected to
        be accepted."""
        self._window = window or Window()
        self._lookahead = lookahead
        self._levels: list[list[int]] = []
        self._pool: dict[int, list[tuple[int, ...]]] = {}  # first token -> the tokens after it, the newest n-gram last
        self._newest: list[int] = []  # nodes of the newest level in the last tree; empty if the window had no room
        self._root = -1

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        """As in Drafter. Where there is no room for the window, the n-grams alone are drafted, as many as fit."""
        self._root = tokens[-1]
        if not self._levels:  # forecasts to begin with: tokens of the text, from its end on
            self._levels = [[tokens[-1 - column % len(tokens)] for column in range(self._window.columns)]]
        rows = sum(map(len, self._levels)) - 1
        fits = rows < max_nodes
        grown = _Growing(self._root, max_nodes - (rows if fits else 0))
        for following in reversed(self._pool.get(self._root, [])):
            grown.add_path(following if self._lookahead is None else self._lookahead.cut(following))
        self._newest = self._add_window(grown) if fits else []
        return grown.tree()

    def _add_window(self, grown: _Growing) -> list[int]:
        """Add the nodes of all levels; returns those of the newest."""
        nodes = [0]
        for token in self._levels[0][1:]:
            nodes.append(grown.add(token, nodes[-1]))
        for level in self._levels[1:]:
            nodes = [grown.add(token, parent) for token, parent in zip(level, nodes, strict=True)]
        return nodes

    def learn(self, step: Step) -> None:
        """Take what the target holds likeliest after the window's newest level."""
        if not self._newest or step.logits is None:
            return
        forecast = [_likeliest(step.logits[node]) for node in self._newest]
        if len(self._levels) == self._window.size - 1:
            self._levels[0][0] = self._root
            for first, *rest in zip(*self._levels, forecast, strict=True):
                known, following = self._pool.setdefault(first, []), tuple(rest)
                if following in known:
                    known.remove(following)
                known.append(following)
                del known[: -self._window.ngrams]
            del self._levels[0]
        self._levels.append(forecast)


class _Growing:
    """A tree that grows node by node."""

    def __init__(self, root: int, most: int) -> None:
        """most: nodes that `add_path` fills."""
        self._tokens, self._parents = [root], [-1]
        self._most = most
        self._children: dict[tuple[int, int], int] = {}

    def add(self, token: int, parent: int) -> int:
        """Returns a new node."""
        self._tokens.append(token)
        self._parents.append(parent)
        return len(self._tokens) - 1

    def add_path(self, path: Sequence[int]) -> None:
        """Add tokens one below the other, where they are not there yet and there is room."""
        node = 0
        for token in path:
            child = self._children.get((node, token))
            if child is None:
                if len(self._tokens) >= self._most:
                    return
                child = self._children[node, token] = self.add(token, node)
            node = child

    def tree(self) -> Tree:
        """Returns the tree; all scores are 0."""
        tokens, parents = np.array(self._tokens, np.int64), np.array(self._parents, np.int64)
        return Tree(tokens, parents, np.zeros(len(tokens), np.float32))


def _likeliest(row: object) -> int:
    """row: logits [V], or a LogitRow."""
    return int(row.argmax()) if isinstance(row, np.ndarray) else int(row.candidates.ids[0])  # type: ignore[attr-defined]


def _lookahead(choice: Choice, parts: Parts) -> Drafter:
    return constrained(JacobiDrafter(lookahead=parts.lookahead), parts.lookahead)


DRAFTS = "the target's own forecasts of several positions, and n-grams that it forecast before"
LOOKAHEAD = Method("lookahead", (Trees((), DRAFTS, _lookahead),))
