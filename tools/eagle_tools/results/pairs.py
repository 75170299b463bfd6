"""The two pairs that are measured, and their bundles; what is missing is made."""

from __future__ import annotations

import itertools
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.errors import BundleError, RequestError
from eagle_runtime.files import file_sha256

TOOLS = Path(__file__).resolve().parents[2]
HELDOUT, EDITS = TOOLS / "demo_pair" / "heldout.jsonl", TOOLS / "demo_pair" / "edits.jsonl"
HEADS = ("eagle1", "eagle3")
PRECISIONS = ("fp32", "int8", "int4")
SHAPE = {"layers": 16, "hidden": 2048, "heads": 32, "kv-heads": 8, "head-dim": 64, "intermediate": 8192}
GROWN_BYTES = 20 << 30  # of the grown pair and its bundles, while they are written


@dataclass(frozen=True, slots=True)
class Pair:
    """name: "demo" or "grown". folder: contains target, eagle1 and eagle3 as Hugging Face folders. title, caption: of
    the pair's part of the page, and of each of its tables."""

    name: str
    folder: Path
    title: str
    caption: str

    @property
    def target(self) -> Path:
        return self.folder / "target"


def shipped() -> Pair:
    """Returns the pair in tools/demo_pair."""
    title = "The shipped pair: 5.6 M parameters, 8 layers x 256"
    return Pair("demo", TOOLS / "demo_pair", title, "Model: the shipped pair, 5.6 M parameters.")


def drop_older(work: Path, say: Callable[[str], None]) -> None:
    """Remove the grown pair and the bundles in `work` if they were made from other weights than the shipped pair's."""
    files = (file for folder in ("target", *HEADS) for file in sorted((shipped().folder / folder).iterdir()))
    sums = "".join(f"{file_sha256(file)}  {file.parent.name}/{file.name}\n" for file in files)
    stamp = work / "shipped_pair.sha256"
    if not stamp.is_file() or stamp.read_text(encoding="utf-8") != sums:
        # Only what `grown` and `bundle_of` write: the folder may contain the user's own bundles.
        bundles = work / "bundles"
        ours = itertools.product(("demo", "grown"), HEADS, PRECISIONS)
        for folder in (work / "grown", *(bundles / "-".join(words) for words in ours)):
            if folder.is_dir():
                say(f"removing {folder}: it was made from an earlier shipped pair")
                shutil.rmtree(folder)
        if bundles.is_dir() and not any(bundles.iterdir()):
            bundles.rmdir()
        stamp.write_text(sums, encoding="utf-8")


def grown(work: Path, say: Callable[[str], None]) -> Pair:
    """Returns the grown pair, written to work/grown unless it is there. Raises RequestError."""
    title = "The shipped pair grown to 16 layers x 2048: 1.0 B parameters"
    caption = (
        "Model: the shipped pair of 5.6 M parameters, grown to 1.0 B by function-preserving steps (`tools/grow.py`)."
    )
    pair = Pair("grown", work / "grown", title, caption)
    if not pair.folder.is_dir():
        if shutil.disk_usage(work).free < GROWN_BYTES:
            raise RequestError(f"{work} has less than {GROWN_BYTES >> 30} GB free; make room or give another --work")
        say("growing the shipped pair to 16 layers x 2048")
        part = work / "grown.part"
        shutil.rmtree(part, ignore_errors=True)
        source = shipped().folder
        shape = [word for name, size in SHAPE.items() for word in (f"--{name}", str(size))]
        heads = [str(source / head) for head in HEADS]
        _run([str(TOOLS / "grow.py"), str(source / "target"), *heads, "-o", str(part), "--dtype", "fp32", *shape])
        part.rename(pair.folder)
    return pair


def bundle_of(pair: Pair, head: str, precision: str, work: Path, say: Callable[[str], None]) -> Path:
    """Returns the bundle of a head in a precision, exported unless this version can read it. Raises RequestError."""
    bundle = work / "bundles" / f"{pair.name}-{head}-{precision}"
    try:
        read_manifest(bundle)
    except BundleError:
        shutil.rmtree(bundle, ignore_errors=True)
        bundle.parent.mkdir(exist_ok=True)
        say(f"exporting {bundle.name}")
        paths = [str(pair.target), str(pair.folder / head), "-o", str(bundle)]
        _run(["-m", "eagle_export.cli", *paths, "-p", precision, "--no-certificate"])
    return bundle


def _run(arguments: list[str]) -> None:
    """Run Python in a process of its own, which frees its memory when it ends. Raises RequestError."""
    done = subprocess.run([sys.executable, *arguments], capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip().splitlines() or [f"exit status {done.returncode}"])[-1]
        raise RequestError(f"{' '.join(arguments[:2])} failed: {last}")
