"""A Hugging Face folder: its config and its weights, opened strictly and read one tensor at a time."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from safetensors import SafetensorError, safe_open

from eagle_export.base.errors import ExportError
from eagle_runtime.base.files import STANDS_FOR, TEXT_BYTES, is_pointer
from eagle_runtime.base.files import read_json as read_json_file
from eagle_runtime.text.tokenizer import Text

if TYPE_CHECKING:
    import torch  # imported where tensors are read: headers are read without it

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"  # of PEFT
PYTORCH = "pytorch_model.bin"
# Names that Medusa's and Hydra's authors give to files of heads.
HEAD_FILES = ("medusa_lm_head.safetensors", "hydra_lm_head.safetensors")
PICKLED_FILES = (PYTORCH, "medusa_lm_head.pt", "hydra_lm_head.pt")
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # for chats with tools
TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", TOOL_TEMPLATE, "generation_config.json",
)  # fmt: skip
MASK_FILE = "mask_embedding.pt"  # of a block head
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"  # of a target
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
        return ShiftedTensor(self.name, self.file, self.shape, self.dtype, self, offset)


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
class LoneTensor(StoredTensor):
    """The one tensor of a pickled file, which was read already. value: as one row [1, 1, H]."""

    value: torch.Tensor

    def read(self) -> torch.Tensor:
        """Returns the tensor."""
        return self.value.clone()


@dataclass(frozen=True, slots=True)
class ShiftedTensor(StoredTensor):
    """A stored tensor plus a number, in fp32."""

    stored: StoredTensor
    offset: float

    def read(self) -> torch.Tensor:
        """Reads the tensor and adds the number."""
        return self.stored.read().float() + self.offset


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A Hugging Face folder, or a GGUF file. config: content of config.json. tensors: by name. texts: name -> content
    of a tokenizer's files that were made of a GGUF file; None for a folder, which has them. notes: what was decided
    where its parts contradict each other (reconcile.py), a sentence each."""

    folder: Path
    config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    texts: Mapping[str, bytes] | None = None
    notes: tuple[str, ...] = ()

    def text(self) -> Text:
        """Returns its tokenizer. Raises BundleError."""
        return Text(self.folder, None if self.texts is None else self.texts.get)

    def require(self, name: str, shape: tuple[int | None, ...], *, stated: bool = False) -> StoredTensor:
        """Returns the tensor of that name. Raises ExportError if it is missing or has another shape (None: any size but
        0). stated: whether the shape is what its own config states."""
        if name not in self.tensors:
            raise ExportError(
                f"{self.folder}: tensor {name!r} is missing; the checkpoint is incomplete or of another kind"
            )
        stored = self.tensors[name].shape
        if len(stored) != len(shape) or any(
            want not in (None, have) or have == 0 for want, have in zip(shape, stored, strict=True)
        ):
            wanted = ", ".join("any" if size is None else str(size) for size in shape)
            needs = "this pair needs", "check that target and head belong together"
            if stated:
                needs = "config.json asks for", "config and weights do not belong together; correct the sizes there"
            raise ExportError(
                f"{self.folder}: tensor {name!r} has shape {list(stored)}, but {needs[0]} [{wanted}]; {needs[1]}"
            )
        return self.tensors[name]

    def integer(self, key: str, default: int | None = None) -> int:
        """Returns a positive whole number of the config. Raises ExportError for anything else."""
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) is not int or value < 1:
            raise ExportError(f"{self.folder / 'config.json'}: {key} is {value!r}, but must be a positive whole number")
        return value

    def number(self, key: str, default: float) -> float:
        """Returns a number of the config, 0 or more. Raises ExportError for anything else."""
        value = self.config.get(key)
        value = default if value is None else value
        if type(value) not in (int, float) or not 0 <= value < math.inf:
            raise ExportError(f"{self.folder / 'config.json'}: {key} is {value!r}, but must be a number, 0 or more")
        return float(value)


def same_values(first: StoredTensor, second: StoredTensor) -> bool:
    """Whether two tensors of one shape hold equal numbers. They are read a part at a time."""
    import torch

    rows = max(1, COMPARED // max(1, math.prod(first.shape[1:])))
    return all(
        torch.equal(first.rows(start, start + rows).float(), second.rows(start, start + rows).float())
        for start in range(0, first.shape[0], rows)
    )


def open_checkpoint(folder: Path, *, pickled: bool = False) -> Checkpoint:
    """Opens a folder with config.json and model.safetensors, in one file or in shards. Raises ExportError.

    pickled: whether one of PICKLED_FILES is read where there is no safetensors file, as old heads have it. torch's
    weights_only reader takes tensors and plain containers from it and runs no code that it names."""
    if not folder.is_dir():
        raise ExportError(
            f"{folder} is not a folder; give a downloaded Hugging Face model folder, or a target's .gguf file"
        )
    config = read_json(folder / "config.json")
    if pickled and (file := pickled_weights(folder)) is not None:
        return Checkpoint(folder, config, _list_pickled(file))
    return Checkpoint(folder, config, _index_tensors(folder))


def pickled_weights(folder: Path) -> Path | None:
    """Returns the file of pickled weights of a folder that has no safetensors file; None if there is none."""
    files = (folder / name for name in PICKLED_FILES)
    return None if any(folder.glob("*.safetensors")) else next((file for file in files if file.is_file()), None)


def read_json(path: Path) -> dict[str, Any]:
    """Reads a JSON object from a file. Raises ExportError."""
    missing = "give a complete Hugging Face model folder"
    return read_json_file(path, TEXT_BYTES["tokenizer.json"], ExportError, "download it again", missing)


def _index_tensors(folder: Path) -> dict[str, StoredTensor]:
    single, index = folder / SINGLE, folder / INDEX
    heads = [file for name in HEAD_FILES if (file := folder / name).is_file()]
    if single.is_file():
        files = [single]
    elif index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict) or not weight_map:
            raise ExportError(f"{index} has no weight_map; download it again")
        if wrong := [name for name in weight_map.values() if not isinstance(name, str)]:
            raise ExportError(f"{index} names {wrong[0]!r}, which is not a file name; download it again")
        files = [folder / name for name in sorted(set(weight_map.values()))]
    elif heads:
        files = heads[:1]
    elif (folder / ADAPTER).is_file():
        raise ExportError(
            f"{folder} holds an adapter without its model; merge it into the model (PEFT: merge_and_unload(), then "
            "save_pretrained) and export that"
        )
    elif files := sorted(folder.glob("*.gguf")):
        raise ExportError(f"{folder} holds GGUF files; give the file itself, such as {files[0]}")
    elif any(folder.glob("*.bin")):
        raise ExportError(
            f"{folder} holds pickled weights (*.bin), which are not opened; save the model as safetensors first"
        )
    else:
        raise ExportError(f"{single} is missing; give a complete Hugging Face model folder")
    tensors = {}
    for file in files:
        if file.parent != folder:
            raise ExportError(f"{index} names {file}, which leaves the folder; download it again")
        tensors.update(_list_file(file))
    return tensors


def lone_tensor(path: Path, name: str, keys: tuple[str, ...]) -> LoneTensor:
    """Reads a vector [H] from a file that torch.save wrote: the vector alone, or a dict that has it under one of the
    keys. name: what it is called. torch's weights_only reader runs no code of the file. Raises ExportError."""
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
    return LoneTensor(name, path, tuple(value.shape), DTYPE_NAMES.get(dtype, dtype), value)


def _list_pickled(path: Path) -> dict[str, StoredTensor]:
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


def _listed(name: str, path: Path, entry: Mapping[str, Any], data: int) -> SafeTensor:
    """Returns a tensor as the header of a safetensors file lists it. data: where the file's values begin."""
    return SafeTensor(name, path, tuple(entry["shape"]), entry["dtype"], data + entry["data_offsets"][0])


def _list_file(path: Path) -> dict[str, StoredTensor]:
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
        return {name: _listed(name, path, header[name], 8 + size) for name in names}
    except (SafetensorError, OSError) as error:
        raise ExportError(f"{path} is damaged or cut short ({error}); download it again") from None
