"""Opening files of a bundle: regular ones alone, and none larger than is stated.

A pipe would never end, a device may do anything when it is opened, and a file of any size would fill the memory; so
each is refused before it is opened, and once more when it is, since a name may come to stand for another file.
"""

from __future__ import annotations

import hashlib
import os
import stat
from pathlib import Path
from typing import BinaryIO

from eagle_runtime.errors import BundleError

MEGABYTE = 1 << 20
LARGEST = MEGABYTE << 20  # bytes of one file of weights, and of one engine: a terabyte
PIECE = 4 * MEGABYTE  # read at a time

# Of files that are read whole. A manifest takes 20 kB to 1 MB, tokenizers of 256 thousand tokens 30 MB, a graph without
# its weights 10 kB to 2 MB.
MANIFEST_BYTES = 16 * MEGABYTE
SIDECAR_BYTES = MEGABYTE
GRAPH_BYTES = 256 * MEGABYTE
TEXT_BYTES = {
    "tokenizer.json": 128 * MEGABYTE,
    "tokenizer_config.json": 16 * MEGABYTE,
    "chat_template.jinja": MEGABYTE,
}


def inside(folder: Path, path: Path) -> bool:
    """Whether a path stays in a folder when all links in it are followed."""
    return path.resolve().is_relative_to(folder.resolve())


def open_plain(path: Path, limit: int = LARGEST) -> BinaryIO:
    """A regular file of at most `limit` bytes, opened to be read. Raises OSError, or BundleError for what is no
    regular file or a larger one."""
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
    """The content of a regular file of at most `limit` bytes. Raises OSError, or BundleError as open_plain does."""
    pieces: list[bytes] = []
    left = limit
    with open_plain(path, limit) as file:
        while piece := file.read(PIECE):
            if (left := left - len(piece)) < 0:  # grown since, or of a file system that tells no sizes
                raise _too_large(path, limit)
            pieces.append(piece)
    return b"".join(pieces)


def file_sha256(path: Path) -> str:
    """Hex digest of a regular file, read in pieces. Raises OSError or BundleError."""
    digest = hashlib.sha256()
    with open_plain(path) as file:
        while piece := file.read(PIECE):
            digest.update(piece)
    return digest.hexdigest()


def _check(path: Path, status: os.stat_result, limit: int) -> None:
    if not stat.S_ISREG(status.st_mode):
        raise BundleError(f"{path} is no regular file; put the file itself there, not a folder, a pipe or a device")
    if status.st_size > limit:
        raise _too_large(path, limit)


def _too_large(path: Path, limit: int) -> BundleError:
    return BundleError(
        f"{path} is larger than the {limit / MEGABYTE:.0f} MB that such a file may take; export it again"
    )
