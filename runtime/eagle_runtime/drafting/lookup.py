"""Method lookup, drafts without a model: what followed the longest earlier match of the text's last tokens, an n-gram
match (prompt lookup, arXiv 2304.04487), here or in a datastore."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

import numpy as np

from eagle_runtime.base.tree import MAX_NODES, Tree, chain_of, rerank
from eagle_runtime.core.accept import Step
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.drafting.build import cost_aware_drafter
from eagle_runtime.drafting.constrained import constrained
from eagle_runtime.drafting.datastore import NOTHING, Datastore
from eagle_runtime.drafting.matches import NgramIndex, PredictedText, longest_match
from eagle_runtime.drafting.method import Choice, Method, Parts, Trees
from eagle_runtime.drafting.shapes import DynamicTree, StaticTree


class LookupDrafter(Drafter):
    """Drafts a chain, the continuation of the longest n-gram match, or where a datastore has one as long, a tree of the
    most frequent continuations there. One object per generation."""

    def __init__(
        self,
        num_drafted: int = 10,
        predicted: PredictedText | None = None,
        datastore: Datastore | None = None,
        nodes: int = MAX_NODES,
    ) -> None:
        """num_drafted: tokens of the chain, and levels of a tree, 1 to MAX_DEPTH. predicted: is searched too. nodes: of
        a tree, the root included."""
        self._num_drafted = num_drafted
        self._index = NgramIndex()
        self._predicted = predicted
        self._datastore = datastore
        self._nodes = nodes

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        most, depth = min(self._nodes, max_nodes) - 1, self._num_drafted
        following, length = longest_match(self._index, self._predicted, tokens, min(depth, most))
        store, beyond = self._datastore, max(0, length - 1)
        hits = NOTHING if store is None else store.continuations(tokens, most, depth, beyond)
        if hits.length:
            scores = np.log(hits.counts / hits.places).astype(np.float32)
            return rerank(tokens[-1], hits.tokens, hits.parents, scores, most + 1)
        return chain_of(tokens[-1], following)

    def learn(self, step: Step) -> None:
        """The next call of `grow` gets the whole text, and needs nothing else."""


def _shaped(choice: Choice, parts: Parts) -> Drafter:
    shape = choice.shape
    if isinstance(shape, DynamicTree):
        drafter = LookupDrafter(shape.depth + 1, parts.predicted, parts.datastore, shape.num_nodes)
    else:
        assert isinstance(shape, StaticTree)
        drafter = LookupDrafter(len(shape.choices), parts.predicted)
    return constrained(drafter, parts.lookahead, prune=True)


MATCHES = "the tokens that followed the longest earlier match of the last tokens in prompt and output"
FREQUENT = "with `--datastore FILE`: the `--total-token` most frequent continuations in that text, as a tree"
LOOKUP = Method(
    "lookup",
    (
        Trees(("cost-aware",), MATCHES, partial(cost_aware_drafter, lookup=True)),
        Trees(("chain",), "the same, always `--depth` + 1 tokens", _shaped),
        Trees(("dynamic",), FREQUENT, _shaped, datastore=True),
    ),
    default="else",
    is_default=lambda loaded, fixed: True,
)
