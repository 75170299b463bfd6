"""The size of this machine's memory, so that caches that can never fit are refused before they are allocated."""

from __future__ import annotations

import ctypes
import os
import sys
from pathlib import Path


def total_memory() -> int | None:
    """Returns the bytes of memory and swap together; None if the system does not report them. On systems other than
    Linux and Windows, whose swap grows as needed, twice the memory."""
    if sys.platform == "win32":
        return _windows()
    try:
        fields = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines())
        return 1024 * (int(fields["MemTotal"].split()[0]) + int(fields["SwapTotal"].split()[0]))
    except (OSError, ValueError, KeyError):
        pass
    try:
        return 2 * os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError):
        return None


class _MemoryStatus(ctypes.Structure):
    """MEMORYSTATUSEX. total_page_file: bytes that all processes together may commit; other sizes follow it."""

    _fields_ = (
        ("length", ctypes.c_uint32),
        ("load", ctypes.c_uint32),
        ("total_physical", ctypes.c_uint64),
        ("free_physical", ctypes.c_uint64),
        ("total_page_file", ctypes.c_uint64),
        ("others", ctypes.c_uint64 * 4),
    )


def _windows() -> int | None:
    status = _MemoryStatus(length=ctypes.sizeof(_MemoryStatus))
    windll = getattr(ctypes, "windll", None)
    if windll is None or not windll.kernel32.GlobalMemoryStatusEx(ctypes.byref(status)):
        return None
    return int(status.total_page_file)
