"""The progress bar of an export."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TaskID, TextColumn, TimeRemainingColumn


class Bar:
    """A line on stderr that says what is being done."""

    def __init__(self, progress: Progress, task: TaskID) -> None:
        self._progress = progress
        self._task = task

    def step(self, description: str) -> None:
        """A step of unknown length begins."""
        self._progress.update(self._task, description=description, total=None)

    def weights(self, total: int) -> None:
        """Weights of so many bytes are going to be written."""
        self._progress.update(self._task, total=total, completed=0)

    def tensor(self, before: int, name: str, done: int) -> None:
        """A tensor is being written after so many bytes of other graphs, and of others of its own."""
        self._progress.update(self._task, description=f"writing weights: {name}", completed=before + done)


@contextmanager
def bar(description: str) -> Iterator[Bar]:
    """Shows a bar, if stderr is a terminal. description: of the first step."""
    columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TimeRemainingColumn())
    shown = Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True)
    with shown as progress:
        yield Bar(progress, progress.add_task(description, total=None))
