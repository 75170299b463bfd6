"""The kit for checking a GPU: bundles of one pair with prebuilt engines, and reference logits.

KIT/kit.json                 what is inside, with a SHA-256 of every other file
KIT/requirements.txt         the library that built the engines, for pip: engines run with that version alone
KIT/<precision>/             a bundle with engines
KIT/<precision>.npz          prompt_i, continuation_i [n], logits_i [n, V] of the same bundle on the CPU
"""

from __future__ import annotations

import dataclasses
import json
import zipfile
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from eagle_runtime.base.errors import BundleError, RequestError
from eagle_runtime.base.files import MANIFEST_BYTES, file_sha256, inside, read_json
from eagle_runtime.base.tree import Float, Int
from eagle_runtime.bundle.typed_json import from_json

KIT = "kit.json"
REQUIREMENTS = "requirements.txt"
VERSION = 1
MADE_BY = "make the kit again with python -m eagle_tools.card_kit, or copy it again"


@dataclass(frozen=True, slots=True)
class Kit:
    """precisions: the bundles' folders, each with the compute capabilities that its engines are for. library: what
    built them, with its version. files: path -> SHA-256."""

    version: int
    made_with: str
    pair: str
    precisions: dict[str, tuple[str, ...]]
    library: str
    files: dict[str, str]

    def to_json(self) -> str:
        return json.dumps(dataclasses.asdict(self), indent=1) + "\n"


@dataclass(frozen=True, slots=True)
class Reference:
    """One prompt [p] with a continuation [n], and logits [n, V] of the rows that choose each of its tokens."""

    prompt: Int
    continuation: Int
    logits: Float


def read_kit(folder: Path) -> Kit:
    """Returns the kit in a folder; its files are not read. Raises RequestError."""
    path = folder / KIT
    if not folder.is_dir():
        raise RequestError(f"{folder} is not a folder; give the unpacked kit")
    data = read_json(path, MANIFEST_BYTES, RequestError, MADE_BY, "give the unpacked kit")
    if data.get("version") != VERSION:
        raise RequestError(f"{path}: its version is not {VERSION}, which this program reads; {MADE_BY}")
    try:
        kit: Kit = from_json(Kit, data, str(path))
    except BundleError as error:
        raise RequestError(f"{error.args[0].partition(';')[0]}; {MADE_BY}") from None
    for name in (*kit.files, *kit.precisions):
        if not inside(folder, folder / name):
            raise RequestError(f"{path}: {name!r} is outside of the kit; {MADE_BY}")
    return kit


def changed_files(folder: Path, kit: Kit) -> list[str]:
    """Returns the names of files that are missing or not those that the kit was made with."""
    return [
        name
        for name, digest in kit.files.items()
        if not (folder / name).is_file() or file_sha256(folder / name) != digest
    ]


def write_references(path: Path, references: list[Reference]) -> None:
    """Write the logits of one bundle."""
    arrays = {
        f"{field.name}_{index}": getattr(reference, field.name)
        for index, reference in enumerate(references)
        for field in dataclasses.fields(Reference)
    }
    with path.open("wb") as file:
        np.savez_compressed(file, **arrays)


def read_references(path: Path) -> list[Reference]:
    """Returns what write_references wrote. Raises RequestError."""
    try:
        with np.load(path, allow_pickle=False) as arrays:
            count = sum(name.startswith("prompt_") for name in arrays.files)
            names = [field.name for field in dataclasses.fields(Reference)]
            return [Reference(*(arrays[f"{name}_{index}"] for name in names)) for index in range(count)]
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile):
        raise RequestError(f"{path} cannot be read as reference logits; {MADE_BY}") from None
