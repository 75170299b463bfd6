"""Draft trees as parent arrays, and the pure functions that build and read them.

Node 0 of a tree is its *root*, the last token that the target emitted; docs/dev/glossary.md has all terms.

Shapes: N nodes, M pool entries, k children per expanded node.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

Int = npt.NDArray[np.int64]
Float = npt.NDArray[np.float32]
Bool = npt.NDArray[np.bool_]

MAX_DEPTH = 64  # edges from the root: exact attention sums the keys of so many positions in fp64 (see exact_attention)
MAX_NODES = 1024  # the root included; EAGLE-2's default has 60

# The 25-choice tree of EAGLE-1 (its authors call it mc_sim_7b_63): a choice lists child ranks from the root.
EAGLE1_CHOICES: tuple[tuple[int, ...], ...] = (
    (0,), (1,), (2,), (3,),
    (0, 0), (0, 1), (0, 2), (1, 0), (1, 1), (2, 0), (2, 1), (3, 0),
    (0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 1), (0, 2, 0), (0, 2, 1), (1, 0, 0),
    (0, 0, 0, 0), (0, 0, 0, 1), (0, 0, 0, 2),
    (0, 0, 0, 0, 0), (0, 0, 0, 0, 1),
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Tree:
    """A draft to verify. tokens [N], parents [N] (parents[i] < i, -1 at the root), scores [N]: the cumulative
    log-probability the drafter gives to the path down to each node (0 at the root)."""

    tokens: Int
    parents: Int
    scores: Float

    @property
    def num_nodes(self) -> int:
        """Nodes including the root."""
        return len(self.tokens)


def root_only(token: int) -> Tree:
    """The tree of plain decoding: nothing drafted."""
    return Tree(np.array([token], np.int64), np.array([-1], np.int64), np.zeros(1, np.float32))


def node_depths(parents: Int) -> Int:
    """parents [N] -> depth of each node [N], 0 at the root."""
    depths = [0]
    for parent in parents.tolist()[1:]:
        depths.append(depths[parent] + 1)
    return np.array(depths, np.int64)


def ancestor_mask(parents: Int) -> Bool:
    """parents [N] -> [N, N]; row i marks node i and its ancestors."""
    mask = np.zeros((len(parents), len(parents)), np.bool_)
    mask[0, 0] = True
    for node, parent in enumerate(parents.tolist()[1:], 1):
        mask[node] = mask[parent]
        mask[node, node] = True
    return mask


def additive_mask(visible: Bool, dtype: npt.DTypeLike) -> npt.NDArray[np.floating]:
    """visible [T, L] -> tree_mask [T, L] of the graphs: 0 where a row may see a column, else `hiding(dtype)`."""
    seen, unseen = np.zeros((), dtype), np.array(hiding(dtype), dtype)
    mask: npt.NDArray[np.floating] = np.where(visible, seen, unseen)
    return mask


def hiding(dtype: npt.DTypeLike) -> float:
    """Returns what a mask of this type adds to a score to hide it. It is finite, because an infinity would turn a row
    that sees nothing into NaN. In fp16 two such masks and a score have a finite sum too."""
    kind = np.dtype(dtype)
    return -3e4 if kind == np.float16 else float(np.finfo(kind).min)


def best_first(scores: Float, count: int) -> Int:
    """scores [M] -> indices of the `count` best, best first, ties to the lower index.

    The tie rule is what keeps trees connected: a child scores at most as much as its parent and comes after
    it in flat order, so no cut can take the child and leave the parent."""
    order = np.argsort(-scores, kind="stable")[:count]
    return order.astype(np.int64)


def rerank(root: int, tokens: Int, parents: Int, scores: Float, num_nodes: int) -> Tree:
    """Keep the num_nodes - 1 best pool entries under the root, in flat order (EAGLE-2 section 4.2).

    tokens, parents, scores [M]: the pool; parents are pool indices, -1 for children of the root. A pool of
    fewer entries is kept whole."""
    return subtree(root, tokens, parents, scores, np.sort(best_first(scores, num_nodes - 1)))


def subtree(root: int, tokens: Int, parents: Int, scores: Float, kept: Int) -> Tree:
    """The entries `kept` (ascending, with every one its parent) of a pool under the root; the rest as in rerank."""
    node_of = np.full(len(tokens) + 1, -1, np.int64)  # pool index -> node; the last slot serves parent -1
    node_of[kept] = np.arange(1, len(kept) + 1)
    node_of[-1] = 0
    count = 1 + len(kept)
    tree = Tree(np.empty(count, np.int64), np.empty(count, np.int64), np.empty(count, np.float32))
    tree.tokens[0], tree.tokens[1:] = root, tokens[kept]
    tree.parents[0], tree.parents[1:] = -1, node_of[parents[kept]]
    tree.scores[0], tree.scores[1:] = 0, scores[kept]
    return tree


def with_nodes(tree: Tree, kept: Int) -> Tree:
    """The root and the nodes `kept` (ascending, with every one its parent) of a tree; node 1 counts as 0 in `kept`."""
    if len(kept) == tree.num_nodes - 1:
        return tree
    return subtree(int(tree.tokens[0]), tree.tokens[1:], tree.parents[1:] - 1, tree.scores[1:], kept)


def chain_of(root: int, drafted: Sequence[int]) -> Tree:
    """Returns a tree without branches, whose scores are all 0."""
    count = 1 + len(drafted)
    return Tree(np.array([root, *drafted], np.int64), np.arange(-1, count - 1), np.zeros(count, np.float32))


def choice_parents(choices: Sequence[tuple[int, ...]]) -> Int:
    """Choices (child ranks from the root, sorted by length then rank) -> parents [N] of the tree with its root.

    Raises ValueError if a choice comes before its parent or lacks one."""
    node_of: dict[tuple[int, ...], int] = {(): 0}
    parents = [-1]
    for choice in choices:
        if choice[:-1] not in node_of or choice in node_of:
            raise ValueError(f"choice {list(choice)} needs its parent {list(choice[:-1])} before it, once")
        parents.append(node_of[choice[:-1]])
        node_of[choice] = len(parents) - 1
    return np.array(parents, np.int64)
