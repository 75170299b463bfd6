"""Verification: walk a drafted tree with the target's own samples."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from eagle_runtime.base.tree import Float, Int, Tree
from eagle_runtime.sampling.candidates import LogitRows
from eagle_runtime.sampling.sampler import LogProbs, Sampler


@dataclass(frozen=True, slots=True)
class Step:
    """The outcome of one verification. path [a + 1]: accepted nodes, the root first. tokens [a + 1]: the tokens
    emitted: those of path[1:], then the target's sample at the last of them, which roots the next tree. logits [N, V]:
    the target's of all nodes, as `accept` got them, for the drafter to learn from; None for the prompt, and in a Cycle,
    since the next forward pass overwrites them. nodes: that were verified (N). log_probs: of each token, where the
    sampler records them, else empty."""

    path: Int
    tokens: Int
    logits: Float | LogitRows | None = None
    nodes: int = 1
    log_probs: Sequence[LogProbs] = ()

    @property
    def num_accepted(self) -> int:
        """Drafted tokens accepted (a)."""
        return len(self.path) - 1


def accept(tree: Tree, logits: Float | LogitRows, sampler: Sampler) -> Step:
    """Draw at the root from the target's distribution; while the sample is a child, and not the output's last token
    for the sampler, descend and draw there.

    logits [N, V]: the target's, one row per node, on the host or where the engine keeps them. Lossless for any tree:
    every token emitted is literally a sample of the target given its own prefix, whatever the drafter proposed."""
    edges = zip(tree.parents[::-1].tolist(), tree.tokens[::-1].tolist(), strict=True)
    children = dict(zip(edges, range(tree.num_nodes - 1, -1, -1), strict=True))  # of equal siblings the first
    path, tokens = [0], []
    while True:
        token = sampler.next(logits[path[-1]])
        tokens.append(token)
        child = children.get((path[-1], token))
        if child is None or sampler.finished:
            log_probs = sampler.taken_log_probs()
            return Step(np.array(path, np.int64), np.array(tokens, np.int64), logits, tree.num_nodes, log_probs)
        path.append(child)
