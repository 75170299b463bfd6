"""How the C library keeps the memory of a server's process, where it is glibc."""

from __future__ import annotations

import ctypes
import os
import sys
import threading
from pathlib import Path

# Parameters of mallopt(3), with the sizes in bytes.
TRIM_THRESHOLD, MMAP_THRESHOLD, ARENA_MAX = -1, -3, -8
LARGE = 4 << 20  # what is allocated from this size on goes back to the system when it is freed
KEPT = 64 << 20  # free bytes at the end of the heap beyond which they go back
GROWN = 8 << 20  # bytes of resident memory since it was given back last, from which on it is again
CHOSEN = ("MALLOC_ARENA_MAX", "GLIBC_TUNABLES")  # variables of the environment by which a user says otherwise


def keep_one_heap() -> None:
    """Let all threads share one heap; to be called before they start. Where the C library is another, nothing changes.

    glibc gives each thread a heap of its own, so that several may allocate at once. A server's threads, one that
    decodes and a few that read requests, take turns on the interpreter; in time each heap would hold what the largest
    step took.
    2,000 mixed requests, four at once, on SmolLM2-135M in int4, when each had a thread: 592 MB after 200 and 630 MB at
    the end with a heap for each, 551 and 565 MB with one."""
    if sys.platform != "linux" or any(name in os.environ for name in CHOSEN):
        return
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return
    for parameter, value in ((ARENA_MAX, 1), (MMAP_THRESHOLD, LARGE), (TRIM_THRESHOLD, KEPT)):
        mallopt(parameter, value)


class FreeMemory:
    """Gives free memory within the heap back to the system while nothing runs, where the C library is glibc.

    Forward passes allocate blocks of all sizes, and what stays allocated between them leaves holes: 2,000 mixed
    requests, as above, leave some 60 MB of them. How many are resident depends on what ran, and grows."""

    def __init__(self) -> None:
        libc = ctypes.CDLL(None) if sys.platform == "linux" else None
        self._trim = getattr(libc, "malloc_trim", None)
        self._lock = threading.Lock()
        self._size = 0  # bytes that were resident after it was given back last

    def give_back(self) -> None:
        """Do so, if resident memory has grown by GROWN since the last time; takes some milliseconds then."""
        if self._trim is None or not self._lock.acquire(blocking=False):
            return
        try:
            if resident_bytes() >= self._size + GROWN:
                self._trim(0)
                self._size = resident_bytes()
        finally:
            self._lock.release()


def resident_bytes(process: int | str = "self") -> int:
    """Returns the memory of this process, or of the one with a number, that is not swapped out; on Linux."""
    return int(Path(f"/proc/{process}/statm").read_text(encoding="ascii").split()[1]) * os.sysconf("SC_PAGE_SIZE")
