"""A folder that one process writes: beside its place, renamed when complete, cleared away by the next if it was killed.

Beside a folder "bundle" that is being written lies ".bundle.eagle-work" with these:

    lock    held by the process that writes; the system lets go of it when the process ends, however it ends
    new     what is written, until it is renamed
    old     what had the name before, from then until it is deleted

So whatever lies in a work folder whose lock is free was left by a process that is no more. Used for bundles, engines,
calibrations, and what training keeps.
"""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

from filelock import FileLock, Timeout

from eagle_calib.errors import FolderError

WORK = ".eagle-work"
TRIES = 20  # to take a place that others are just letting go of
WAIT = 0.05  # seconds between them


def unchecked(folder: Path) -> None:
    """The check of a place whose content may go, whatever it is."""


@contextlib.contextmanager
def written(place: Path, check: Callable[[Path], object] = unchecked) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `place` if the block ends well, and goes if it does not.

    check: raises if what a folder holds must stay; asked about an older folder of that name once it has stepped aside,
    where nobody writes to it any more. Raises FolderError where another process writes to this place, and OSError."""
    with claimed(place) as work:
        new, old = work / "new", work / "old"
        new.mkdir()
        yield new
        try:
            if place.exists():
                place.rename(old)
                check(old)
            new.rename(place)
        except BaseException:  # an interrupt may come between any two steps
            _put_back(old, place)
            raise


@contextlib.contextmanager
def claimed(place: Path) -> Iterator[Path]:
    """An empty folder beside a place, for this process alone, gone afterwards whatever happens. What a killed process
    left there is cleared away first. Raises FolderError if another process has it."""
    work = place.parent / f".{place.name}{WORK}"
    with _locked(work, place, TRIES):
        _clear(work, place)
        try:
            yield work
        finally:
            _clear(work, place)


def clear_leftovers(parent: Path) -> None:
    """Clear away what killed processes left in a folder, and put back what one had moved aside but not replaced; work
    folders of living ones stay."""
    for work in parent.glob(f".*{WORK}"):
        place = parent / work.name.removeprefix(".").removesuffix(WORK)
        with contextlib.suppress(FolderError, OSError):
            ours = not work.is_symlink() and {path.name for path in work.iterdir()} <= {"lock", "new", "old"}
            if ours:
                with _locked(work, place, tries=1):
                    _clear(work, place)


@contextlib.contextmanager
def _locked(work: Path, place: Path, tries: int) -> Iterator[None]:
    """Hold the lock of a work folder, which is made if it is not there and goes with the lock if it is empty then."""
    lock = FileLock(work / "lock")
    for _ in range(tries):
        try:
            work.mkdir(exist_ok=True)
        except OSError as error:
            raise FolderError(f"{place.parent} cannot be written ({error.strerror})") from None
        try:
            lock.acquire(timeout=WAIT)
        except (Timeout, FileNotFoundError):  # held; or its holder has just taken the folder away
            continue
        if (work / "lock").exists():
            break
        lock.release()  # of a file without a name: the next to come would make another
    else:
        raise FolderError(f"{place} is being written by another process; wait until it ends, or choose another name")
    try:
        yield
    finally:
        if os.name != "nt":  # there it is open, and goes when it is released
            (work / "lock").unlink(missing_ok=True)
        lock.release()
        with contextlib.suppress(OSError):  # another process has come to it
            work.rmdir()


def _clear(work: Path, place: Path) -> None:
    _put_back(work / "old", place)
    for name in ("new", "old"):
        shutil.rmtree(work / name, ignore_errors=True)


def _put_back(old: Path, place: Path) -> None:
    """Whatever stepped aside for a folder that did not come."""
    if old.exists() and not place.exists():
        old.rename(place)
