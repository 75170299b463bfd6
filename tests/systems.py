"""What not every system has, and tests need: Windows has no signals, pipes and limits as POSIX knows them, and links of
files only where its user may make some."""

from __future__ import annotations

import contextlib
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from safetensors.torch import load
from torch import Tensor

posix_only = pytest.mark.skipif(os.name != "posix", reason="signals, pipes and permissions of POSIX")


def links_work() -> bool:
    """Whether a link of a file can be made here, and followed."""
    with tempfile.TemporaryDirectory() as folder:
        link, file = Path(folder, "link"), Path(folder, "file")
        file.write_bytes(b"content")
        try:
            link.symlink_to(file)
            return link.read_bytes() == b"content"
        except OSError:
            return False


needs_links = pytest.mark.skipif(not links_work(), reason="no links of files can be made here")


def read_tensors(file: Path) -> dict[str, Tensor]:
    """The tensors of a safetensors file, in memory of their own: Windows replaces no file that load_file has mapped."""
    return load(file.read_bytes())


@contextlib.contextmanager
def largest_file(size: int) -> Iterator[None]:
    """Within the block the kernel refuses to write files of more than `size` bytes, as on a full disk."""
    resource = pytest.importorskip("resource")
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
