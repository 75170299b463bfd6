"""The destination of a bundle: checked before the export, and again before an older bundle is replaced."""

from __future__ import annotations

import contextlib
import errno
import shutil
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

from eagle_calib.folder import WORK, clear_leftovers
from eagle_export.base.errors import ExportError
from eagle_runtime.base.errors import BundleError
from eagle_runtime.base.files import MANIFEST_BYTES, SIDECAR_BYTES, read_json
from eagle_runtime.bundle.manifest import MANIFEST_NAME
from eagle_runtime.trt.engine_file import ENGINES, SIDECAR

TIMING = "timing.cache"  # TensorRT's measurements of the GPU, in a bundle's folder of engines


def check_destination(bundle: Path) -> None:
    """Raises ExportError unless `bundle` is free, or an older bundle without other files, in a folder that exists.
    Removes what killed exports left there."""
    if bundle.parent.is_dir():
        clear_leftovers(bundle.parent)
    if bundle.is_symlink():
        raise ExportError(f"{bundle} is a link; choose another name")
    if bundle.exists() and not bundle.is_dir():
        raise ExportError(f"{bundle} exists and is not a folder; choose another name")
    if bundle.is_dir():
        clear_leftovers(bundle / ENGINES)
        check_older(bundle, bundle)
    if bundle.parent.exists() and not bundle.parent.is_dir():
        raise ExportError(f"{bundle.parent} is not a folder; choose another place")
    if not bundle.parent.is_dir():
        raise ExportError(f"{bundle.parent} does not exist; create it first")


def check_older(older: Path, bundle: Path) -> None:
    """Raises ExportError if `older`, which has or had the name `bundle`, holds anything but the files that its manifest
    lists and engines that were built from it. An empty folder is fine."""
    if not any(older.iterdir()):
        return
    if not (older / MANIFEST_NAME).is_file():
        raise ExportError(f"{bundle} exists and holds other files; choose another name")
    ours = {MANIFEST_NAME, f"{ENGINES}/{TIMING}", *_listed(older / MANIFEST_NAME, bundle / MANIFEST_NAME)}
    for sidecar in older.glob(f"{ENGINES}/*/{SIDECAR}"):
        with contextlib.suppress(BundleError, RecursionError):  # its files then belong to no bundle
            files = set(_files(read_json(sidecar, SIDECAR_BYTES, BundleError, "")))
            folder = sidecar.parent.relative_to(older).as_posix()
            ours |= {f"{folder}/{name}" for name in ({SIDECAR, *files} if files else ())}
    folders = {parent.as_posix() for name in ours for parent in PurePosixPath(name).parents}
    for path in sorted(older.rglob("*")):
        name = path.relative_to(older).as_posix()
        if path.name.endswith(WORK):
            raise ExportError(f"{bundle / name}: engines are being built in this bundle; wait until that ends")
        if name not in (folders if path.is_dir() and not path.is_symlink() else ours):
            raise ExportError(
                f"{bundle / name} does not belong to the bundle, and only the bundle's files may be replaced; move it "
                "away, or choose another name"
            )


def _files(data: object) -> Iterator[str]:
    """The files that a sidecar of any version names: every "file" in it, of an engine or of one of its tables."""
    if isinstance(data, dict):
        name = data.get("file")
        yield from [name] if isinstance(name, str) else []
        for part in data.values():
            yield from _files(part)


def engines_of(bundle: Path) -> tuple[str, ...]:
    """Names of the engine folders in a bundle."""
    return tuple(sorted(sidecar.parent.name for sidecar in bundle.glob(f"{ENGINES}/*/{SIDECAR}")))


def _listed(path: Path, named: Path) -> Iterator[str]:
    """The files that a manifest of any version lists. named: its path in errors."""
    try:
        yield from read_json(path, MANIFEST_BYTES, BundleError, "")["files"]
    except (RecursionError, BundleError, KeyError, TypeError):
        raise ExportError(f"{named} does not say which files are the bundle's; choose another name") from None


def folder_bytes(folder: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_space(parent: Path, needed: int) -> None:
    """Raises ExportError if the disk has no room for `needed` bytes of weights."""
    free = shutil.disk_usage(parent).free
    needed += needed // 50 + (4 << 20)  # graphs, manifest, partly filled blocks
    if free < needed:
        raise ExportError(
            f"{parent} has {free / 1e6:.0f} MB free, but the bundle may take {needed / 1e6:.0f} MB; free space first"
        )


@contextlib.contextmanager
def disk_errors(bundle: Path, then: str = "no files were left") -> Iterator[None]:
    """Turns an OSError of the block into an ExportError. then: what it says of the files and what to do."""
    try:
        yield
    except OSError as error:
        # NumPy raises an error without a number for an incomplete write.
        full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, None)
        what = "the disk is full" if full else error.strerror or str(error)
        raise ExportError(f"{bundle} could not be written ({what}); {then}") from None
