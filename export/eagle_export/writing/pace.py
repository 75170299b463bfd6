"""How fast this machine does what an export consists of: small pieces of the same work, timed in about a second."""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle_export.recipes.blocks import Grid, rounded
from eagle_export.recipes.compensation import compensated

# Sizes that were chosen so that all pieces together take about a second on two cores.
SHAPE = 256, 2048  # of a weight that is rounded
SQUARE = 1024  # rows and columns of a product
WRITTEN = 1 << 24  # bytes of a file
TIMES = 2  # the least of so many times counts


@dataclass(frozen=True, slots=True)
class Pace:
    """flops: of products per second. bandwidth: bytes of weights per second that a product with one row reads. disk:
    bytes per second that are written. rounding, compensating: seconds per number of a weight, without products."""

    flops: float
    bandwidth: float
    disk: float
    rounding: float
    compensating: float


def measure(folder: Path, bits: int) -> Pace:
    """Measures in about a second. folder: on the disk that is written to. bits: of the weights, 4 or 8."""
    square = np.ones((SQUARE, SQUARE), np.float32)
    weight = np.random.default_rng(0).normal(size=SHAPE).astype(np.float32)
    grid = Grid(bits, 64, asymmetric=True)
    large = np.ones((8 * SQUARE, 2 * SQUARE), np.float32)
    row = np.ones(2 * SQUARE, np.float32)
    return Pace(
        flops=2.0 * SQUARE**3 / _seconds(lambda: square @ square),
        bandwidth=large.nbytes / _seconds(lambda: large @ row),
        disk=WRITTEN / _seconds(lambda: _write(folder)),
        rounding=_seconds(lambda: rounded(weight, grid)) / weight.size,
        compensating=_seconds(lambda: compensated(weight, weight[:, : SHAPE[0]], grid)) / weight.size,
    )


def _seconds(work: Callable[[], object]) -> float:
    least = float("inf")
    for _ in range(TIMES):
        started = time.perf_counter()
        work()
        least = min(least, time.perf_counter() - started)
    return max(least, 1e-9)


def _write(folder: Path) -> None:
    with tempfile.TemporaryFile(dir=folder) as file:
        file.write(bytes(WRITTEN))
        file.flush()
        os.fsync(file.fileno())
