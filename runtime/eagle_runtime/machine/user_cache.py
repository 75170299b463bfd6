"""The folder where this user's programs keep what can be made again, and small JSON files in it."""

from __future__ import annotations

import hashlib
import json
import os
import sys
import tempfile
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle_runtime.bundle.plain_file import MEGABYTE, read_plain
from eagle_runtime.errors import BundleError
from eagle_runtime.machine.processor import processor_features, processor_name

LARGEST = MEGABYTE  # bytes of a file; they take some kilobytes


def cache_folder() -> Path:
    """Returns EAGLE_CACHE, or the platform's own place."""
    if named := os.environ.get("EAGLE_CACHE"):
        return Path(named)
    if sys.platform == "win32":
        base = Path(os.environ.get("LOCALAPPDATA") or Path.home() / "AppData" / "Local")
    elif sys.platform == "darwin":
        base = Path.home() / "Library" / "Caches"
    else:
        base = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    return base / "eagle-edge"


def machine_key(facts: Iterable[str]) -> str:
    """Returns a name for what was found out on this machine by this version: equal for equal facts (of the bundle, the
    engine and its version) on the same processor."""
    try:
        version = metadata.version("eagle-edge")
    except metadata.PackageNotFoundError:  # run from its sources
        version = "source"
    words = [version, sys.platform, processor_name(), *processor_features(), str(os.cpu_count()), *facts]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:32]


def read_json(name: str) -> Any:
    """Returns what a file of the cache folder holds; None if there is none, or it is no JSON of ours."""
    try:
        return json.loads(read_plain(cache_folder() / name, LARGEST).decode())
    except (BundleError, OSError, ValueError, RuntimeError):  # RuntimeError: there is no home, or JSON is too deep
        return None


def write_json(name: str, data: Any) -> None:
    """Write beside and rename, so that a file is the old one or whole. A folder that cannot be written only means that
    the work is done again."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        handle, new = tempfile.mkstemp(dir=folder, suffix=".new")
        try:
            with open(handle, "w", encoding="utf-8") as file:
                json.dump(data, file)
            os.replace(new, folder / name)
        except BaseException:  # a disk may be full, and an interrupt may come between any two steps
            Path(new).unlink(missing_ok=True)
            raise
    except (OSError, RuntimeError):
        return
