"""The user's cache folder, and small JSON files in it whose content can be computed again."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import sys
from collections.abc import Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

from eagle_runtime.base.errors import BundleError
from eagle_runtime.base.files import MEGABYTE, read_plain, replacing
from eagle_runtime.machine.host import processor_features, processor_name


def cache_folder() -> Path:
    """Returns the folder in EAGLE_CACHE, or else the platform's usual one."""
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
    """Returns a key under which results of this machine and version are stored: the same for the same facts (about the
    bundle, the engine and its version) on the same processor."""
    try:
        version = metadata.version("eagle-edge")
    except metadata.PackageNotFoundError:  # run from its sources
        version = "source"
    words = [version, sys.platform, processor_name(), *processor_features(), str(os.cpu_count()), *facts]
    return hashlib.sha256("\n".join(words).encode()).hexdigest()[:32]


def read_cached(name: str) -> Any:
    """Returns the JSON value in a file of the cache folder; None if there is no such file, or it cannot be read."""
    try:
        return json.loads(read_plain(cache_folder() / name, MEGABYTE).decode())
    except (BundleError, OSError, ValueError, RuntimeError):  # RuntimeError: no home folder, or JSON nested too deep
        return None


def write_cached(name: str, data: Any) -> None:
    """Write a JSON value to a file of the cache folder, which is the old or the new one at any time. Does nothing where
    the folder cannot be written: then the work is done again in the next run."""
    with contextlib.suppress(OSError, RuntimeError):
        folder = cache_folder()
        folder.mkdir(parents=True, exist_ok=True)
        with replacing(folder / name) as new:
            new.write_text(json.dumps(data), encoding="utf-8")
