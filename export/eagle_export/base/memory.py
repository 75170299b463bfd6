"""Memory: whether weights fit into it, and when what was freed is looked for and given back to the system."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

from eagle_export.base.errors import ExportError
from eagle_runtime.machine.host import free_memory

MMAP_THRESHOLD = -3  # parameter of mallopt(3): bytes from which on a block has memory of its own
APART, TOGETHER = 128 << 10, 32 << 20  # glibc's first threshold, and the largest to which it rises with freed blocks
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


@contextmanager
def only_new_objects() -> Iterator[None]:
    """In this context only objects that are made in it are looked at for those that refer to each other. torch and
    transformers are half a million objects: an export of a tiny model looks at them for a sixth of its time. Its end is
    also that of one around it."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def set_threshold(size: int) -> None:
    """Makes glibc return every block of so many bytes or more to the system when it is freed: from APART on while an
    export records, and from TOGETHER on afterwards.

    Otherwise the heap gets holes that nothing fills: while an export of SmolLM2-135M in int4 records, both processes
    together take 1.65 GB, and 1.53 with this. Throughout, it would take a fifth longer, as each block is mapped anew.
    Where the C library is another, or the environment says how it should allocate, nothing changes."""
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None) if sys.platform == "linux" else None
    if mallopt is not None and not any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ):
        mallopt(MMAP_THRESHOLD, size)


def give_back() -> None:
    """Frees objects that refer to each other, and returns freed memory to the system where its library does not do so
    by itself: glibc keeps it for what is to come, which after a trace or a model is hundreds of megabytes."""
    gc.collect()
    if sys.platform == "linux":
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # musl has none
        if trim is not None:
            trim(0)
