"""The folder a calibration is written to: beside its place, and renamed when complete."""

from __future__ import annotations

import contextlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from eagle_calib.calibration import ARRAYS_NAME, JSON_NAME
from eagle_calib.errors import CalibrationError


def check_place(folder: Path, bundle: Path) -> None:
    """Raises CalibrationError unless a calibration may be written, or replaced, there."""
    if folder.resolve().is_relative_to(bundle.resolve()):
        raise CalibrationError(f"{folder} lies in the bundle, which stays as it is; choose another place")
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise CalibrationError(f"{folder} exists and is no folder; choose another name")
    if not folder.parent.is_dir():
        raise CalibrationError(f"{folder.parent} does not exist; create it first")
    if not os.access(folder.parent, os.W_OK):
        raise CalibrationError(f"{folder.parent} cannot be written; choose another place")
    names = {path.name for path in folder.iterdir()} if folder.is_dir() else set()
    if names and not {JSON_NAME} <= names <= {JSON_NAME, ARRAYS_NAME}:
        raise CalibrationError(f"{folder} exists and holds other files; choose another name")


@contextlib.contextmanager
def written(folder: Path) -> Iterator[Path]:
    """A new folder to write into, which takes the place of `folder` if the block ends well, and goes if it does not.

    Raises CalibrationError for a disk that does not take it."""
    try:
        beside = Path(tempfile.mkdtemp(prefix=f".{folder.name}.", dir=folder.parent))
        try:
            (beside / "new").mkdir()
            yield beside / "new"
            move_into_place(beside / "new", folder, beside / "old")
        finally:
            shutil.rmtree(beside, ignore_errors=True)
    except OSError as error:
        reason = error.strerror or str(error)
        raise CalibrationError(f"{folder} could not be written ({reason}); nothing was left behind") from None


def move_into_place(new: Path, folder: Path, aside: Path) -> None:
    """Rename; an older folder of that name steps aside first and comes back if the rename fails."""
    try:
        if folder.exists():
            folder.rename(aside)
        new.rename(folder)
    except BaseException:  # an interrupt may come between any two steps
        if aside.exists() and not folder.exists():
            aside.rename(folder)
        raise
