"""Several small models draft for a large one, each a tree of its own, and the union of their trees is verified:
SpecInfer (arXiv 2305.09781, section 3, "merge-based").

The union has one root. Where two trees go through the same tokens they share the nodes, so what all models agree on is
verified once, and where they do not each has its branch.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from eagle_runtime.base.tree import Tree
from eagle_runtime.core.accept import Step
from eagle_runtime.core.drafter import Drafter
from eagle_runtime.drafting.build import allowed_head, eagle_drafter
from eagle_runtime.drafting.constrained import constrained
from eagle_runtime.drafting.method import Choice, Method, Parts, Trees

Places = dict[tuple[int, int], int]  # (parent, token) -> node


def merged(trees: Sequence[Tree]) -> Tree:
    """Returns the union of trees with one root, which all have: the nodes of the first in their order, then those of
    the second that it lacks, and so on. The score of a node is the highest that a tree gives it."""
    tokens, parents, scores = [int(trees[0].tokens[0])], [-1], [0.0]
    places: Places = {}
    for tree in trees:
        node_of = [0]  # of the tree -> of the union
        nodes = zip(tree.tokens.tolist(), tree.parents.tolist(), tree.scores.tolist(), strict=True)
        for token, parent, score in list(nodes)[1:]:
            place = node_of[parent], token
            if place not in places:
                places[place] = len(tokens)
                tokens.append(token)
                parents.append(place[0])
                scores.append(score)
            node = places[place]
            scores[node] = max(scores[node], score)
            node_of.append(node)
    return Tree(np.array(tokens, np.int64), np.array(parents, np.int64), np.array(scores, np.float32))


def followed(tree: Tree, emitted: Sequence[int]) -> int:
    """Returns how many of the emitted tokens a tree without equal siblings has on a path from its root."""
    edges = zip(tree.parents.tolist(), tree.tokens.tolist(), strict=True)
    places: Places = {edge: node for node, edge in reversed(list(enumerate(edges)))}
    node = 0
    for count, token in enumerate(emitted):
        if (node, token) not in places:
            return count
        node = places[node, token]
    return len(emitted)


class MergingDrafter(Drafter):
    """Drafts the union of what several drafters draft."""

    def __init__(self, drafters: Sequence[Drafter], accepted: list[int]) -> None:
        """drafters: learn from the first emitted token of a step at most. accepted: one number each, to which the
        tokens are added that a drafter's own tree had of those accepted."""
        self._drafters = drafters
        self._accepted = accepted
        self._trees: list[Tree] = []

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        """As in Drafter. Each drafter has an equal share of the nodes."""
        share = 1 + (max_nodes - 1) // len(self._drafters)
        # Fewer nodes than drafters: the first ones draft.
        drafting = self._drafters if share > 1 else self._drafters[: max_nodes - 1]
        self._trees = [drafter.grow(tokens, max(share, 2)) for drafter in drafting]
        return merged(self._trees)

    def learn(self, step: Step) -> None:
        emitted = step.tokens.tolist()[: step.num_accepted]
        for number, tree in enumerate(self._trees):
            self._accepted[number] += followed(tree, emitted)
        self._trees = []
        for drafter in self._drafters:
            drafter.learn(step)


def _merging(choice: Choice, parts: Parts) -> Drafter:
    drafters = [eagle_drafter(allowed_head(head, parts), choice, parts) for head in parts.draft_models]
    drafter = MergingDrafter(drafters, parts.draft_accepted)
    return constrained(drafter, parts.lookahead, prune=True)


DRAFTS = "the proposals of several smaller models (`--draft-bundle` once for each), their trees merged into one"
SPECINFER = Method(
    "specinfer",
    (Trees(("chain",), DRAFTS, _merging), Trees(("dynamic", "static"), "the same", _merging)),
    proposer="draft models",
    default="with several draft bundles",
    is_default=lambda loaded, fixed: "draft models" in loaded.per_row,
)
