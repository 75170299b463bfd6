"""Whether a checkpoint fits into the memory, for recording and for comparing."""

from __future__ import annotations

import math

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_runtime.machine.host import free_memory

MEMORY_MARGIN = 1.25  # times the weights: activations, and weights that the engine repacks


def check_memory(source: Checkpoint, stored: int = 0) -> None:
    """Raises ExportError if the memory is too small: the system would kill the export. Source and engine are loaded one
    after the other. stored: bytes of the bundle."""
    numbers = sum(math.prod(tensor.shape) for tensor in source.tensors.values())
    check_free(max(4 * numbers, stored))


def check_free(weights: int) -> None:
    """Raises ExportError if so many bytes of weights, and what is computed with them, do not fit."""
    needed, free = int(MEMORY_MARGIN * weights), free_memory()
    if free is not None and needed > free:
        raise ExportError(f"comparing takes {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free")
