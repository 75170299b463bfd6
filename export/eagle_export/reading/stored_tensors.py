"""Tensors in files of weights: listed by their headers, and read one at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from eagle_export.base.errors import ExportError
from eagle_runtime.base.files import STANDS_FOR, is_pointer

if TYPE_CHECKING:
    import torch  # imported where tensors are read: headers are read without it

FLOATS = ("F64", "F32", "F16", "BF16")  # other types are quantised, and useless without their scales
COMPARED = 1 << 24  # numbers that are compared at a time
READ = 1 << 26  # bytes that are read at a time
DTYPES = {  # name of safetensors -> torch's
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "I64": "int64",
    "I32": "int32",
    "I16": "int16",
    "I8": "int8",
    "U8": "uint8",
    "BOOL": "bool",
}
DTYPE_NAMES = {torch_name: name for name, torch_name in DTYPES.items()}
TYPE_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2, "F8_E4M3": 1, "I64": 8, "I32": 4, "I8": 1, "U8": 1, "BOOL": 1}


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """A tensor in a file of weights: its name there, file, shape and type, without its values."""

    name: str
    file: Path
    shape: tuple[int, ...]
    dtype: str  # as safetensors names it: F32, F16, BF16, I64, BOOL, ...

    @property
    def stored_as(self) -> str:
        """The type in the file; `dtype` is that of what is read."""
        return self.dtype

    @property
    def num_bytes(self) -> int:
        """Bytes in the file."""
        return math.prod(self.shape) * TYPE_BYTES.get(self.dtype, 1)

    def read(self) -> torch.Tensor:
        """Reads the tensor; no other tensor of the file is loaded."""
        return _unpickled(self.file)[self.name].clone()

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Returns a range along the first axis."""
        return self.read()[start:stop]

    def plus(self, offset: float) -> StoredTensor:
        """Returns the tensor plus a number, in fp32."""
        return MadeTensor(self.name, self.file, self.shape, self.dtype, lambda: self.read().float() + offset)


@dataclass(frozen=True, slots=True)
class SafeTensor(StoredTensor):
    """A tensor in a safetensors file. start: the position of its first byte."""

    start: int

    def read(self) -> torch.Tensor:
        """Reads the tensor. Raises ExportError if the file cannot be read."""
        return self._read(0, self.shape)

    def rows(self, start: int, stop: int) -> torch.Tensor:
        """Reads a range along the first axis, and nothing else."""
        return self._read(start, (min(stop, self.shape[0]) - start, *self.shape[1:]))

    def _read(self, row: int, shape: tuple[int, ...]) -> torch.Tensor:
        """Reads into memory of its own: pages of a mapped file would count as the process's."""
        import torch

        if self.dtype not in DTYPES:
            raise ExportError(f"{self.file}: tensor {self.name!r} is stored as {self.dtype}, which is not read")
        tensor = torch.empty(shape, dtype=getattr(torch, DTYPES[self.dtype]))
        if tensor.numel() == 0:
            return tensor
        room, done = tensor.reshape(-1).view(torch.uint8).numpy().data, 0
        try:
            with self.file.open("rb", buffering=0) as file:
                file.seek(self.start + row * math.prod(shape[1:]) * tensor.itemsize)
                while done < len(room) and (count := file.readinto(room[done : done + READ])):
                    done += count
        except OSError as error:
            raise ExportError(
                f"{self.file} cannot be read ({error.strerror or error}); see that the disk is sound, or download it "
                "again"
            ) from None
        if done < len(room):
            raise ExportError(f"{self.file} ends inside tensor {self.name!r}; download it again")
        return tensor


@dataclass(frozen=True, slots=True)
class MadeTensor(StoredTensor):
    """A tensor whose values are made of others, or were read already. make: returns them."""

    make: Callable[[], torch.Tensor]

    def read(self) -> torch.Tensor:
        return self.make()


@dataclass(frozen=True, slots=True)
class ExpertTensor(StoredTensor):
    """Some rows of one expert's matrix, or some of its bias, of a tensor that holds those of all experts of a layer.
    number: of the expert. part: first row, end and step. turned: whether rows are columns in the stored matrix."""

    stored: StoredTensor
    number: int
    part: tuple[int, int, int]
    turned: bool = False

    def read(self) -> torch.Tensor:
        expert = self.stored.rows(self.number, self.number + 1)[0]
        return (expert.mT if self.turned else expert)[slice(*self.part)].contiguous()


@dataclass(frozen=True, slots=True)
class JoinedTensor(StoredTensor):
    """The rows of one tensor, and then those of others of the same columns. parts: these tensors, of one type."""

    parts: tuple[StoredTensor, ...]

    @property
    def stored_as(self) -> str:
        return self.parts[0].stored_as

    @property
    def num_bytes(self) -> int:
        return sum(part.num_bytes for part in self.parts)

    def read(self) -> torch.Tensor:
        import torch

        return torch.cat([part.read() for part in self.parts])


@dataclass(frozen=True, slots=True)
class HalvedTensor(StoredTensor):
    """The rows of `heads` heads, of whose first `rotated` rows each those with even numbers come first, then the odd
    ones."""

    stored: StoredTensor
    heads: int
    rotated: int

    def read(self) -> torch.Tensor:
        import torch

        rows = self.stored.read().reshape(self.heads, -1, *self.shape[1:])
        parts = rows[:, : self.rotated : 2], rows[:, 1 : self.rotated : 2], rows[:, self.rotated :]
        return torch.cat(parts, 1).reshape(self.shape)


@dataclass(frozen=True, slots=True)
class GroupTensor(StoredTensor):
    """Rows of a tensor that has `groups` equal groups of them, as `grouped` says."""

    stored: StoredTensor
    groups: int
    parts: tuple[tuple[int, int], ...]

    def read(self) -> torch.Tensor:
        import torch

        rows = self.stored.read().reshape(self.groups, -1, *self.shape[1:])
        return torch.cat([rows[:, start:stop].flatten(0, 1) for start, stop in self.parts])


def grouped(stored: StoredTensor, groups: int, *parts: tuple[int, int]) -> StoredTensor:
    """Returns rows of a tensor that has `groups` equal groups of them. parts: first row in a group, and end. Those of a
    part of all groups come one after the other, then those of the next part. Raises ExportError for other rows."""
    if stored.shape[0] % groups:
        raise ExportError(
            f"{stored.file}: tensor {stored.name!r} has {stored.shape[0]} rows, which are not {groups} equal groups; "
            "download it again"
        )
    shape = (groups * sum(stop - start for start, stop in parts), *stored.shape[1:])
    return GroupTensor(stored.name, stored.file, shape, stored.dtype, stored, groups, parts)


def queries_and_gates(both: StoredTensor, heads: int) -> tuple[int, tuple[int, int], tuple[int, int]]:
    """Returns what `grouped` takes of a tensor whose rows are, head by head, those of a query and those of its gate."""
    rows = both.shape[0] // heads
    return heads, (0, rows // 2), (rows // 2, rows)


def same_values(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors have one shape and hold equal numbers, in types of FLOATS. They are read a part at a time."""
    import torch

    if first.shape != second.shape or not {first.dtype, second.dtype} <= set(FLOATS):
        return False
    rows = max(1, COMPARED // max(1, math.prod(first.shape[1:])))
    return all(
        torch.equal(first.rows(start, start + rows).float(), second.rows(start, start + rows).float())
        for start in range(0, first.shape[0], rows)
    )


def lone_tensor(path: Path, name: str, keys: tuple[str, ...]) -> StoredTensor:
    """Returns the vector in a file that torch.save wrote as one row [1, 1, H]: the file holds it alone, or a dict that
    has it under one of the keys. name: what it is called. torch's weights_only reader runs no code of the file. Raises
    ExportError."""
    import torch

    loaded = _loaded(path)
    if isinstance(loaded, dict):
        loaded = next((loaded[key] for key in keys if key in loaded), None)
    if (
        not isinstance(loaded, torch.Tensor)
        or not loaded.is_floating_point()
        or loaded.numel() not in loaded.shape[-1:]
    ):
        raise ExportError(f"{path} does not hold one vector of numbers; download it again")
    value = loaded.detach().clone().reshape(1, 1, -1)
    dtype = str(value.dtype).removeprefix("torch.")
    return MadeTensor(name, path, tuple(value.shape), DTYPE_NAMES.get(dtype, dtype), value.clone)


def list_pickled(path: Path) -> dict[str, StoredTensor]:
    import torch

    tensors = {}
    for name, tensor in _unpickled(path).items():
        if not isinstance(name, str) or not isinstance(tensor, torch.Tensor):
            raise ExportError(f"{path} holds more than named tensors ({name!r}); save the head as safetensors")
        dtype = str(tensor.dtype).removeprefix("torch.")
        tensors[name] = StoredTensor(name, path, tuple(tensor.shape), DTYPE_NAMES.get(dtype, dtype))
    return tensors


def _unpickled(path: Path) -> dict[str, torch.Tensor]:
    """The tensors of a pickled file, mapped where its format allows it. Raises ExportError."""
    loaded = _loaded(path)
    if not isinstance(loaded, dict):
        raise ExportError(f"{path} holds a {type(loaded).__name__}, not named tensors; save the head as safetensors")
    return loaded


def _loaded(path: Path) -> Any:
    import torch

    try:
        try:
            return torch.load(path, map_location="cpu", weights_only=True, mmap=True)
        except RuntimeError:  # files from before torch 1.6 cannot be mapped
            return torch.load(path, map_location="cpu", weights_only=True)
    except Exception:  # the unpickler raises many kinds, some of which advise to run the file's code
        raise ExportError(
            f"{path} is damaged, or holds more than tensors, which is not read; download it again or give safetensors"
        ) from None


def list_file(path: Path) -> dict[str, StoredTensor]:
    if not path.is_file():
        raise ExportError(f"{path} is missing; the download is incomplete")
    if is_pointer(path):
        raise ExportError(f"{path} {STANDS_FOR}")
    try:
        with safe_open(path, framework="np") as file:
            names = list(file.keys())  # checked by the library: sizes, types, and that tensors do not overlap
        with path.open("rb") as file:
            size = int.from_bytes(file.read(8), "little")
            header = json.loads(file.read(size))
        entries = {name: header[name] for name in names}
        return {
            name: SafeTensor(name, path, tuple(each["shape"]), each["dtype"], 8 + size + each["data_offsets"][0])
            for name, each in entries.items()
        }
    except (SafetensorError, OSError) as error:
        raise ExportError(f"{path} is damaged or cut short ({error}); download it again") from None
