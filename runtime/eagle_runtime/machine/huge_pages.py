"""Weights in huge pages, on Linux.

A forward pass reads all weights once, in gigabytes that no cache holds. In pages of 4 kB the processor looks up a new
address for each and stops prefetching at its end; in pages of 2 MB a pass of a 4-bit target of 1 B parameters took 6 to
9 % less time. ONNX Runtime allocates its memory in ordinary pages, so they are joined afterwards, with MADV_COLLAPSE
(Linux 6.1 and newer: madvise(2)), which copies them. Elsewhere, or if the kernel refuses, nothing changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import sys
from collections.abc import Iterator
from pathlib import Path

PAGE = 2 << 20  # bytes; the size on x86-64 and, with base pages of 4 kB, on ARM64
LEAST_BYTES = 8 * PAGE  # a smaller piece of memory is left as it is: stacks of threads have 8 MB
COLLAPSE = 25  # MADV_COLLAPSE in Linux' mman-common.h

Span = tuple[int, int]


@contextlib.contextmanager
def huge_pages() -> Iterator[None]:
    """Joins, at the end of the block, the pages of all large pieces of memory that were allocated in it."""
    before = anonymous_memory()
    yield
    after = anonymous_memory()
    if not after:
        return
    madvise = ctypes.CDLL(None).madvise
    for start, end in new_spans(before, after):
        first, last = -(-start // PAGE) * PAGE, end // PAGE * PAGE
        if last - first >= LEAST_BYTES:
            madvise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), COLLAPSE)


def anonymous_memory() -> list[Span]:
    """Returns (start, end) of the process's writable memory without a file, in ascending order; nothing if this is not
    Linux."""
    if sys.platform != "linux":
        return []
    try:
        lines = Path("/proc/self/maps").read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
    fields = [line.split() for line in lines]
    spans = [field[0].split("-") for field in fields if field[1] == "rw-p" and len(field) == 5]
    return [(int(start, 16), int(end, 16)) for start, end in spans]


def new_spans(before: list[Span], after: list[Span]) -> list[Span]:
    """Returns what `after` covers and `before` does not. The kernel merges adjacent spans, so that one of `after` may
    contain several of `before`."""
    spans = []
    for start, end in after:
        for old_start, old_end in before:
            if old_end <= start or old_start >= end:
                continue
            if old_start > start:
                spans.append((start, old_start))
            start = max(start, old_end)
        if start < end:
            spans.append((start, end))
    return spans
