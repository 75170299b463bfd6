"""Looks at which files of a folder are open or mapped when they are removed, renamed or replaced: Windows refuses that.

Linux lists what a process has open and mapped, so that this is looked at before each of these steps. On Windows the
step itself fails."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path

STEPS = {"shutil.rmtree": 1, "os.remove": 1, "os.rmdir": 1, "os.rename": 2}  # audit event -> paths among its arguments
LISTED = Path("/proc/self/fd"), Path("/proc/self/maps")  # of Linux


class Watch:
    """Looks at all that is done in a folder. held: files that were open when they, or a folder with them, were to be
    removed or renamed. stop: opening a file of this name raises KeyboardInterrupt, once."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.held: set[str] = set()
        self.stop = ""
        self._looking = False

    def __call__(self, event: str, arguments: tuple[object, ...]) -> None:
        if self._looking or not (event == "open" or event in STEPS):
            return
        paths = [Path(os.fspath(one)) for one in arguments[: STEPS.get(event, 1)] if isinstance(one, str | os.PathLike)]
        paths = [path for path in paths if path.is_relative_to(self.folder)]
        if event == "open":
            if any(path.name == self.stop for path in paths):
                self.stop = ""
                raise KeyboardInterrupt
            return
        self._looking = True
        for path in paths:
            if path.name != "lock":  # which is removed before it is released, but on Windows
                self.held |= {name for name in open_files() if Path(name).is_relative_to(path)}
        self._looking = False


def open_files() -> set[str]:
    """Names of the files that this process has open or mapped; of none where the system does not list them."""
    if sys.platform != "linux":
        return set()
    fields = [line.split(maxsplit=5) for line in LISTED[1].read_text(encoding="utf-8").splitlines()]
    names = {each[5] for each in fields if len(each) == 6}
    for file in LISTED[0].iterdir():
        with contextlib.suppress(OSError):  # the one that lists them is gone
            names.add(os.readlink(file))
    return names


WATCHES: list[Watch] = []  # at most one; a hook stays until the process ends


def _look(event: str, arguments: tuple[object, ...]) -> None:
    for watch in WATCHES:
        watch(event, arguments)


sys.addaudithook(_look)


@contextlib.contextmanager
def watched(folder: Path) -> Iterator[Watch]:
    """Looks at a folder within the block, which is to hold no file when it is removed or renamed."""
    WATCHES.append(Watch(folder))
    try:
        yield WATCHES[-1]
    finally:
        held = WATCHES.pop().held
    assert not held
