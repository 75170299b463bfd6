"""A line on a terminal that shows how far the loading of a bundle is, while it compiles kernels for this GPU or
indexes a datastore."""

from __future__ import annotations

from typing import TextIO

STAGES = {"warm": "compiling kernels for this GPU", "index": "indexing the datastore"}
WIDTH = 30  # characters of the bar
CLEARED = "\r\x1b[K"  # to the line's start, and erase it


class LoadingLine:
    """Shows the stages "warm" and "index" of loading, if they have several steps and `stream` is a terminal
    (loading.Progress)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._shown = False

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage not in STAGES or not self._stream.isatty() or not (self._shown or 0 < done < total):
            return
        filled = WIDTH * done // total
        bar = f"{STAGES[stage]} [{'#' * filled}{'.' * (WIDTH - filled)}]"
        self._shown = 0 < done < total
        self._stream.write(CLEARED + bar if self._shown else CLEARED)
        self._stream.flush()
