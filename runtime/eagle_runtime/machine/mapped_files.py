"""Pages of mapped files that are not needed again, on Linux.

Native operators read their weights once, when a graph is opened, and pack them in memory of their own. What ONNX
Runtime has mapped of the file would stay in the process: SmolLM2 in int8 would take 494 MB, and takes 342. The system
keeps the pages in its cache of files, for the next process; one that is read again comes back from there.
"""

from __future__ import annotations

import ctypes
import os
import re
import sys
from pathlib import Path

SMAPS = Path("/proc/self/smaps")
DONTNEED = 4  # MADV_DONTNEED in Linux' mman-common.h
HEADER = re.compile(r"([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+ *(.*)")


def let_go(folder: Path) -> int:
    """Take the pages of a folder's files that are mapped and of which no page was changed from the memory of the
    process. Returns how many bytes are mapped so; 0 on other systems."""
    files = {os.path.realpath(file) for file in folder.glob("*")}  # in the hub's cache, links to elsewhere
    spans = [span for span in unchanged() if span[2] in files] if sys.platform == "linux" else []
    if not spans:
        return 0
    madvise = ctypes.CDLL(None).madvise
    madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    for begin, end, _ in spans:
        madvise(begin, end - begin, DONTNEED)
    return sum(end - begin for begin, end, _ in spans)


def unchanged() -> list[tuple[int, int, str]]:
    """Returns the addresses (begin, end) and the files of mappings that hold no page of the process's own: a page of a
    private mapping that was written is one, and would be lost."""
    try:
        text = SMAPS.read_text(encoding="utf-8", errors="surrogateescape")
    except OSError:
        return []
    found: list[tuple[int, int, str]] = []
    own = False  # whether the last one is of the mapping that is read about
    for line in text.split("\n"):
        if (header := HEADER.fullmatch(line)) is not None:
            if own := header[3].startswith("/"):
                found.append((int(header[1], 16), int(header[2], 16), header[3]))
        elif own and line.startswith(("Anonymous:", "Swap:")) and line.split()[1] != "0":
            found.pop()
            own = False
    return found
