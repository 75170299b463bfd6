"""Large memory is joined to huge pages where the kernel can do it, and keeps its content everywhere."""

from __future__ import annotations

import platform
import re
import sys
from pathlib import Path

import numpy as np
import pytest

from eagle_runtime.machine.huge_pages import LEAST_BYTES, PAGE, anonymous_memory, huge_pages, new_spans

SETTING = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def joins() -> bool:
    """Whether this kernel has MADV_COLLAPSE and is not set to have no huge pages."""
    version = tuple(map(int, re.findall(r"\d+", platform.release())[:2]))
    return sys.platform == "linux" and version >= (6, 1) and SETTING.exists() and "[never]" not in SETTING.read_text()


def huge_bytes(start: int, end: int) -> int:
    """Bytes in huge pages of the pieces of memory that overlap this span."""
    total, inside = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if span := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(span[1], 16) < end and int(span[2], 16) > start
        elif inside and line.startswith("AnonHugePages"):
            total += int(line.split()[1]) * 1024
    return total


def test_new_memory_is_joined_and_keeps_its_content() -> None:
    size = 4 * LEAST_BYTES
    with huge_pages():
        array = np.arange(size // 8, dtype=np.int64)
    assert np.array_equal(array, np.arange(size // 8))
    if joins():
        start = array.ctypes.data
        assert huge_bytes(start, start + size) >= size - 2 * PAGE


def test_memory_is_listed() -> None:
    array = np.ones(4 * LEAST_BYTES, np.int8)
    middle = array.ctypes.data + array.size // 2
    inside = any(low <= middle < high for low, high in anonymous_memory())
    assert inside == (sys.platform == "linux")


@pytest.mark.parametrize(
    ("before", "after", "new"),
    [
        ([], [(0, 8)], [(0, 8)]),
        ([(0, 8)], [(0, 8)], []),
        ([(2, 4)], [(0, 8)], [(0, 2), (4, 8)]),
        ([(0, 2), (6, 8)], [(0, 8)], [(2, 6)]),
        ([(0, 4)], [(2, 8), (9, 10)], [(4, 8), (9, 10)]),
        ([(0, 4), (5, 6)], [(8, 9)], [(8, 9)]),
    ],
)
def test_what_is_new(before: list[tuple[int, int]], after: list[tuple[int, int]], new: list[tuple[int, int]]) -> None:
    assert new_spans(before, after) == new
