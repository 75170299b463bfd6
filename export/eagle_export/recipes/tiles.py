"""Work on the columns of a weight, which do not depend on each other, in tiles: what a tile needs stays in the
processor's cache, and several threads take tiles in turn.

Results do not depend on the number of threads: tiles have the same columns for any number, and a product inside of one
runs on one thread, as does what all tiles share. That is also the fastest on a machine with other work, where
threads wait for each other in every small product.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

import numpy as np

from eagle_export.recipes.graph import Array
from eagle_runtime.machine.host import cores, threads_allowed

Item = TypeVar("Item")
Result = TypeVar("Result")

COLUMNS = 1024  # of a tile, at most
MULTIPLE = 64  # of columns, in every tile but the last


def tiled(work: Callable[[slice], None], columns: int) -> None:
    """Calls `work` with the columns of each tile, from several threads at once."""
    size = -(-columns // -(-columns // COLUMNS))  # tiles take equally long
    size = -(-size // MULTIPLE) * MULTIPLE
    side_by_side(work, [slice(start, min(start + size, columns)) for start in range(0, columns, size)])


def side_by_side(work: Callable[[Item], Result], items: Sequence[Item]) -> list[Result]:
    """Returns what `work` makes of each item, by several threads at once, each of which computes its products alone."""
    import torch  # here alone, so that sizes are computed without it

    threads = torch.get_num_threads()
    # What a container allows is read from its files, which takes longer than the one tile of a small layer.
    workers = 1 if len(items) == 1 else min(len(items), threads_allowed() or cores())
    try:
        if workers == 1:
            torch.set_num_threads(1)
            return [work(item) for item in items]
        with ThreadPoolExecutor(workers, initializer=torch.set_num_threads, initargs=(1,)) as pool:
            return [done.result() for done in [pool.submit(work, item) for item in items]]
    finally:
        torch.set_num_threads(threads)


def product(left: Array, right: Array) -> Array:
    """Returns left [m, k] @ right [k, n], computed on the calling thread alone inside of `side_by_side`."""
    import torch

    if not left.shape[1]:
        return np.zeros((len(left), right.shape[1]), np.float32)
    result: Array = torch.mm(torch.from_numpy(left), torch.from_numpy(right)).numpy()
    return result
