"""Files of conversations: text, figures and the rows that were read of it, in one safetensors file.

The file's own SHA-256 is in its header, so any damage is noticed before anything of it is used. Rows are taken back
where the same engine would compute the same: for another bundle of the same model, another version of the engine or
another processor the text stays and the rows are left out. Native operators compute the same on every processor.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.app.result import PastTurn
from eagle_runtime.base.backend_names import NATIVE
from eagle_runtime.base.errors import BundleError, ConversationFileError, RequestError, why
from eagle_runtime.base.files import read_plain, write_private
from eagle_runtime.bundle.listed_files import text_digest
from eagle_runtime.bundle.manifest import Manifest
from eagle_runtime.bundle.typed_json import from_json
from eagle_runtime.core.decoding_state import Snapshot
from eagle_runtime.core.head import HeadSnapshot
from eagle_runtime.machine.host import processor_features, processor_name
from eagle_runtime.opening.backends import library_version
from eagle_runtime.opening.opened import OpenBundle

FORMAT = 1  # of the file; another one is refused
TEXT_BYTES = 1 << 26  # of a file besides rows: the text of a context of 128 thousand tokens has half a million
NOTES_BYTES = 1 << 16  # of an application's own strings: a title, settings, a summary
NO_DIGEST = "0" * 64
NO_FILE = (OSError, ValueError)  # the latter for a name that no file can have
ADVICE = "take another file, or begin a new conversation"


@dataclass(frozen=True, slots=True)
class Identity:
    """What must be equal for a file to be read: text, a digest of the tokenizer and the vocabulary's size. And for its
    rows to be taken: the digest of the bundle's files, the engine with its version, and the processor, unless all
    compute the same."""

    text: str
    bundle: str
    engine: str
    processor: str

    def difference(self, other: Identity) -> str | None:
        """Why rows of `other` cannot be taken; None if they can."""
        parts = ("bundle", "engine", "processor")
        differing = [part for part in parts if getattr(self, part) != getattr(other, part)]
        return f"made with another {differing[0]}" if differing else None


@dataclass(frozen=True, slots=True)
class Saved:
    """A conversation in a file, without rows. messages, tools, template_kwargs: as JSON; written: the last prompt and
    its answer; notes: strings of the application; first, noted_from: see HeadSnapshot."""

    format: int
    identity: Identity
    messages: str
    tools: str
    template_kwargs: str
    written: str
    turns: tuple[PastTurn, ...]
    notes: dict[str, str]
    first: int
    noted_from: int


Tensors = dict[str, npt.NDArray[np.generic]]


def identity_of(bundle: OpenBundle) -> Identity:
    """The identity of what runs a bundle here."""
    every = [f"{name} {digest}" for name, digest in sorted(bundle.manifest.files.items())]
    engine = f"{bundle.backend} {library_version(bundle.backend)}"
    return Identity(text_digest(bundle.manifest), _digest(every), engine, processor_of(bundle.backend, bundle.manifest))


def processor_of(backend: str, manifest: Manifest) -> str:
    """Returns what of a machine the bits of the target's rows depend on. Rows of a head change what is drafted, and
    never the answer."""
    native = manifest.target.graph.native
    if backend == NATIVE and native is not None and native.same_everywhere:
        return "every processor"
    return f"{processor_name()} {_digest(processor_features())}"


def pack(saved: Saved, ids: tuple[int, ...], rows: Snapshot | None) -> bytes:
    """Returns the content of a file. ids: of `saved.written`. Raises RequestError for notes that are too long."""
    from safetensors.numpy import save

    if sum(len(key) + len(value) for key, value in saved.notes.items()) > NOTES_BYTES:
        raise RequestError(f"notes have more than {NOTES_BYTES} characters; keep long texts in a file of your own")
    tensors: Tensors = {"token_ids": np.array(ids, np.int64)}
    if rows is not None:
        tensors["read_ids"] = np.array(rows.tokens, np.int64)
        tensors |= {f"target.{number}": array for number, array in enumerate(rows.target)}
        if rows.head is not None:
            tensors |= {f"head.{number}": array for number, array in enumerate(rows.head.rows)}
            tensors |= {f"pending.{number}": array for number, array in enumerate(rows.head.pending)}
    described = json.dumps(dataclasses.asdict(saved), ensure_ascii=True, allow_nan=False)
    contiguous = {name: np.ascontiguousarray(array) for name, array in tensors.items()}
    content = save(contiguous, {"conversation": described, "sha256": NO_DIGEST})
    digest = hashlib.sha256(content).hexdigest().encode()
    return content.replace(NO_DIGEST.encode(), digest, 1)


def write(path: Path, content: bytes) -> None:
    """Replace a file, or the one that a link names, by a new one (write_private). Raises ConversationFileError."""
    place = Path(os.path.realpath(path)) if path.is_symlink() else path
    if place.exists() and not place.is_file():
        raise ConversationFileError(f"{path} is not a regular file; choose another place")
    try:
        write_private(place, content)
    except NO_FILE as error:
        raise ConversationFileError(f"{path} cannot be written ({why(error)}); choose another place") from None


def read(path: Path, largest: int) -> tuple[Saved, tuple[int, ...], Snapshot | None]:
    """Returns what `pack` was given. largest: bytes of rows that a file may have. Raises ConversationFileError for a
    file that is damaged or none of a conversation."""
    try:
        content = read_plain(path, TEXT_BYTES + largest)
    except NO_FILE as error:
        raise ConversationFileError(f"{path} cannot be read ({why(error)}); {ADVICE}") from None
    except BundleError as error:
        raise ConversationFileError(f"{error}") from None
    saved, tensors = _unpacked(content, path)
    try:
        ids = _ids(tensors.pop("token_ids"))
        return saved, ids, _rows(saved, tensors)
    except (KeyError, ValueError, IndexError):
        raise ConversationFileError(f"{path} holds rows that do not fit together; {ADVICE}") from None


def _unpacked(content: bytes, path: Path) -> tuple[Saved, Tensors]:
    from safetensors import SafetensorError
    from safetensors.numpy import load

    try:
        size = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + size])
        metadata = header["__metadata__"]
        digest, described = metadata["sha256"], json.loads(metadata["conversation"])
        blank = content.replace(digest.encode(), NO_DIGEST.encode(), 1)
        if len(digest) != len(NO_DIGEST) or hashlib.sha256(blank).hexdigest() != digest:
            raise ConversationFileError(f"{path} is damaged: its SHA-256 differs from the one it names; {ADVICE}")
        if described["format"] != FORMAT:
            raise ConversationFileError(
                f"{path} has format {described['format']}, this runtime reads {FORMAT}; {ADVICE}"
            )
        saved: Saved = from_json(Saved, described, str(path))
        return saved, load(content)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError, SafetensorError, BundleError):
        raise ConversationFileError(f"{path} is not a file of a conversation, or damaged; {ADVICE}") from None


def _rows(saved: Saved, tensors: Tensors) -> Snapshot | None:
    """Raises KeyError, ValueError or IndexError for tensors that make no snapshot."""
    if not tensors:
        return None
    tokens = _ids(tensors.pop("read_ids"))
    parts = {kind: _numbered(tensors, kind) for kind in ("target", "head", "pending")}
    if len(tensors) != sum(map(len, parts.values())):
        raise ValueError("a tensor of another name")
    count = parts["target"][0].shape[1]
    head = None
    if parts["head"]:
        pending: list[npt.NDArray[np.floating[Any]]] = [np.asarray(part) for part in parts["pending"]]
        head = HeadSnapshot(tuple(parts["head"]), saved.first, saved.noted_from, pending)
        read_to = saved.first + parts["head"][0].shape[1]
        if not 0 <= saved.first <= read_to <= saved.noted_from <= count:
            raise ValueError("the head's rows are not those of the text")
    if not len(tokens) - 1 <= count <= len(tokens):
        raise ValueError("the target's rows are not those of the text")
    return Snapshot(tokens, tuple(parts["target"]), head)


def _numbered(tensors: Tensors, kind: str) -> list[npt.NDArray[np.generic]]:
    count = sum(name.startswith(f"{kind}.") for name in tensors)
    return [tensors[f"{kind}.{number}"] for number in range(count)]


def _ids(array: npt.NDArray[np.generic]) -> tuple[int, ...]:
    if array.dtype != np.int64 or array.ndim != 1 or (len(array) and int(array.min()) < 0):
        raise ValueError("no ids")
    return tuple(array.tolist())


def _digest(parts: Any) -> str:
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def as_json(what: str, value: Any) -> str:
    """Returns data as JSON. Raises RequestError for what JSON cannot hold. what: of the conversation, for errors."""
    try:
        return json.dumps(value, allow_nan=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise RequestError(f"{what} cannot be saved as JSON ({error}); use text, numbers, lists and dicts") from None
