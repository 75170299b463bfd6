"""The worker's pipes: lines of a limited length in, lines out that wait where nobody reads, an end with the parent."""

from __future__ import annotations

import collections
import json
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

LONGEST = 16 << 20  # bytes of a line: thirty times the text of a context of 128 thousand tokens
CHUNK = 1 << 16  # bytes read at once: a pipe of Linux holds as many
# Chosen; docs/worker.md has those that a parent sees.
PAUSE = 1 << 20  # bytes waiting to be read, above which a turn pauses
MOST_PENDING = 8 << 20  # above which no further line is taken
FLUSH_S = 2.0  # seconds that the last lines may take
POLL_S = 0.5  # between looks at whether the parent still reads


def private_pipes() -> tuple[int, int]:
    """Returns copies of descriptors 0 and 1 for the protocol. Whatever writes to standard output from now on, native
    libraries too, writes to standard error; reading standard input finds its end."""
    source, sink = os.dup(0), os.dup(1)
    os.dup2(2, 1)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    if sys.platform == "win32":
        import msvcrt

        msvcrt.setmode(source, os.O_BINARY)
        msvcrt.setmode(sink, os.O_BINARY)
    return source, sink


def end_with_parent() -> None:
    """End this process soon after its parent, whoever else may hold the pipes open. A thread looks whether the parent
    is still the same: PR_SET_PDEATHSIG would end it with the thread that has started it. Windows has no such order of
    processes; there the end of standard input must do."""
    if sys.platform == "win32":
        return
    parent = os.getppid()

    def watch() -> None:
        while os.getppid() == parent:
            time.sleep(POLL_S)
        os._exit(0)

    threading.Thread(target=watch, name="eagle-parent", daemon=True).start()


def read_lines(source: int) -> Iterator[bytes | None]:
    """Yields the lines of a descriptor without their ends; None for one above LONGEST bytes, which is not stored."""
    parts: list[bytes] = []
    size = 0  # of the line so far
    while data := os.read(source, CHUNK):
        first, *others = data.split(b"\n")
        for number, piece in enumerate([first, *others]):
            if number:  # a line has ended before this piece
                yield None if size > LONGEST else b"".join(parts)
                parts, size = [], 0
            size += len(piece)
            if size > LONGEST:
                parts = []
            elif piece:
                parts.append(piece)
    if size:
        yield None if size > LONGEST else b"".join(parts)


class Writer:
    """Lines of JSON on a descriptor, written by a thread of its own. broken: whether nobody can read them any more."""

    def __init__(self, sink: int) -> None:
        self.broken = False
        self._sink = sink
        self._lines: collections.deque[bytes] = collections.deque()
        self._pending = 0
        self._changed = threading.Condition()
        self._waits = True
        threading.Thread(target=self._write, name="eagle-writer", daemon=True).start()

    def put(self, event: dict[str, Any]) -> None:
        """Send an event; waits while MOST_PENDING bytes are unread."""
        line = json.dumps(_finite(event), separators=(",", ":")).encode("ascii") + b"\n"
        with self._changed:
            self._changed.wait_for(lambda: self._pending < MOST_PENDING or not self._waits)
            self._lines.append(line)
            self._pending += len(line)
            self._changed.notify_all()

    def wait_for_reader(self, given_up: Callable[[], bool]) -> None:
        """Wait while PAUSE bytes are unread, unless `given_up` returns true."""
        with self._changed:
            while self._waits and self._pending >= PAUSE and not given_up():
                self._changed.wait(0.05)

    def stop_waiting(self) -> None:
        """From now on nothing waits for the reader."""
        with self._changed:
            self._waits = False
            self._changed.notify_all()

    def flush(self) -> None:
        """Wait until all is written, FLUSH_S at most."""
        with self._changed:
            self._changed.wait_for(lambda: self.broken or not self._pending, FLUSH_S)

    def _write(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: bool(self._lines))
                line = memoryview(self._lines.popleft())
            size = len(line)
            try:
                while line:
                    line = line[os.write(self._sink, line[:CHUNK]) :]
            except OSError:
                self.broken, self._waits = True, False
            with self._changed:
                self._pending -= size
                if self.broken:
                    self._lines.clear()
                    self._pending = 0
                self._changed.notify_all()


def _finite(value: Any) -> Any:
    """A value with null in place of numbers that JSON has not."""
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list | tuple) else value
