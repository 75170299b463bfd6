"""The bandwidth of the memory, and the cores that read it; measured without what an export needs."""

from __future__ import annotations

import os
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from eagle_runtime.machine.host import threads_allowed

SAMPLE_BYTES = 1 << 29  # bytes read per try, more than most caches hold
TRIES = 5


def physical_cores() -> int:
    """Returns the number of cores of this process without hyper-threads; all logical cores if that is unknown. In a
    container with a quota of processor time no more than that pays for."""
    return min(_cores(), threads_allowed() or _cores())


def _cores() -> int:
    logical = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = set()
    for cpu in logical:
        try:
            siblings.add(
                Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text(encoding="ascii")
            )
        except OSError:
            return len(logical)
    return len(siblings)


def read_bandwidth(threads: int, sample: int = SAMPLE_BYTES, tries: int = TRIES) -> float:
    """Returns the bytes per second that threads together read from memory: the best of a few tries over a sample."""
    parts = [np.ones(sample // threads // 4, np.float32) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(tries):
            started = time.perf_counter()
            list(pool.map(np.max, parts))  # NumPy releases the interpreter's lock
            best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - started))
    return best
