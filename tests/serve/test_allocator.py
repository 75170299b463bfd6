"""What a server's process keeps of freed memory."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import ctypes, sys, threading
from eagle_serve.allocator import keep_one_heap
if sys.argv[1] == "one":
    keep_one_heap()
library = ctypes.CDLL(None)
library.malloc.restype = ctypes.c_void_p
barrier = threading.Barrier(4)
def allocate():
    library.malloc(100_000)
    barrier.wait()
threads = [threading.Thread(target=allocate) for _ in range(4)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
library.fopen.restype, library.fclose.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
library.malloc_info.argtypes = [ctypes.c_int, ctypes.c_void_p]
out = library.fopen(sys.argv[2].encode(), b"w")
library.malloc_info(0, out)
library.fclose(out)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own")
def test_threads_share_one_heap(tmp_path: Path) -> None:
    def heaps(which: str, **more: str) -> int:
        paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
        environment = {name: value for name, value in os.environ.items() if not name.startswith(("MALLOC_", "GLIBC_"))}
        said = tmp_path / "heaps.xml"
        command = [sys.executable, "-c", PROGRAM, which, str(said)]
        subprocess.run(command, check=True, env={**environment, **paths, **more})
        return len(re.findall("<heap nr", said.read_text()))

    assert heaps("one") == 1
    assert heaps("many") > 1
    assert heaps("one", MALLOC_ARENA_MAX="2") == 2


HOLES = """
import ctypes
from eagle_serve.allocator import GROWN, FreeMemory, keep_one_heap, resident_bytes
keep_one_heap()
memory = FreeMemory()
library = ctypes.CDLL(None)
library.malloc.restype, library.free.argtypes = ctypes.c_void_p, [ctypes.c_void_p]
memory.give_back()
before = resident_bytes()
blocks = [library.malloc(1 << 20) for _ in range(40)]
for block in blocks:
    ctypes.memset(block, 1, 1 << 20)
for block in blocks[:-1]:  # the last one keeps the heap's end where it is
    library.free(block)
held = resident_bytes()
memory.give_back()
after = resident_bytes()
assert held > before + 3 * GROWN and after < before + GROWN, (before, held, after)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="glibc's own")
def test_holes_in_the_heap_go_back_to_the_system() -> None:
    paths = {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    subprocess.run([sys.executable, "-c", HOLES], check=True, env={**os.environ, **paths})
