"""The header of one GGUF file: its metadata, and what it says of its tensors.

The layout is described in docs/gguf.md of ggml-org/ggml. The package gguf reads it too, but makes several arrays of
each token of a vocabulary: it takes seconds for 49 thousand tokens, where this takes a tenth of one.
"""

from __future__ import annotations

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

MAGIC = 0x46554747  # "GGUF", read as little-endian
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, if the metadata has no other
SCALARS = dict(enumerate("BbHhIif?", 0)) | dict(enumerate("Qqd", 10))  # number of a type -> its letter in struct
STRING, ARRAY = 8, 9  # numbers of types
MOST_AXES = 4


class OtherByteOrderError(ValueError):
    """The file was written for machines with the other byte order."""


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """kind: GGML's number of the type. shape: rows first, as in PyTorch. offset: of the first byte in the file."""

    name: str
    kind: int
    shape: tuple[int, ...]
    offset: int


def read_header(path: Path) -> tuple[dict[str, Any], list[TensorInfo]]:
    """Returns the metadata and the tensors. Raises OSError; OtherByteOrderError; and ValueError, struct.error or
    KeyError for bytes that are no such header."""
    with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
        return _Header(content).read()


class _Header:
    """Reads values one after the other. at: offset of the next one."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at = content, 0

    def read(self) -> tuple[dict[str, Any], list[TensorInfo]]:
        if self.number("I") != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self.number("I")
        if not version & 0xFFFF:
            raise OtherByteOrderError("other byte order")
        if version not in VERSIONS:
            raise ValueError(f"version {version}")
        tensors, count = self.number("Q"), self.number("Q")
        values: dict[str, Any] = {}
        for _ in range(count):
            name = self.text()
            if name in values:
                raise ValueError(f"{name} is there twice")
            values[name] = self.value(self.number("I"))
        infos = [self.tensor() for _ in range(tensors)]
        step = values.get("general.alignment", ALIGNMENT)
        if type(step) is not int or step < 1 or step & (step - 1):
            raise ValueError(f"general.alignment is {step!r}")
        data = -(-self.at // step) * step
        return values, [TensorInfo(each.name, each.kind, each.shape, data + each.offset) for each in infos]

    def tensor(self) -> TensorInfo:
        name, axes = self.text(), self.number("I")
        if axes > MOST_AXES:
            raise ValueError(f"tensor {name[:60]} has {axes} axes")
        sizes = self.numbers("Q", axes)
        return TensorInfo(name, self.number("I"), tuple(reversed(sizes)), self.number("Q"))

    def value(self, kind: int) -> Any:
        if kind == STRING:
            return self.text()
        if kind != ARRAY:
            return self.number(SCALARS[kind])
        kind, count = self.number("I"), self.number("Q")
        if kind in SCALARS:
            return list(self.numbers(SCALARS[kind], count))
        if count > len(self.content):  # each takes a byte or more
            raise ValueError(f"a list of {count} values")
        return [self.text() for _ in range(count)] if kind == STRING else [self.value(kind) for _ in range(count)]

    def text(self) -> str:
        size = self.number("Q")
        start, self.at = self.at, self.at + size
        if self.at > len(self.content):
            raise ValueError("it ends in a text")
        return str(self.content[start : self.at], encoding="utf-8")

    def number(self, letter: str) -> Any:
        (value,) = self.numbers(letter, 1)
        return value

    def numbers(self, letter: str, count: int) -> tuple[Any, ...]:
        if count > len(self.content):
            raise ValueError(f"a list of {count} numbers")
        form = struct.Struct(f"<{count}{letter}")
        start, self.at = self.at, self.at + form.size
        return form.unpack_from(self.content, start)
