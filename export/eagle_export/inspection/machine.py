"""Memory and bandwidth: of this machine, measured, and of GPUs, as their maker states them."""

from __future__ import annotations

import os
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle_runtime.machine.container import memory_limit
from eagle_runtime.machine.host import threads_allowed

SAMPLE_BYTES = 1 << 29  # bytes read per try, more than most caches hold
TRIES = 5


@dataclass(frozen=True, slots=True)
class Place:
    """Where a pair may run. memory: bytes. bandwidth: bytes per second."""

    name: str
    memory: int
    bandwidth: float


GB = 10**9
# One GPU of each size, with the memory and the bandwidth that docs/dev/inspect.md has the sources of.
CARDS = (
    Place("RTX 4060", 8 * GB, 272e9),
    Place("RTX 4070", 12 * GB, 504e9),
    Place("RTX 4080", 16 * GB, 717e9),
    Place("RTX 4090", 24 * GB, 1008e9),
    Place("RTX 5090", 32 * GB, 1792e9),
)


def this_machine() -> Place | None:
    """This machine, with the bandwidth of its memory as measured now; None where its memory is unknown."""
    memory = physical_memory()
    threads = physical_cores()
    return None if memory is None else Place("this machine", memory, read_bandwidth(threads, SAMPLE_BYTES // 4, 3))


def physical_memory() -> int | None:
    """Bytes of memory without swap, of the machine or of the container that it is; None if the system does not say."""
    if sys.platform == "win32":
        from eagle_runtime.machine.host import total_memory

        return total_memory()
    try:
        size = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
        return min(size, memory_limit() or size)
    except (OSError, ValueError):
        return None


def physical_cores() -> int:
    """Returns the number of cores of this process without hyper-threads; all logical cores if that is unknown. In a
    container with a quota of processor time no more than that pays for."""
    return min(_cores(), threads_allowed() or _cores())


def _cores() -> int:
    logical = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else range(os.cpu_count() or 1)
    siblings = set()
    for cpu in logical:
        try:
            siblings.add(Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list").read_text())
        except OSError:
            return len(logical)
    return len(siblings)


def read_bandwidth(threads: int, sample: int = SAMPLE_BYTES, tries: int = TRIES) -> float:
    """Returns the bytes per second that `threads` threads together read from memory: the best of a few tries over
    `sample` bytes."""
    parts = [np.ones(sample // threads // 4, np.float32) for _ in range(threads)]
    best = 0.0
    with ThreadPoolExecutor(threads) as pool:
        for _ in range(tries):
            started = time.perf_counter()
            list(pool.map(np.max, parts))  # NumPy releases the interpreter's lock
            best = max(best, sum(part.nbytes for part in parts) / (time.perf_counter() - started))
    return best
