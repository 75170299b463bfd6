"""The files that a manifest lists, compared with their SHA-256, and the weight files that its graphs read.

A graph holds the paths of its weight files, relative to its folder, and an engine opens any file at these paths. So
each path must be one that the manifest lists with a hash. They are read without the onnx library: only those messages
of the protocol buffer are parsed that may contain a tensor.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path, PurePosixPath

from eagle_runtime.base.errors import BundleError
from eagle_runtime.base.files import (
    GRAPH_BYTES,
    STANDS_FOR,
    TEXT_BYTES,
    bundle_file,
    file_sha256,
    is_pointer,
    read_plain,
)
from eagle_runtime.bundle.manifest import MANIFEST_NAME, Manifest
from eagle_runtime.machine.user_cache import read_cached, write_cached

# Message of onnx.proto -> field number -> message in that field.
MESSAGES: Mapping[str, Mapping[int, str]] = {
    "Model": {7: "Graph", 20: "TrainingInfo", 25: "Function"},
    "TrainingInfo": {1: "Graph", 2: "Graph"},
    "Function": {7: "Node", 11: "Attribute"},
    "Graph": {1: "Node", 5: "Tensor", 15: "SparseTensor"},
    "Node": {5: "Attribute"},
    "Attribute": {5: "Tensor", 6: "Graph", 10: "Tensor", 11: "Graph", 22: "SparseTensor", 23: "SparseTensor"},
    "SparseTensor": {1: "Tensor", 2: "Tensor"},
    "Tensor": {13: "ExternalData"},
    "ExternalData": {},
}
INITIALIZER: Mapping[str, Mapping[int, str]] = {
    "Model": {7: "Graph"},
    "Graph": {5: "Tensor"},
    "Tensor": {13: "ExternalData"},
    "ExternalData": {2: "path"},
}  # the same, down to the path of an initializer
KEY, VALUE = 1, 2  # fields of ExternalData
LOCATION = b"location"  # key of a path
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types; groups (3, 4) do not occur in proto3


def verify_hashes(
    bundle: Path,
    manifest: Manifest,
    on_progress: Callable[[int, int], None] | None = None,
    *,
    once: bool = False,
    names: Collection[str] | None = None,
) -> None:
    """Compare listed files with their SHA-256; raises BundleError naming the first that differs.

    on_progress: called with the bytes that are compared, and all of them, after each file. once: do not read a file
    again whose path, size, time of change and number on the disk are those of an earlier comparison on this machine;
    these are kept in the user's cache folder. names: the files to compare; None for every one. A file that is missing
    or leaves the bundle is an error whether it is compared or not."""
    paths = {name: bundle_file(bundle, name) for name in manifest.files}
    compared = {name: digest for name, digest in manifest.files.items() if names is None or name in names}
    with _read_errors(bundle):
        sizes = {name: paths[name].stat().st_size for name in compared}
    record = f"hashes-{hashlib.sha256(str(bundle.resolve()).encode()).hexdigest()[:32]}.json"
    kept = read_cached(record) if once else None
    known: dict[str, object] = kept if isinstance(kept, dict) else {}
    seen = {name: facts for name, facts in known.items() if name in manifest.files}
    done = 0
    for name, expected in compared.items():
        with _read_errors(paths[name]):
            status = paths[name].stat()
            path = str(paths[name].resolve())
            before = [path, status.st_size, status.st_mtime_ns, status.st_ino, expected]
            if known.get(name) != before:
                _check_digest(bundle, name, file_sha256(paths[name]), expected)
        seen[name] = before
        done += sizes[name]
        if on_progress is not None:
            on_progress(done, sum(sizes.values()))
    if once and seen != known:
        write_cached(record, seen)


@contextlib.contextmanager
def _read_errors(path: Path) -> Iterator[None]:
    """Where a file cannot be read within the block, that is a BundleError."""
    try:
        yield
    except OSError as error:
        raise BundleError(f"{path} cannot be read ({error.strerror}); copy the bundle again") from None


def read_listed(bundle: Path, manifest: Manifest, name: str, limit: int) -> bytes:
    """Returns the content of a listed file of at most `limit` bytes, after comparing that very content with its
    SHA-256. Raises BundleError."""
    if name not in manifest.files:
        raise BundleError(f"{bundle / name} is not listed in {MANIFEST_NAME}; export the bundle again")
    with _read_errors(bundle / name):
        content = read_plain(bundle_file(bundle, name), limit)
    _check_digest(bundle, name, hashlib.sha256(content).hexdigest(), manifest.files[name])
    return content


def read_text_file(bundle: Path, manifest: Manifest, name: str) -> bytes | None:
    """Returns the content of one of files.TEXT_BYTES; None where the bundle has no such file. Raises BundleError for a
    file in the folder that is not listed: it is not the bundle's own."""
    if name in manifest.files:
        return read_listed(bundle, manifest, name, TEXT_BYTES[name])
    if os.path.lexists(bundle / name):
        raise BundleError(
            f"{bundle / name} is not listed in {MANIFEST_NAME}, so it does not belong to the bundle; remove it, or "
            "export the bundle again"
        )
    return None


def _check_digest(bundle: Path, name: str, actual: str, expected: str) -> None:
    if actual != expected and is_pointer(bundle / name):
        raise BundleError(f"{bundle / name} {STANDS_FOR}")
    if actual != expected:
        raise BundleError(
            f"{bundle / name} does not match its SHA-256 in {MANIFEST_NAME}; copy or export the bundle again"
        )


def read_graph(bundle: Path, manifest: Manifest, file: str) -> bytes:
    """Returns the content of a file that holds a graph. Raises BundleError if it is not the exported file, or if it
    reads weights from a file that the manifest does not list."""
    content = read_listed(bundle, manifest, file, GRAPH_BYTES)
    where = bundle / file
    try:
        locations = set(external_files(content))
    except ValueError as error:
        raise BundleError(f"{where} is not an ONNX graph ({error}); export the bundle again") from None
    folder = PurePosixPath(file).parent
    for location in sorted(locations):
        if (folder / location).as_posix() not in manifest.files:
            raise BundleError(
                f"{where} reads its weights from {location!r}, which {MANIFEST_NAME} does not list; export the "
                "bundle again"
            )
    return content


def external_files(model: bytes) -> Iterator[str]:
    """Yields the paths, as stored, of all files that a serialised ModelProto reads tensors from. Raises ValueError if
    it is not a protocol buffer."""
    pending = [("Model", 0, len(model))]  # messages, and the bytes start to end that hold them
    while pending:
        message, *span = pending.pop()
        known = MESSAGES[message]
        keys, values = [], []
        for number, start, end in _fields(model, *span):
            if number in known and model.find(LOCATION, start, end) >= 0:  # most nodes hold none
                pending.append((known[number], start, end))
            elif message == "ExternalData":
                keys += [model[start:end]] if number == KEY else []
                values += [model[start:end]] if number == VALUE else []
        if LOCATION in keys:
            yield from (value.decode() for value in values or [b""])  # left out, it is empty


def at_places(model: bytes, places: Mapping[str, str]) -> bytes:
    """Returns a serialised ModelProto whose initializers are read from other files. places: path as stored -> new
    one, for all of them. Tensors elsewhere, as in subgraphs, keep their paths."""

    def moved(message: str, start: int, end: int) -> bytes:
        if message == "path":
            return places.get(model[start:end].decode(), model[start:end].decode()).encode()
        parts = []
        for number, first, last in _fields(model, start, end):
            if (inner := INITIALIZER[message].get(number)) is not None:
                content = moved(inner, first, last)
                parts += [model[start : first - len(varint(last - first))], varint(len(content)), content]
                start = last
        return b"".join([*parts, model[start:end]])

    return moved("Model", 0, len(model))


def varint(number: int) -> bytes:
    """Returns a number as seven bits per byte, lowest first; the top bit says that more follow."""
    out = bytearray()
    while number > 127:
        out.append(number & 127 | 128)
        number >>= 7
    out.append(number)
    return bytes(out)


def _fields(model: bytes, start: int, end: int) -> Iterator[tuple[int, int, int]]:
    """Yields (number, start, end) of every length-delimited field of a message: bytes, strings, messages."""
    while start < end:
        tag, start = _varint(model, start, end)
        if tag >> 32:  # other parsers drop these bits and read another field number
            raise ValueError(f"a field of number {tag >> 3} at byte {start}")
        number, kind = tag >> 3, tag & 7
        if kind == VARINT:
            _, start = _varint(model, start, end)
        elif kind in (FIXED32, FIXED64):
            start += 4 if kind == FIXED32 else 8
        elif kind == BYTES:
            length, start = _varint(model, start, end)
            if length <= end - start:
                yield number, start, start + length
            start += length
        else:
            raise ValueError(f"a field of kind {kind} at byte {start}")
        if start > end:
            raise ValueError("it is cut short")


def _varint(model: bytes, start: int, end: int) -> tuple[int, int]:
    """Returns a number stored with 7 bits per byte, and the position after it."""
    if start < end and model[start] < 128:  # as nearly all are
        return model[start], start + 1
    number = 0
    for shift, place in zip(range(0, 70, 7), range(start, end), strict=False):
        byte = model[place]
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place + 1
    raise ValueError("it is cut short")


def text_digest(manifest: Manifest) -> str:
    """Returns a digest of what ids mean: of the tokenizer and the vocabulary's size, or of all files without one."""
    files = manifest.files
    text = [str(manifest.target.vocab_size), files.get("tokenizer.json", "")]
    if not text[1]:
        text += [f"{name} {files[name]}" for name in sorted(files)]
    return hashlib.sha256("\n".join(text).encode()).hexdigest()
