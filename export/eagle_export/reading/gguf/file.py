"""A GGUF file, whole or split: its metadata, and its tensors, which are read and dequantised one at a time.

The layout is described in docs/gguf.md of ggml-org/ggml. The package gguf reads it too, but makes several arrays of
each token of a vocabulary: it takes seconds for 49 thousand tokens, where this takes a tenth of one.
"""

from __future__ import annotations

import math
import mmap
import re
import struct
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from eagle_export.base.errors import ExportError
from eagle_export.reading.stored_tensors import StoredTensor

if TYPE_CHECKING:
    import torch  # imported where tensors are read: headers are read without it

MAGIC = 0x46554747  # "GGUF", read as little-endian
VERSIONS = (2, 3)
ALIGNMENT = 32  # bytes, if the metadata has no other
SCALARS = dict(enumerate("BbHhIif?", 0)) | dict(enumerate("Qqd", 10))  # number of a type -> its letter in struct
STRING, ARRAY = 8, 9  # numbers of types
MOST_AXES = 4
SPLIT = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")  # names that llama-gguf-split gives
ADVICE = "convert the model again with llama.cpp's convert_hf_to_gguf.py"
ORIGINAL = "give the Hugging Face folder that the file was made from"
OTHER_TYPE = "give a file of another type, such as Q8_0, Q4_K_M or F16"
UNBLOCKED_TYPES = ("F64", "F32", "F16", "BF16")  # types without blocks
AT_ONCE = 1 << 22  # numbers that are dequantised together


@dataclass(frozen=True, slots=True)
class Order:
    """How numbers are stored from row `start` on, in llama.cpp's order: [outer, first, second, others], where a
    checkpoint has [outer, second, first, others]."""

    outer: int
    first: int
    second: int
    start: int = 0

    def undo(self, values: torch.Tensor) -> None:
        """Puts values into a checkpoint's order."""
        rows = values[self.start :]
        rows[:] = rows.reshape(self.outer, self.first, self.second, -1).transpose(1, 2).reshape(rows.shape)


@dataclass(frozen=True, slots=True)
class GgufTensor(StoredTensor):
    """A tensor of a GGUF file, or some of its rows. offset: of its first byte. kind: GGML's type. row_bytes: of a row,
    its last axis. order: in which llama.cpp has its numbers, None for a checkpoint's. added: what the values have in
    addition to the checkpoint's. exponential: whether they are -exp of the checkpoint's."""

    offset: int
    kind: str
    row_bytes: int
    order: Order | None = None
    added: float = 0.0
    exponential: bool = False

    @property
    def stored_as(self) -> str:
        """GGML's name of the type."""
        return self.kind

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return self._rows * self.row_bytes

    def read(self) -> torch.Tensor:
        """Reads the tensor, in fp32 if its type has blocks or the values were changed; no other tensor is loaded."""
        values = self._some(slice(None)).reshape(self.shape)
        if self.order is not None:
            self.order.undo(values)
        return values

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Reads a range along the first axis; all of a tensor whose rows are in another order."""
        if self.order is not None or len(self.shape) != 2:
            return StoredTensor.rows(self, start, stop)
        return self._some(slice(start, stop))

    def _some(self, rows: slice) -> torch.Tensor:
        stored = np.memmap(self.file, np.uint8, "r", self.offset, (self._rows, self.row_bytes))[rows]
        values = _values(stored, self.kind)
        if self.exponential:
            return (-values.double()).log().float()
        return values.float() - self.added if self.added else values

    def plus(self, offset: float) -> StoredTensor:
        """Returns the tensor plus a number; what was added already is not taken away first, which would round."""
        if self.added == offset:
            return replace(self, added=0.0)
        return StoredTensor.plus(self, offset)

    @property
    def _rows(self) -> int:
        return int(np.prod(self.shape[:-1], dtype=np.int64))


def _values(stored: np.ndarray, kind: str) -> torch.Tensor:
    """stored: bytes [rows, bytes of a row] -> values [rows, numbers of a row]."""
    import torch

    if kind == "BF16":
        return torch.from_numpy(np.array(stored).view(np.int16)).view(torch.bfloat16)
    if kind in UNBLOCKED_TYPES:
        return torch.from_numpy(np.array(stored).view(np.dtype(f"f{int(kind[1:]) // 8}")))
    from gguf.constants import GGML_QUANT_SIZES, GGMLQuantizationType
    from gguf.quants import dequantize

    numbers, size = GGML_QUANT_SIZES[GGMLQuantizationType[kind]]
    width = stored.shape[1] // size * numbers
    values = torch.empty(len(stored), width)
    step = max(1, AT_ONCE // width)
    for start in range(0, len(stored), step):
        rows = dequantize(np.array(stored[start : start + step]), GGMLQuantizationType[kind])
        values[start : start + step] = torch.from_numpy(rows)
    return values


@dataclass(frozen=True, slots=True)
class GgufFile:
    """A file, or all parts of one. metadata: without what describes the split. tensors: by name."""

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @property
    def architecture(self) -> str:
        """llama.cpp's name of the kind of model."""
        value = self.metadata.get("general.architecture")
        if not isinstance(value, str):
            raise ExportError(f"{self.path}: metadata general.architecture is {value!r}, but must be a name; {ADVICE}")
        return value

    def integer(self, key: str, default: int | None = None, least: int = 1) -> int:
        """Returns a whole number of the architecture's metadata, `least` or more; some converters state one of all
        layers as a list of equal numbers. Raises ExportError."""
        stated = value = self._value(key, default)
        if isinstance(stated, list) and stated and all(each == stated[0] for each in stated):
            value = stated[0]
        if type(value) is not int or value < least:
            raise ExportError(
                f"{self.path}: metadata {self.architecture}.{key} is {str(stated)[:60]}, but must be one whole number, "
                f"{least} or more, the same for all layers; such a model is not supported"
            )
        return value

    def count(self, key: str) -> int:
        """Returns a number of things that a model may go without, 0 where it is not said. Raises ExportError."""
        return self.integer(key, 0, 0)

    def each_layer(self, key: str, least: int = 1) -> list[int]:
        """Returns a whole number of each layer, `least` or more, from a list of them or one of all. Raises
        ExportError."""
        stated = self._value(key, None)
        numbers = stated if isinstance(stated, list) else [stated] * self.layers
        if len(numbers) != self.layers or not all(type(each) is int and each >= least for each in numbers):
            raise ExportError(
                f"{self.path}: metadata {self.architecture}.{key} is {str(stated)[:60]}, but must be a whole number, "
                f"{least} or more, of all layers or of each of {self.layers}; {ADVICE}"
            )
        return numbers

    def one_of_some_layers(self, key: str) -> int:
        """Returns a whole number that some layers have, the same, and the others not: 0. Raises ExportError."""
        numbers = self.each_layer(key, least=0)
        if len(counts := set(numbers) - {0}) != 1:
            raise ExportError(f"{self.path}: metadata {self.architecture}.{key} is {numbers}, not one number and zeros")
        return counts.pop()

    @property
    def layers(self) -> int:
        """Layers that compute the next token; those that predict further ones follow them. Raises ExportError."""
        return self.integer("block_count") - self.count("nextn_predict_layers")

    def number(self, key: str, default: float | None = None) -> float:
        """Returns the shortest decimal number of an fp32 in the architecture's metadata. Raises ExportError."""
        value = self._value(key, default)
        if type(value) not in (int, float) or not math.isfinite(value):
            raise ExportError(f"{self.path}: metadata {self.architecture}.{key} is {value!r}, but must be a number")
        return shortest(value)

    def optional(self, key: str) -> Any:
        """Returns a value of the architecture's metadata, None if there is none."""
        return self.metadata.get(f"{self.architecture}.{key}")

    def _value(self, key: str, default: float | None) -> Any:
        value = self.optional(key)
        value = default if value is None else value
        if value is None:
            raise ExportError(f"{self.path}: metadata {self.architecture}.{key} is missing; {ADVICE}")
        return value


def shortest(value: float) -> float:
    """Returns the number with the fewest digits that has the same fp32 value: 1e-05 for 9.99999974e-06."""
    return float(str(np.float32(value)))


def read_gguf(path: Path) -> GgufFile:
    """Returns a file's metadata and tensors; for a part of a split file, those of all parts. Raises ExportError."""
    metadata: dict[str, Any] = {}
    tensors: dict[str, GgufTensor] = {}
    parts = _parts(path)
    for part in parts:
        values, entries = _read_part(part)
        for entry in entries:
            if entry.name in tensors:
                raise ExportError(f"{part}: tensor {entry.name!r} is in another part too; download the parts again")
            tensors[entry.name] = entry
        metadata = {**values, **metadata}  # the first part's come first
    wanted = metadata.get("split.tensors.count", len(tensors))
    if metadata.get("split.count", 0) > len(parts):
        raise ExportError(
            f"{path} is one of {metadata['split.count']} parts, but its name does not say which; give the parts the "
            "names that they were published with, such as model-00001-of-00002.gguf"
        )
    if wanted != len(tensors):
        raise ExportError(f"{path}: its parts hold {len(tensors)} tensors of {wanted}; download them again")
    return GgufFile(path, metadata, tensors)


def _parts(path: Path) -> list[Path]:
    match = SPLIT.fullmatch(path.name)
    if match is None:
        parts = [path]
    else:
        count = int(match[3])
        parts = [path.with_name(f"{match[1]}-{number:05}-of-{count:05}.gguf") for number in range(1, count + 1)]
    for part in parts:
        if not part.is_file():
            raise ExportError(f"{part} is missing; " + ("give an existing file" if part == path else "download it too"))
    return parts


def _read_part(path: Path) -> tuple[dict[str, Any], list[GgufTensor]]:
    try:
        from gguf import GGML_QUANT_SIZES, GGMLQuantizationType
    except ImportError:
        raise ExportError('GGUF files are read with the package gguf; pip install "eagle-edge[gguf]"') from None
    try:
        with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            values, infos, data = _Header(content, path).read()
        size, entries, known = path.stat().st_size, [], set(GGMLQuantizationType)
        for name, number, shape, offset in infos:
            if number not in known:
                raise ExportError(
                    f"{path}: tensor {name!r} is of type {number}, which the installed package gguf does not know; "
                    f"update it, or {OTHER_TYPE}"
                )
            kind = GGMLQuantizationType(number)
            block, stored = GGML_QUANT_SIZES[kind]
            if shape[-1] % block:
                raise ValueError(f"tensor {name!r} has rows of {shape[-1]} numbers in blocks of {block}")
            row = shape[-1] // block * stored
            if data + offset + math.prod(shape[:-1]) * row > size:
                raise ValueError(f"tensor {name!r} lies beyond its end")
            dtype = kind.name if kind.name in UNBLOCKED_TYPES else "F32"
            entries.append(GgufTensor(name, path, shape, dtype, data + offset, kind.name, row))
    except ExportError:
        raise
    except Exception as error:  # many kinds, for bytes that are not what they should be
        what = " ".join(str(error).split())[:200] or type(error).__name__
        raise ExportError(f"{path} is not a GGUF file, or damaged or cut short ({what}); download it again") from None
    return values, entries


class _Header:
    """Reads values one after the other. at: offset of the next one. Raises ExportError for the other byte order; and
    ValueError, struct.error or KeyError for bytes that are no such header."""

    def __init__(self, content: mmap.mmap, path: Path) -> None:
        self.content, self.path, self.at = content, path, 0

    def read(self) -> tuple[dict[str, Any], list[tuple[str, int, tuple[int, ...], int]], int]:
        """Returns metadata, then of each tensor its name, GGML's number of its type, its shape with rows first, and the
        offset of its first byte from that of all, which comes last."""
        if self.number("I") != MAGIC:
            raise ValueError("it does not begin with GGUF")
        version = self.number("I")
        if not version & 0xFFFF:
            where = f"{self.path} was written for machines with the other byte order"
            raise ExportError(f"{where}; {ADVICE} on this one")
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
        return values, infos, -(-self.at // step) * step

    def tensor(self) -> tuple[str, int, tuple[int, ...], int]:
        name, axes = self.text(), self.number("I")
        if axes > MOST_AXES:
            raise ValueError(f"tensor {name[:60]} has {axes} axes")
        sizes = self.numbers("Q", axes)
        return name, self.number("I"), tuple(reversed(sizes)), self.number("Q")

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
