"""The installed package eagle-edge-kernels: a library is code, so it is loaded from there and from nowhere else."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

PACKAGE = "eagle-edge-kernels"
INSTALL = "'pip install ./kernels' in a clone installs it (docs/install.md)"


class Kernels(NamedTuple):
    """version: of its operators; library: path of its shared library, which may not run here."""

    version: str
    library: Path


def installed_kernels() -> Kernels | None:
    """Returns what the package says of itself; None where it is not installed."""
    try:
        import eagle_edge_kernels

        version, library = eagle_edge_kernels.VERSION, Path(eagle_edge_kernels.library())
    except (ImportError, AttributeError, SyntaxError, ValueError):  # an empty folder that is left, a damaged file
        return None
    return Kernels(version, library)
