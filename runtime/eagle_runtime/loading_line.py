"""A line on a terminal that shows how far the loading of a bundle is, while it compiles kernels for this GPU."""

from __future__ import annotations

from typing import TextIO

WIDTH = 30  # characters of the bar
CLEARED = "\r\x1b[K"  # to the line's start, and erase it


class LoadingLine:
    """Shows the stage "warm" of loading, if it has several steps and `stream` is a terminal (loading.Progress)."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != "warm" or not self._stream.isatty():
            return
        if done == total:
            text = CLEARED
        elif done > 0:
            filled = WIDTH * done // total
            text = f"{CLEARED}compiling kernels for this GPU [{'#' * filled}{'.' * (WIDTH - filled)}]"
        else:
            return
        self._stream.write(text)
        self._stream.flush()
