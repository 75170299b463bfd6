"""The installed package eagle-edge-kernels: a library is code, so it is loaded from there and from nowhere else."""

from __future__ import annotations

import base64
import functools
import hashlib
import sys
from pathlib import Path
from typing import NamedTuple

PACKAGE = "eagle-edge-kernels"
INSTALL = "'pip install ./kernels' in a clone installs it (docs/install.md)"


class Kernels(NamedTuple):
    """version: of its operators; library: path of its shared library, which may not run here; damaged: it is not the
    file that was installed."""

    version: str
    library: Path
    damaged: bool


@functools.cache
def installed_kernels() -> Kernels | None:
    """Returns what the package says of itself, asked once per process; None where it is not installed."""
    try:
        import eagle_edge_kernels

        version, library = eagle_edge_kernels.VERSION, Path(eagle_edge_kernels.library())
    except (ImportError, AttributeError, SyntaxError, ValueError):  # an empty folder that is left, a damaged file
        return None
    return Kernels(version, library, is_damaged(library))


def is_damaged(library: Path) -> bool:
    """Whether a package's library differs in size or SHA-256 from what the installer recorded of it: loading one that
    was cut short ends the process. False without a record, and in a program that packed its libraries, as these may be
    signed or stripped then."""
    if getattr(sys, "frozen", False):
        return False
    package = library.parent
    records = package.parent.glob(f"{package.name}-*.dist-info/RECORD")
    lines = [line for record in records for line in record.read_text(encoding="utf-8", errors="replace").splitlines()]
    known = [line for line in lines if line.startswith(f"{package.name}/{library.name},sha256=")]
    if not known:
        return False
    try:
        content = library.read_bytes()
    except FileNotFoundError:
        return True
    digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
    return f"{package.name}/{library.name},sha256={digest},{len(content)}" not in known
