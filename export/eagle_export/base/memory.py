"""Memory: whether weights fit into it, and when what was freed is looked for and given back to the system."""

from __future__ import annotations

import ctypes
import gc
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from eagle_export.base.errors import ExportError
from eagle_runtime.machine.host import free_memory

MEMORY_MARGIN = 1.25  # times the weights: activations, and weights that the engine repacks


def check_memory(weights: int) -> None:
    """Raises ExportError if so many bytes of weights, and what is computed with them, do not fit: the system would kill
    the export."""
    needed, free = int(MEMORY_MARGIN * weights), free_memory()
    if free is not None and needed > free:
        raise ExportError(f"comparing takes {needed / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free")


@contextmanager
def without_collection() -> Iterator[None]:
    """In this context nothing looks for objects that refer to each other: where many are made and stay, as in imports,
    that takes a quarter of the time."""
    before = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if before:
            gc.enable()


def give_back() -> None:
    """Frees objects that refer to each other, and returns freed memory to the system where its library does not do so
    by itself: glibc keeps it for what is to come, which after a trace or a model is hundreds of megabytes."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
