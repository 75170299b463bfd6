"""Garbage collection while an export imports its libraries and runs; freed memory goes back to the system."""

from __future__ import annotations

import gc
import os
import platform
import subprocess
import sys
from contextlib import suppress

import pytest

from eagle_export.base.memory import only_new_objects, without_collection


def test_collection_goes_on_after_an_error_too() -> None:
    assert gc.isenabled()
    during = []
    with suppress(ValueError), without_collection():
        during.append(gc.isenabled())
        raise ValueError
    assert during == [False]
    assert gc.isenabled()


def test_collection_that_was_off_stays_off() -> None:
    gc.disable()
    try:
        with without_collection():
            pass
        assert not gc.isenabled()
    finally:
        gc.enable()


def test_only_new_objects_are_looked_at() -> None:
    older: list[list[int]] = [[]]
    with suppress(ValueError), only_new_objects():
        newer: list[list[int]] = [[]]
        looked_at = {id(each) for each in gc.get_objects()}
        assert id(newer) in looked_at and id(older) not in looked_at
        raise ValueError
    assert gc.get_freeze_count() == 0


BLOCKS = """
import ctypes, os, sys
from eagle_export.base.memory import APART, TOGETHER, set_threshold
if sys.argv[1] != "usual":
    set_threshold(APART)
if sys.argv[1] == "together":
    set_threshold(TOGETHER)
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
library.free(library.malloc(8 << 20))  # glibc takes 8 MB for its threshold now
blocks = [library.malloc(1 << 20) for _ in range(40)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
for block in blocks[:-1]:  # the last one keeps the heap's end where it is
    library.free(block)
with open("/proc/self/statm") as file:
    print(int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE"))
"""


@pytest.mark.skipif(platform.libc_ver()[0] != "glibc", reason="glibc's own")
def test_freed_blocks_go_back_to_the_system() -> None:
    def held(how: str, **more: str) -> int:
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        environment["PYTHONPATH"] = os.pathsep.join(path for path in sys.path if path)
        command = [sys.executable, "-c", BLOCKS, how]
        return int(subprocess.run(command, check=True, env=environment | more, stdout=subprocess.PIPE).stdout)

    holes = held("usual")
    assert held("apart") < holes - (30 << 20)
    assert held("together") > holes - (5 << 20)
    assert held("apart", MALLOC_ARENA_MAX="2") > holes - (5 << 20)  # the user said how
