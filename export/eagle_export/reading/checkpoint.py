"""A Hugging Face folder: its config and its weights, opened strictly and read one tensor at a time."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_export.base.errors import ExportError
from eagle_export.reading.stored_tensors import StoredTensor, list_file, list_pickled
from eagle_runtime.base.files import MANIFEST_NAME, TEXT_BYTES
from eagle_runtime.base.files import read_json as read_json_file

SINGLE, INDEX = "model.safetensors", "model.safetensors.index.json"
ADAPTER = "adapter_config.json"  # of PEFT
PYTORCH = "pytorch_model.bin"
# Names that Medusa's and Hydra's authors give to files of heads.
HEAD_FILES = ("medusa_lm_head.safetensors", "hydra_lm_head.safetensors")
PICKLED_FILES = (PYTORCH, "medusa_lm_head.pt", "hydra_lm_head.pt")
TOOL_TEMPLATE = "additional_chat_templates/tool_use.jinja"  # for chats with tools
PROCESSOR_TEMPLATE = "chat_template.json"  # of models that read images too, beside a tokenizer without a template
TEXT_FILES = (
    "tokenizer.json", "tokenizer_config.json", "chat_template.jinja", TOOL_TEMPLATE, "generation_config.json",
)  # fmt: skip
MASK_FILE = "mask_embedding.pt"  # of a block head
EMBEDDING, LM_HEAD = "model.embed_tokens.weight", "lm_head.weight"  # of a target
LAYERS_TABLE = "model.embed_tokens_per_layer.weight"  # Gemma-4's: what a token gives to each layer


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

    @property
    def architectures(self) -> list[str]:
        """The classes that its config names."""
        named = self.config.get("architectures")
        return [name for name in named if isinstance(name, str)] if isinstance(named, list) else []

    @property
    def numbers(self) -> int:
        """How many numbers its tensors hold."""
        return sum(math.prod(tensor.shape) for tensor in self.tensors.values())

    @property
    def numbers_of_types(self) -> Counter[str]:
        """How many numbers are stored in each type."""
        numbers = Counter[str]()
        for tensor in self.tensors.values():
            numbers[tensor.stored_as] += math.prod(tensor.shape)
        return numbers

    def active(self, experts: tuple[int, int] | None) -> int:
        """Returns how many numbers one row needs. experts: of a layer, and those that a row chooses."""
        count, chosen = experts or (1, 1)
        return sum(
            math.prod(each.shape) * chosen // count if ".experts." in name else math.prod(each.shape)
            for name, each in self.tensors.items()
        )

    @property
    def lm_head(self) -> StoredTensor:
        """A target's LM head, which may be its embedding."""
        return self.tensors.get(LM_HEAD) or self.tensors[EMBEDDING]

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


def is_gguf(path: Path) -> bool:
    """Whether a path is that of a GGUF file: by its ending, or by its first bytes, as programs that keep files under
    other names have them."""
    if path.suffix == ".gguf":
        return not path.is_dir()
    if not path.is_file():
        return False
    try:
        with path.open("rb") as file:
            return file.read(4) == b"GGUF"
    except OSError:
        return False


def is_gain(name: str) -> bool:
    """Whether a tensor is a gain to which some families add a number: a norm's, but not that of a delta net."""
    return name.endswith("norm.weight") and ".linear_attn." not in name


def is_table(name: str) -> bool:
    """Whether a tensor is a table of rotations, which old checkpoints hold. They are computed from the config."""
    return name.endswith("rotary_emb.inv_freq")


def open_checkpoint(folder: Path, *, pickled: bool = False) -> Checkpoint:
    """Opens a folder with config.json and model.safetensors, in one file or in shards. Raises ExportError.

    pickled: whether one of PICKLED_FILES is read where there is no safetensors file, as old heads have it. torch's
    weights_only reader takes tensors and plain containers from it and runs no code that it names."""
    if is_gguf(folder) and folder.is_file():
        raise ExportError(f"{folder} is a GGUF file, which only a target may be; give a Hugging Face model folder")
    if not folder.is_dir():
        raise ExportError(
            f"{folder} is not a folder; give a downloaded Hugging Face model folder, or a target's GGUF file"
        )
    if not (folder / "config.json").is_file() and (other := other_content(folder, _files_of(folder))) is not None:
        raise ExportError(other)
    config = read_json(folder / "config.json")
    if pickled and (file := pickled_weights(folder)) is not None:
        return Checkpoint(folder, config, list_pickled(file))
    return Checkpoint(folder, config, _index_tensors(folder))


def other_content(where: object, files: Collection[str]) -> str | None:
    """What a folder or a model of the hub that is no checkpoint holds instead, in a sentence for an error; None if
    nothing that is known. files: paths within it."""
    if ADAPTER in files:
        return (
            f"{where} holds an adapter without its model; merge it into the model (PEFT: merge_and_unload(), then "
            "save_pretrained) and export that"
        )
    top = sorted(each for each in files if "/" not in each)
    if gguf := [each for each in top if each.endswith(".gguf")]:
        return f"{where} holds GGUF files; give the file itself, such as {Path(str(where)) / gguf[0]}"
    if any(each.endswith((".bin", ".pth")) for each in top):
        return f"{where} holds pickled weights (*.bin, *.pth), which are not read; save the model as safetensors first"
    if MANIFEST_NAME in files:
        return f"{where} is a finished bundle; eagle-run and the other commands take it as it is"
    if any(each.endswith(".onnx") for each in files):  # a hub repository has them in onnx/
        return f"{where} holds ONNX graphs of another program; give the model that they were made from"
    return None


def _files_of(folder: Path) -> list[str]:
    """The files of a folder and of those in it."""
    return [each.relative_to(folder).as_posix() for each in (*folder.glob("*"), *folder.glob("*/*"))]


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
    else:
        missing = f"{single} is missing; give a complete Hugging Face model folder"
        raise ExportError(other_content(folder, _files_of(folder)) or missing)
    tensors = {}
    for file in files:
        if file.parent != folder:
            raise ExportError(f"{index} names {file}, which leaves the folder; download it again")
        tensors.update(list_file(file))
    return tensors
