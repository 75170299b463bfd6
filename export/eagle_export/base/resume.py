"""What a stopped export keeps for the next one: finished tensors, recorded inputs, or a bundle that was refused.

They are in the bundle's work folder (eagle_calib/folder.py), in "kept", with a fingerprint of all that they were made
of. The same command goes on from there; an export of other files, settings or versions to the same place begins anew.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from importlib import metadata
from pathlib import Path

from eagle_calib.folder import KEPT
from eagle_runtime.base.errors import EagleError

TOOLS = ("eagle-edge", "torch", "transformers", "onnx", "onnx-ir", "onnxscript", "numpy", "safetensors")
KEY = "made_of.txt"
ROUNDED = "rounded_by.txt"  # of the weights: what they are rounded by
REFUSED = "refused"  # a bundle outside its limits (checking/limits.py)


def fingerprint(sources: Sequence[Path], settings: Mapping[str, object]) -> str:
    """Returns a hash of settings, versions, and the names, sizes and times of the files in source folders. A file whose
    content changes gets another time: hashing what is in it would take as long as an export."""
    files = [file for source in sources for file in (sorted(source.iterdir()) if source.is_dir() else [source])]
    stats = [(str(file.absolute()), file.stat()) for file in files if file.is_file()]
    listed = [(name, stat.st_size, stat.st_mtime_ns, stat.st_ctime_ns) for name, stat in stats]
    versions = {name: metadata.version(name) for name in TOOLS}
    return hashlib.sha256(json.dumps([listed, settings, versions], sort_keys=True).encode()).hexdigest()


def holds_refused(work: Path, key: str) -> bool:
    """Returns whether a work folder keeps a refused bundle of this key."""
    return _is_of(work / KEPT, key) and (work / KEPT / REFUSED).is_dir()


@contextlib.contextmanager
def kept(work: Path, key: str) -> Iterator[Path]:
    """Yields the folder for finished work, with what an export of the same key left there. It is removed at the end and
    after an error of the input, and stays if a bundle was refused, or if the export is stopped in another way with
    something finished."""
    folder = work / KEPT
    if not _is_of(folder, key):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        (folder / KEY).write_text(key, encoding="utf-8")
    try:
        yield folder
    except EagleError:
        if not (folder / REFUSED).exists():
            shutil.rmtree(folder, ignore_errors=True)
        raise
    except BaseException:
        if {path.name for path in folder.iterdir()} <= {KEY, ROUNDED}:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    shutil.rmtree(folder, ignore_errors=True)


def rounded_by(folder: Path, made_of: str) -> None:
    """Forgets the finished tensors in a folder unless they were rounded by the same. made_of: a hash of recorded inputs
    and of what was chosen by them. With other threads or less memory the same command may record others, and the levels
    of a weight go with no other steps, those of a smoothed layer with no other norm."""
    note = folder / ROUNDED
    if not note.is_file() or note.read_text(encoding="utf-8") != made_of:
        for journal in folder.glob("*.journal"):
            journal.unlink()
        note.write_text(made_of, encoding="utf-8")


def _is_of(folder: Path, key: str) -> bool:
    """Returns whether a folder of finished work was left by an export of this key."""
    try:
        return (folder / KEY).read_text(encoding="utf-8") == key
    except (OSError, ValueError):
        return False
