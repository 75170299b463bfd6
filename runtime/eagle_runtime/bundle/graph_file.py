"""Reads a graph's ONNX file, compares it with its SHA-256, and checks which files it reads weights from.

A graph holds the paths of its weight files, relative to its folder, and an engine opens any file at these paths. So
each path must be one that the manifest lists with a hash. They are read without the onnx library: only those messages
of the protocol buffer are parsed that may contain a tensor.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path, PurePosixPath
from typing import NamedTuple

from eagle_runtime.bundle.listed_files import read_listed
from eagle_runtime.bundle.manifest import MANIFEST_NAME, GraphSpec, Manifest
from eagle_runtime.errors import BundleError
from eagle_runtime.files import GRAPH_BYTES

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
KEY, VALUE = 1, 2  # fields of ExternalData
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types; groups (3, 4) do not occur in proto3


class _Span(NamedTuple):
    """A message of onnx.proto in the bytes start to end of a file."""

    message: str
    start: int
    end: int


def read_graph(bundle: Path, manifest: Manifest, graph: GraphSpec) -> bytes:
    """Returns the content of a graph's file. Raises BundleError if it is not the exported file, or if it reads weights
    from a file that the manifest does not list."""
    content = read_listed(bundle, manifest, graph.file, GRAPH_BYTES)
    where = bundle / graph.file
    try:
        locations = set(external_files(content))
    except ValueError as error:
        raise BundleError(f"{where} is no ONNX graph ({error}); export the bundle again") from None
    folder = PurePosixPath(graph.file).parent
    for location in sorted(locations):
        if (folder / location).as_posix() not in manifest.files:
            raise BundleError(
                f"{where} reads its weights from {location!r}, which {MANIFEST_NAME} does not list; export the "
                "bundle again"
            )
    return content


def external_files(model: bytes) -> Iterator[str]:
    """Yields the paths, as stored, of all files that a serialised ModelProto reads tensors from. Raises ValueError if
    it is no protocol buffer."""
    pending = [_Span("Model", 0, len(model))]
    while pending:
        span = pending.pop()
        known = MESSAGES[span.message]
        keys, values = [], []
        for number, start, end in _fields(model, span.start, span.end):
            if number in known:
                pending.append(_Span(known[number], start, end))
            elif span.message == "ExternalData":
                keys += [model[start:end]] if number == KEY else []
                values += [model[start:end]] if number == VALUE else []
        if b"location" in keys:
            yield from (value.decode() for value in values)


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
    number = 0
    for shift, place in zip(range(0, 70, 7), range(start, end), strict=False):
        byte = model[place]
        number |= (byte & 127) << shift
        if byte < 128:
            return number, place + 1
    raise ValueError("it is cut short")
