"""Reading and writing files: regular files of bounded size, JSON, and writes that are never left half done.

A pipe would never end, a device may do anything when it is opened, and a file of any size would fill the memory. So
each is refused before it is opened, and once more afterwards, since a name may come to stand for another file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import secrets
import stat
import time
from collections.abc import Iterator
from pathlib import Path, PurePosixPath
from typing import Any, BinaryIO

from eagle_runtime.base.arguments import MOST_DEPTH, is_deeper, short_repr
from eagle_runtime.base.errors import BundleError, EagleError

MANIFEST_NAME = "eagle_config.json"
SNAPSHOTS = "snapshots"  # of the hub's cache
MEGABYTE = 1 << 20
LARGEST = MEGABYTE << 20  # bytes of one file of weights, and of one engine: a terabyte
PIECE = 4 * MEGABYTE  # read at a time
TRIES = 5  # to rename, chosen (0.3 s): on Windows another program, such as a virus scanner, may have a file open

# Limits of files that are read into memory. A manifest takes 20 kB to 1 MB, tokenizers of 256 thousand tokens 30 MB, a
# graph without its weights 10 kB to 2 MB.
MANIFEST_BYTES = 16 * MEGABYTE
SIDECAR_BYTES = MEGABYTE
GRAPH_BYTES = 256 * MEGABYTE
TEXT_BYTES = {
    "tokenizer.json": 128 * MEGABYTE,
    "tokenizer_config.json": 16 * MEGABYTE,
    "chat_template.jinja": MEGABYTE,
    "chat_template.tool_use.jinja": MEGABYTE,  # of models with one of its own for chats with tools
}
STANDS_FOR = "is a pointer of Git LFS, not the file itself; fetch that with git lfs pull"
POINTER = b"version https://git-lfs.github.com/spec/"  # how a file begins that stands for one in Git LFS


def inside(folder: Path, path: Path) -> bool:
    """Returns whether a path stays in a folder when all links in it are followed, or in the blobs of the hub's cache
    that the folder is a snapshot of: its files are links there (snapshots/COMMIT/FILE -> blobs/HASH)."""
    place, real = folder.resolve(), path.resolve()
    caches = (parent.parent for parent in place.parents if parent.name == SNAPSHOTS)
    return real.is_relative_to(place) or any(real.parent == cache / "blobs" for cache in caches)


def bundle_file(bundle: Path, name: str) -> Path:
    """Returns the path of a bundle's file. Raises BundleError if there is no regular file of that name, or if the name
    leaves the folder, even by a link."""
    pure = PurePosixPath(name)
    path = bundle / pure
    leaves = pure.is_absolute() or ".." in pure.parts or "\\" in name or ":" in name
    linked = exists = False
    try:
        linked = not leaves and not inside(bundle, path)
        exists = path.is_file()
    except (OSError, RuntimeError, ValueError):  # a loop of links, a name that no file system takes
        leaves = True
    if linked:
        raise BundleError(
            f"{bundle / MANIFEST_NAME}: file path {short_repr(name)} leaves the bundle by a link; put the file itself "
            "there, or copy the bundle with cp -rL"
        )
    if leaves:
        raise BundleError(
            f"{bundle / MANIFEST_NAME}: file path {short_repr(name)} leaves the bundle; export the bundle again"
        )
    if not exists and path.is_symlink() and not path.exists():
        raise BundleError(f"{path} is a link to {os.readlink(path)}, which is not there; download or copy that too")
    if not exists:
        raise BundleError(
            f"{path} is missing from the bundle, or is not a regular file; copy or export the bundle again"
        )
    return path


def open_plain(path: Path, limit: int = LARGEST) -> BinaryIO:
    """Open a regular file of at most `limit` bytes for reading. Raises OSError, or BundleError for anything but a
    regular file and for a larger one."""
    _check(path, path.stat(), limit)
    # Without O_NONBLOCK a pipe that took the file's place just now would hold the process up.
    descriptor = os.open(path, os.O_RDONLY | getattr(os, "O_NONBLOCK", 0) | getattr(os, "O_BINARY", 0))
    file = os.fdopen(descriptor, "rb")
    try:
        _check(path, os.fstat(descriptor), limit)
    except BundleError:
        file.close()
        raise
    return file


def read_plain(path: Path, limit: int) -> bytes:
    """Returns the content of a regular file of at most `limit` bytes. Raises OSError, or BundleError as open_plain
    does."""
    pieces: list[bytes] = []
    left = limit
    with open_plain(path, limit) as file:
        while piece := file.read(PIECE):
            if (left := left - len(piece)) < 0:  # grown since, or on a file system that reports no sizes
                raise _too_large(path, limit)
            pieces.append(piece)
    return b"".join(pieces)


def file_sha256(path: Path) -> str:
    """Returns the hex digest of a regular file, read in pieces. Raises OSError or BundleError."""
    digest = hashlib.sha256()
    with open_plain(path) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


@contextlib.contextmanager
def replacing(path: Path, new: Path | None = None) -> Iterator[Path]:
    """Yields a path in the same folder to write to, and renames that file to `path` when the block ends: `path` is the
    old file or the complete new one. If the block raises, the new file is removed. Raises OSError.

    new: the name to write under; None takes an unused one, so that threads and processes may write at once."""
    new = new or path.with_name(f".{path.name}.{secrets.token_hex(6)}.new")
    try:
        yield new
        rename(new, path)
    except BaseException:  # a disk may be full, and an interrupt may come between any two steps
        with contextlib.suppress(OSError):
            new.unlink()
        raise


def rename(new: Path, path: Path) -> None:
    """Renames a file or a folder, and tries again for a moment where Windows refuses. Raises OSError."""
    for attempt in range(TRIES):
        try:
            new.replace(path)
        except PermissionError:
            if attempt + 1 == TRIES:
                raise
            time.sleep(0.02 * 2**attempt)
        else:
            return


def write_private(path: Path, content: bytes) -> None:
    """Replace a file, readable by its owner alone, by a new one at once. Raises OSError."""
    with replacing(path) as new:
        descriptor = os.open(new, os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_BINARY", 0), 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())


def parse_json(content: str | bytes, where: object, error: type[EagleError], advice: str) -> dict[str, Any]:
    """Returns the JSON object in a text (bytes: UTF-8). Raises `error` in one sentence for anything else: `where` says
    what the text is, `advice` what to do."""
    try:
        data = json.loads(content if isinstance(content, str) else content.decode())
    except (ValueError, RecursionError) as problem:
        raise error(f"{where} is not readable JSON ({problem}); {advice}") from None
    if not isinstance(data, dict):
        raise error(f"{where} does not hold a JSON object; {advice}")
    if is_deeper(data):
        raise error(f"{where} is not readable JSON (more than {MOST_DEPTH} levels deep); {advice}")
    return data


def read_json(path: Path, limit: int, error: type[EagleError], advice: str, missing: str = "") -> dict[str, Any]:
    """Returns the JSON object in a regular file of at most `limit` bytes. Raises `error` as parse_json does, with the
    advice `missing`, if given, where there is no such file."""
    try:
        content = read_plain(path, limit)
    except BundleError as problem:
        raise error(str(problem)) from None
    except OSError as problem:
        if isinstance(problem, FileNotFoundError) and missing:
            raise error(f"{path} is missing; {missing}") from None
        raise error(f"{path} cannot be read ({problem.strerror or problem}); see that this user may read it") from None
    if content.startswith(POINTER):
        raise error(f"{path} {STANDS_FOR}")
    return parse_json(content, path, error, advice)


def is_pointer(path: Path) -> bool:
    """Returns whether a file only stands for one in Git LFS, as clones have them where LFS is not installed."""
    try:
        with path.open("rb") as file:
            return file.read(len(POINTER)) == POINTER
    except OSError:
        return False


def _check(path: Path, status: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{path} is not a regular file; put the file itself there, not a folder, a pipe or a device")
    if status.st_size > limit:
        raise _too_large(path, limit)


def _too_large(path: Path, limit: int) -> BundleError:
    return BundleError(
        f"{path} is larger than the {limit / MEGABYTE:.0f} MB that such a file may take; export it again"
    )
