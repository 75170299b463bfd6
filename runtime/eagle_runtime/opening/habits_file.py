"""A file of a model's habits (drafting.habits), where a user asks that what method recycling learns be kept.

    with EagleModel.load(bundle, habits="habits.bin") as model: ...  # read here if there is one, written at the end

Shapes: N contexts of up to ORDER tokens, M successors of all of them.
"""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.errors import BundleError, EagleWarning, RequestError
from eagle_runtime.base.files import read_plain, write_private
from eagle_runtime.bundle.listed_files import text_digest
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.drafting.habits import FADE, ORDER, SUCCESSORS, Entry, Habits

FORMAT = "eagle-edge habits 1"
ADVICE = "give another file name"
BYTES = 1 << 26  # habits.MOST contexts with all successors take 10 MB
OFTEN = 4096  # rows that are learned before the file is written at the end of a generation; chosen: no more are lost
MOST_ROWS = 1.01 / (1 - FADE)  # faded sum of their number
NO_TOKEN = -1  # fills short contexts from the left
TYPES = {"contexts": np.int32, "counts": np.float32, "ends": np.int64, "ids": np.int32, "sums": np.float32}


class HabitsFile:
    """Keeps the habits of a loaded bundle and its twins. Of several processes with one file the last to write wins."""

    def __init__(self, path: Path, bundle: Path) -> None:
        """Read the file if there is one, and write it once to see that it can be written. bundle: the folder.

        Raises BundleError, and RequestError for a file of another vocabulary, damaged, or of something else, which
        stays as it is."""
        manifest = read_manifest(bundle)
        self.habits = Habits(manifest.target.vocab_size)
        self._path, self._digest = path, text_digest(manifest)
        self._written = 0  # rows that had been learned
        try:
            write_private(path, self._read() if path.exists() else self._packed())
        except OSError as error:
            raise RequestError(f"the habits file {path} cannot be written ({error.strerror}); {ADVICE}") from None

    def save(self, least: int = 1) -> None:
        """Write the file, if `least` rows have been learned since it was written. Where that fails the old one stays,
        and an EagleWarning says so."""
        if self.habits.learned - self._written >= least:
            self._written = self.habits.learned
            try:
                write_private(self._path, self._packed())
            except OSError as error:
                warnings.warn(
                    f"the habits file {self._path} could not be written ({error.strerror}); the old one is still there",
                    EagleWarning,
                    stacklevel=2,
                )

    def _packed(self) -> bytes:
        from safetensors.numpy import save

        entries = self.habits.entries()
        tensors = {
            "contexts": np.array([(*(NO_TOKEN,) * (ORDER - len(one)), *one) for one, _, _ in entries]),
            "counts": np.array([count for _, _, count in entries]),
            "ends": np.cumsum([len(row) for _, row, _ in entries]),
            "ids": np.array([token for _, row, _ in entries for token in row]),
            "sums": np.array([value for _, row, _ in entries for value in row.values()]),
        }
        tensors["contexts"] = tensors["contexts"].reshape(-1, ORDER)
        typed: dict[str, Any] = {name: array.astype(TYPES[name]) for name, array in tensors.items()}
        return save(typed, {"format": FORMAT, "text": self._digest})

    def _read(self) -> bytes:
        """Restores the habits in the file, and returns its content. Raises RequestError."""
        from safetensors import SafetensorError
        from safetensors.numpy import load

        where = f"the habits file {self._path}"
        try:
            content = read_plain(self._path, BYTES)
        except (OSError, BundleError) as error:
            raise RequestError(f"{where} cannot be read ({error}); {ADVICE}") from None
        try:
            metadata = json.loads(content[8 : 8 + int.from_bytes(content[:8], "little")])["__metadata__"]
            if metadata["format"] != FORMAT:
                raise ValueError("another format")
            if metadata["text"] != self._digest:
                raise RequestError(f"{where} was made with another tokenizer or vocabulary; {ADVICE}")
            self.habits.restore(_entries(load(content), self.habits.vocab_size))
            return content
        except (SafetensorError, ValueError, KeyError, TypeError, RecursionError):
            raise RequestError(f"{where} is damaged, or no file of habits; {ADVICE}") from None


def _entries(tensors: dict[str, npt.NDArray[Any]], vocab_size: int) -> list[Entry]:
    """Raises ValueError or KeyError for tensors that habits cannot have written."""
    contexts, counts, ends, ids, sums = (tensors[name] for name in TYPES)
    starts = np.concatenate([np.zeros(1, np.int64), ends])[:-1]
    sizes = ends - starts
    fits = (
        all(tensors[name].dtype == kind for name, kind in TYPES.items())
        and contexts.shape == (len(counts), ORDER)
        and counts.shape == ends.shape
        and ids.shape == sums.shape == (int(sizes.sum()),)
        and (sizes > 0).all()
        and (sizes <= SUCCESSORS).all()
        and (contexts[:, -1:] >= 0).all()
        and (contexts >= NO_TOKEN).all()
        and ((contexts[:, 1:] >= 0) >= (contexts[:, :-1] >= 0)).all()
        and (contexts < vocab_size).all()
        and (ids >= 0).all()
        and (ids < vocab_size).all()
        and (counts >= 1).all()
        and (counts <= MOST_ROWS).all()
        and (sums >= 0).all()
        and (sums <= MOST_ROWS).all()
    )
    if not fits:
        raise ValueError("not what was written")
    rows = (dict(zip(ids[a:b].tolist(), sums[a:b].tolist(), strict=True)) for a, b in zip(starts, ends, strict=True))
    texts = (tuple(token for token in context if token != NO_TOKEN) for context in contexts.tolist())
    return list(zip(texts, rows, counts.tolist(), strict=True))
