"""What a forward pass over several rows costs, for bundles and peers: drafts are verified at that price.

A bundle's passes are over the rows of a tree; a peer's are over the next tokens of a text, as its own lookup verifies
them."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from statistics import median

import numpy as np

from eagle_runtime.base.tree import Tree
from eagle_runtime.opening.opened import OpenBundle
from eagle_tools.markdown import markdown_table
from eagle_tools.peers.engine import Format
from eagle_tools.peers.worker import Worker
from eagle_tools.turns import starting_order

PASS_ROWS = (1, 2, 4, 8, 16, 32)
CONTEXT = 64  # tokens before the rows, as in the bundles' tables of costs
ROUNDS = 3  # in each, all models have their turn, a different one first
PASSES = 3  # of one size in a row, of which the quickest counts

Passes = dict[str, tuple[float, ...]]  # name -> seconds of a pass over each of PASS_ROWS


def measure_passes(bundles: Sequence[tuple[str, OpenBundle]], peers: Mapping[Format, Worker]) -> Passes:
    """Returns the median over the rounds of each model's seconds."""
    turns: list[tuple[str, Callable[[], list[float]]]] = []
    for name, bundle in bundles:
        turns.append((name, lambda bundle=bundle: bundle_passes(bundle)))  # type: ignore[misc]
    for form, worker in peers.items():
        turns.append((str(form), lambda worker=worker: peer_passes(worker)))  # type: ignore[misc]
    seconds: dict[str, list[list[float]]] = {name: [] for name, _ in turns}
    for number in range(ROUNDS):
        for index in starting_order(len(turns), number):
            name, measure = turns[index]
            seconds[name].append(measure())
    return {name: tuple(map(median, zip(*rounds, strict=True))) for name, rounds in seconds.items()}


def bundle_passes(bundle: OpenBundle) -> list[float]:
    """Returns the seconds of a pass of the target over each of PASS_ROWS. The bundle must be in no other use."""
    target = (bundle.with_new_caches() if bundle.on_cpu else bundle).target
    target.prefill([0])
    target.cache.pretend(CONTEXT)
    seconds = []
    for rows in PASS_ROWS:
        parents = np.zeros(rows, np.int64)
        parents[0] = -1
        tree = Tree(np.zeros(rows, np.int64), parents, np.zeros(rows, np.float32))
        target.verify(tree)  # binds what passes of this size take
        times = []
        for _ in range(PASSES):
            begun = time.perf_counter()
            target.verify(tree)
            times.append(time.perf_counter() - begun)
        seconds.append(min(times))
    target.cache.truncate(0)
    return seconds


def peer_passes(worker: Worker) -> list[float]:
    """Returns the seconds of a pass over each of PASS_ROWS."""
    return [min(worker.pass_seconds(CONTEXT, rows, PASSES)) for rows in PASS_ROWS]


def passes_table(passes: Passes) -> str:
    """Returns a Markdown table of milliseconds."""
    titles = ["ms of a forward pass over rows", *map(str, PASS_ROWS)]
    return markdown_table(titles, [[name, *(f"{1e3 * s:.1f}" for s in times)] for name, times in passes.items()])
