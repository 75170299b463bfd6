"""Where a bundle goes: checked before the work, written beside, and renamed into place when complete."""

from __future__ import annotations

import contextlib
import errno
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from eagle_export.errors import ExportError
from eagle_runtime.manifest import MANIFEST_NAME


def check_destination(bundle: Path) -> None:
    """Raises ExportError unless `bundle` is free, or an older bundle, in a folder that exists."""
    if bundle.is_symlink() or (bundle.exists() and not bundle.is_dir()):
        raise ExportError(f"{bundle} exists and is no folder; choose another name")
    if bundle.is_dir() and any(bundle.iterdir()) and not (bundle / MANIFEST_NAME).is_file():
        raise ExportError(f"{bundle} exists and holds other files; choose another name")
    if not bundle.parent.is_dir():
        raise ExportError(f"{bundle.parent} does not exist; create it first")


def check_space(parent: Path, needed: int) -> None:
    """needed: bytes of weights. Raises ExportError if the disk has no room for them."""
    free = shutil.disk_usage(parent).free
    needed += needed // 50 + (4 << 20)  # graphs, manifest, blocks that are not filled
    if free < needed:
        raise ExportError(
            f"{parent} has {free / 1e6:.0f} MB free, but the bundle may take {needed / 1e6:.0f} MB; free space first"
        )


@contextlib.contextmanager
def folder_beside(bundle: Path) -> Iterator[Path]:
    """A temporary folder on the same disk, gone afterwards whatever happens."""
    try:
        folder = Path(tempfile.mkdtemp(prefix=f".{bundle.name}.", dir=bundle.parent))
    except OSError as error:
        raise ExportError(f"{bundle.parent} cannot be written ({error.strerror})") from None
    try:
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextlib.contextmanager
def disk_errors(bundle: Path) -> Iterator[None]:
    """What the operating system says of a write, as ExportError."""
    try:
        yield
    except OSError as error:
        # NumPy reports a write that was cut short without a number.
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)
        what = "the disk is full" if full else error.strerror or str(error)
        raise ExportError(f"{bundle} could not be written ({what}); nothing was left behind") from None
