"""The shared library with the native operators of eagle-edge, which is loaded by ONNX Runtime."""

from __future__ import annotations

import sys
from pathlib import Path

VERSION = "13"  # of the operators: changes with their names, inputs, attributes or bits


def library() -> Path:
    """Returns the path of the shared library."""
    suffix = ".dll" if sys.platform == "win32" else ".so"
    return Path(__file__).with_name("eagle_kernels" + suffix)
