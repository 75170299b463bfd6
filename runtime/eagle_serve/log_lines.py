"""Log lines on standard error: text, or one JSON object each.

A thread of its own writes them, so that whoever does not read the server's standard error cannot stop its answers: what
does not fit into the queue meanwhile is dropped.
"""

from __future__ import annotations

import contextlib
import json
import logging
import queue
import sys
import threading
from collections.abc import Iterator

LEVELS = {"eagle_serve": logging.INFO, "eagle_runtime": logging.WARNING, "uvicorn": logging.WARNING}
WAITING = 4096  # lines
PATIENCE_S = 1.0  # for the last lines to be written


class _Formatter(logging.Formatter):
    def __init__(self, as_json: bool) -> None:
        super().__init__("%(asctime)s %(levelname)s %(message)s")
        self._as_json = as_json

    def format(self, record: logging.LogRecord) -> str:
        if not self._as_json:
            return super().format(record)
        data = {"time": self.formatTime(record), "level": record.levelname.lower(), "logger": record.name}
        data |= getattr(record, "fields", None) or {"message": record.getMessage()}
        if record.exc_info:
            data["error"] = self.formatException(record.exc_info)
        return json.dumps(data)


class _Handler(logging.Handler):
    """Passes lines to the thread that writes them."""

    def __init__(self, lines: queue.Queue[str | None]) -> None:
        super().__init__()
        self._lines = lines

    def emit(self, record: logging.LogRecord) -> None:
        with contextlib.suppress(queue.Full):
            self._lines.put_nowait(self.format(record))


@contextlib.contextmanager
def logged(as_json: bool) -> Iterator[None]:
    """Within the block lines are written."""
    lines: queue.Queue[str | None] = queue.Queue(WAITING)
    handler = _Handler(lines)
    handler.setFormatter(_Formatter(as_json))
    writer = threading.Thread(target=_write, args=(lines,), name="eagle-serve-log", daemon=True)
    writer.start()
    before = {name: logging.getLogger(name).level for name in LEVELS}
    for name, level in LEVELS.items():
        logging.getLogger(name).addHandler(handler)
        logging.getLogger(name).setLevel(level)
    try:
        yield
    finally:
        for name, level in before.items():
            logging.getLogger(name).removeHandler(handler)
            logging.getLogger(name).setLevel(level)
        with contextlib.suppress(queue.Full):
            lines.put_nowait(None)
        writer.join(PATIENCE_S)


def _write(lines: queue.Queue[str | None]) -> None:
    while (line := lines.get()) is not None:
        with contextlib.suppress(OSError, ValueError):  # closed
            print(f"{line}\n", end="", file=sys.stderr, flush=True)  # one write: other threads print lines too
