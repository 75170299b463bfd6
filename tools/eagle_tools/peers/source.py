"""The source of a comparison, whose weights are converted to other formats: a Hugging Face folder of a Llama, or a GGUF
file of any model that llama.cpp runs."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import LM_HEAD
from eagle_export.reading.gguf.file import read_gguf
from eagle_export.reading.stored_tensors import StoredTensor, list_file
from eagle_runtime.base.errors import RequestError
from eagle_runtime.base.files import file_sha256, read_json

LARGEST_CONFIG = 1 << 20  # bytes
ROPES = ("default", "llama3")


@dataclass(frozen=True, slots=True)
class Source:
    """A checked folder or GGUF file. config: config.json; of a file the vocabulary's size alone. files: the weights."""

    folder: Path
    config: dict[str, Any]
    files: tuple[Path, ...]

    @property
    def is_gguf(self) -> bool:
        """Whether it is a GGUF file, which only llama.cpp converts."""
        return self.files == (self.folder,)

    @property
    def rope(self) -> dict[str, Any]:
        """The parameters of the rotary embedding under transformers' names, of both forms that configs have."""
        old = {"rope_theta": self.config.get("rope_theta", 10000.0), **(self.config.get("rope_scaling") or {})}
        rope = {**old, **(self.config.get("rope_parameters") or {})}
        return {**rope, "rope_type": rope.get("rope_type", rope.get("type", "default"))}

    @property
    def head_dim(self) -> int:
        return int(self.config.get("head_dim") or self.config["hidden_size"] // self.config["num_attention_heads"])

    @property
    def kv_heads(self) -> int:
        return int(self.config.get("num_key_value_heads") or self.config["num_attention_heads"])

    def tensors(self) -> list[StoredTensor]:
        """Returns the tensors of a folder, without a second copy of tied tables."""
        tied = self.config.get("tie_word_embeddings", False)
        stored = (each for path in self.files for each in list_file(path).values())
        return [each for each in stored if not (tied and each.name == LM_HEAD)]

    def num_weights(self) -> int:
        """Returns the number of weights; tied tables count once."""
        every = read_gguf(self.folder).tensors.values() if self.is_gguf else self.tensors()
        return sum(math.prod(each.shape) for each in every)

    def digest(self) -> str:
        """Returns a sum of the configuration and the weights, 24 hexadecimal digits."""
        sums = [json.dumps(self.config, sort_keys=True), *(file_sha256(path) for path in self.files)]
        return hashlib.sha256("\n".join(sums).encode()).hexdigest()[:24]


def open_source(folder: Path) -> Source:
    """Returns the source in a folder, or a GGUF file. Raises RequestError for a folder of a model that is not a Llama,
    or one whose parts the conversions do not know."""
    if folder.is_file():
        try:
            tokens = read_gguf(folder).metadata.get("tokenizer.ggml.tokens")
        except ExportError as error:
            raise RequestError(str(error)) from None
        if not tokens:
            raise RequestError(f"{folder} has no tokens; give the file that the bundles were made from")
        return Source(folder, {"vocab_size": len(tokens)}, (folder,))
    advice = "give the Hugging Face folder that the bundles were made from"
    config = read_json(
        folder / "config.json", LARGEST_CONFIG, RequestError, advice, f"{folder} has no config.json; {advice}"
    )
    kind = config.get("model_type")
    if kind != "llama":
        raise RequestError(
            f"{folder} holds a model of type {kind!r}; peers are compared on models of type 'llama' only"
        )
    files = tuple(sorted(folder.glob("*.safetensors")))
    if not files:
        raise RequestError(f"{folder} has no .safetensors file; {advice}")
    source = Source(folder, config, files)
    rope = source.rope["rope_type"]
    wrong = [name for name in ("attention_bias", "mlp_bias") if config.get(name)]
    wrong += [f"rope_type {rope}"] if rope not in ROPES else []
    wrong += ["quantization_config"] if config.get("quantization_config") else []
    if wrong:
        raise RequestError(f"{folder}: peers are not converted from a model with {wrong[0]}; give a plain Llama")
    return source
