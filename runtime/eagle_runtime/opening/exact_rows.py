"""Checks on the graph itself that a token's logits are bit-identical whether it is verified alone or in a tree.

Quantised targets for CPUs are exported so that a row's result does not depend on which rows share its forward pass
(eagle_export.recipes.attention). That holds only if the processor's kernels treat every number of rows alike, and some
do not: with AVX2 alone, ONNX Runtime's 4-bit products add up one row in another order than two. So the check decodes a
few tokens one by one, verifies the same tokens in trees of several sizes, and compares the bits. If they differ, it
searches for the least padding with which they are equal. If there is none, drafts would change the output, and decoding
does without them.

The outcome is stored in the user's cache folder under the graph, engine, number of threads and processor.
"""

from __future__ import annotations

import json
import warnings
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import TYPE_CHECKING

import numpy as np

from eagle_runtime.base.errors import EagleWarning
from eagle_runtime.base.tree import Int, Tree, node_depths, root_only
from eagle_runtime.bundle.manifest import Manifest
from eagle_runtime.core.row_padding import RowPadding
from eagle_runtime.core.target import Target
from eagle_runtime.machine.user_cache import machine_key, read_cached, write_cached

if TYPE_CHECKING:
    from eagle_runtime.ort.session import OrtSession

CHECKED = (2, 3, 6, 17, 64)  # rows of the trees compared: both parities, and sizes at which kernels change their tiling
PAST = 72  # rows before them: more than the 64 whose keys exact attention sums in fp64
DEPTH = 4  # tokens decoded one by one
# From the cheapest: none, at least two rows, even numbers, multiples of the rows that kernels process at once.
PADDINGS = (RowPadding(), RowPadding(2), RowPadding(2, 2), RowPadding(4, 4), RowPadding(16, 16))
VERSION = "1"  # change it whenever the comparison changes


@dataclass(frozen=True, slots=True)
class RowCheck:
    """The padding with which a target's rows are bit-identical; None if no padding makes them so."""

    padding: RowPadding | None

    def __str__(self) -> str:
        if self.padding is None:
            return "rows differ by which others share their forward pass on this processor; drafts are off"
        if self.padding == RowPadding():
            return "rows are equal to the bit alone and in trees"
        if self.padding.multiple == 1:
            return f"rows are equal to the bit if {self.padding.least} or more share a forward pass; fewer are padded"
        return f"rows are equal to the bit in whole multiples of {self.padding.multiple}; others are padded"


def check_rows(session: OrtSession, manifest: Manifest, threads: int | None) -> RowCheck | None:
    """Set the padding of a target's session to the stored outcome or, where there is none, to that of a new check.
    Returns None for a graph that was not made for equal rows.

    manifest, threads: parts of the key under which the outcome is stored. Gives an EagleWarning if a new check shows
    that rows need more padding than to an even number, or that none helps."""
    if not session.exact:
        return None
    folder = PurePosixPath(manifest.target.graph.file).parent
    digests = [digest for file, digest in manifest.files.items() if PurePosixPath(file).parent == folder]
    name = f"rows-{machine_key([VERSION, session.version, str(threads), *digests])}.json"
    check = _read(name)
    if check is None:
        check = find_padding(session)
        write_cached(name, asdict(check))
        if check.padding is None or check.padding.multiple > 2:  # an even number of rows costs a few percent
            warnings.warn(f"{session.path}: {check}", EagleWarning, stacklevel=3)
    session.padding = check.padding or RowPadding()
    return check


def find_padding(session: OrtSession) -> RowCheck:
    """Returns the first of PADDINGS with which rows are equal. Each takes 5 forward passes and 164 rows; the session's
    padding stays changed."""
    for padding in PADDINGS:
        session.padding = padding
        if equal_rows(Target(session, PAST + max(CHECKED))):
            return RowCheck(padding)
    return RowCheck(None)


def equal_rows(target: Target) -> bool:
    """Returns whether logits and features of DEPTH tokens are the same, to the bit, decoded one by one and verified in
    trees of CHECKED nodes that repeat them. target: its cache holds PAST rows and the largest tree, and is emptied."""
    vocab_size = target.vocab_size
    tokens = np.random.default_rng(0).integers(0, vocab_size, PAST + DEPTH)
    target.prefill(tokens[:PAST].tolist())
    target.cache.mark()
    chain = tokens[PAST:]
    alone = []
    for token in chain.tolist():
        logits, features = target.verify(root_only(token))
        alone.append((np.array(logits)[0], np.array(features[:1])[0]))
        target.cache.keep(np.zeros(1, np.int64))
    target.cache.truncate(PAST)
    for nodes in CHECKED:
        tree = repeated_chain(chain, nodes)
        logits, features = target.verify(tree)
        scores, rows = np.asarray(logits), np.asarray(features)
        for node, depth in enumerate(node_depths(tree.parents).tolist()):
            one, feature = alone[depth]
            if not (np.array_equal(scores[node], one) and np.array_equal(rows[node], feature)):
                return False
    return True


def repeated_chain(chain: Int, nodes: int) -> Tree:
    """Returns a tree of `nodes` nodes: the first token of the chain [D], and below it the others, repeated."""
    rest = len(chain) - 1
    numbers = np.arange(nodes)
    depths = np.where(numbers == 0, 0, 1 + (numbers - 1) % rest)
    parents = np.where(depths == 1, 0, numbers - 1)
    parents[0] = -1
    return Tree(chain[depths], parents.astype(np.int64), np.zeros(nodes, np.float32))


def _read(name: str) -> RowCheck | None:
    """Returns the stored outcome; None if there is none, or one that no check has."""
    data = read_cached(name)
    outcomes = {json.dumps(asdict(check)): check for check in map(RowCheck, (*PADDINGS, None))}
    return outcomes.get(json.dumps(data))
