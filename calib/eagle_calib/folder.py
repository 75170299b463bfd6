"""Folders that appear complete or not at all: one process writes to a work folder, which is renamed at the end.

While a folder "bundle" is being written, the work folder ".bundle.eagle-work" next to it holds:

    lock    held by the process that writes; the system releases it when the process ends in any way
    new     the new folder, until it is renamed
    old     the older folder of that name, until it is deleted
    kept    finished work from which the same command goes on if it is stopped (exports alone; resume.py there)

If the lock of a work folder is free, its process was killed, and the next process removes what it left but for "kept".
Used for bundles, engines, calibrations, and what training keeps.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from eagle_calib.errors import FolderError
from eagle_runtime.base.files import rename

WORK = ".eagle-work"
KEPT = "kept"
TRIES = 20  # attempts to take a lock that another process may be releasing
WAIT = 0.05  # seconds per attempt


def unchecked(folder: Path) -> None:
    """The check for a folder whose content may be replaced in any case."""


@contextlib.contextmanager
def written(place: Path, check: Callable[[Path], object] = unchecked) -> Iterator[Path]:
    """Yields a new folder to write into, which replaces `place` if the block succeeds, and is removed if it raises.

    check: raises if the older folder of that name must stay; it is called after that folder was renamed, when no
    process writes to it any more. Raises FolderError if another process writes to this place, and OSError."""
    with claimed(place) as work:
        new, old = work / "new", work / "old"
        new.mkdir()
        yield new
        try:
            if place.exists():
                rename(place, old)
                check(old)
            rename(new, place)
        except BaseException:  # an interrupt may come between any two steps
            _put_back(old, place)
            raise


def work_folder(place: Path) -> Path:
    """Returns where a folder is written before it gets its place."""
    return place.parent / f".{place.name}{WORK}"


@contextlib.contextmanager
def claimed(place: Path) -> Iterator[Path]:
    """Yields a work folder next to a place, empty but for "kept", locked for this process and removed afterwards. What
    a killed process left there is removed first. Raises FolderError if another process holds the lock."""
    work = work_folder(place)
    with _locked(work, place, TRIES):
        _clear(work, place)
        try:
            yield work
        finally:
            _clear(work, place)


def clear_leftovers(parent: Path) -> None:
    """Removes what killed processes left in a folder, and restores a folder that one had renamed but not replaced. Work
    folders of running processes stay."""
    for work in parent.glob(f".*{WORK}"):
        place = parent / work.name.removeprefix(".").removesuffix(WORK)
        with contextlib.suppress(FolderError, OSError):
            ours = not work.is_symlink() and {path.name for path in work.iterdir()} <= {"lock", "new", "old", KEPT}
            if ours:
                with _locked(work, place, tries=1):
                    _clear(work, place)


@contextlib.contextmanager
def _locked(work: Path, place: Path, tries: int) -> Iterator[None]:
    """Holds the lock of a work folder, which is created if needed, and removed with the lock if it is then empty."""
    lock = FileLock(work / "lock")
    for _ in range(tries):
        try:
            work.mkdir(exist_ok=True)
        except OSError as error:
            raise FolderError(f"{place.parent} cannot be written ({error.strerror})") from None
        try:
            lock.acquire(timeout=WAIT)
        except (Timeout, FileNotFoundError):  # held, or its holder has just removed the folder
            continue
        if (work / "lock").exists():
            break
        lock.release()  # of a file that was deleted: the next process would create another
    else:
        raise FolderError(f"{place} is being written by another process; wait until it ends, or choose another name")
    try:
        yield
    finally:
        if os.name != "nt":  # Windows deletes no open file; it is removed on release there
            (work / "lock").unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):  # another process uses it
            work.rmdir()


def _clear(work: Path, place: Path) -> None:
    _put_back(work / "old", place)
    for name in ("new", "old"):
        shutil.rmtree(work / name, ignore_errors=True)


def _put_back(old: Path, place: Path) -> None:
    """Restores the older folder if no new one took its place."""
    if old.exists() and not place.exists():
        rename(old, place)
