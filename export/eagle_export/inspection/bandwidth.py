"""The bandwidth of the memory, and the cores that read it; measured without what an export needs."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from eagle_runtime.machine import host

SAMPLE_BYTES = 1 << 29  # bytes read per try, more than most caches hold
TRIES = 5


def physical_cores() -> int:
    """Returns the number of cores of this process without hyper-threads. In a container with a quota of processor time
    no more than that pays for."""
    return host.threads_allowed() or host.physical_cores()


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
