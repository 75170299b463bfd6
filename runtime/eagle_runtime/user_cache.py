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

from eagle_runtime.processor import processor_features, processor_name


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
    """Returns what a file of the cache folder holds; None if there is none or it cannot be read."""
    try:
        return json.loads((cache_folder() / name).read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError, RuntimeError):  # RuntimeError: there is no home
        return None


def write_json(name: str, data: Any) -> None:
    """Write beside and rename, so that a file is the old one or whole. A folder that cannot be written only means that
    the work is done again."""
    try:
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile("w", dir=folder, encoding="utf-8", suffix=".new", delete=False) as file:
            json.dump(data, file)
        try:
            Path(file.name).replace(folder / name)
        except OSError:
            Path(file.name).unlink(missing_ok=True)
    except (OSError, RuntimeError):
        return
