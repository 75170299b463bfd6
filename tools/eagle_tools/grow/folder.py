"""Writes a Hugging Face folder: config.json and safetensors files of limited size."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_tools.grow.shape import GrowError

NamedTensors = Iterator[tuple[str, Tensor]]
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SHARD_BYTES = 1 << 30  # default maximum size of a file


def write_folder(
    folder: Path, config: dict[str, Any], tensors: NamedTensors, dtype: torch.dtype, shard_bytes: int
) -> None:
    """Write config.json, the tensors in files of at most shard_bytes, and the index. Integers keep their type."""
    folder.mkdir(parents=True)
    config = {key: value for key, value in config.items() if key != "torch_dtype"}
    config["dtype"] = str(dtype).removeprefix("torch.")
    write_json(folder / "config.json", config)
    files: list[list[str]] = []
    total = 0
    for shard in sharded(tensors, dtype, shard_bytes):
        save_file(shard, folder / f"shard-{len(files)}", metadata={"format": "pt"})
        files.append(list(shard))
        total += sum(num_bytes(tensor) for tensor in shard.values())
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (folder / f"shard-{number}").rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    write_json(folder / "model.safetensors.index.json", index)


def sharded(tensors: NamedTensors, dtype: torch.dtype, shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yields the converted tensors in groups of at most shard_bytes. Raises GrowError for values out of range."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        stored = (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        del tensor  # else it would stay in memory while the next one is made
        if stored.is_floating_point() and not bool(torch.isfinite(torch.stack(torch.aminmax(stored))).all()):
            raise GrowError(f"tensor {name!r} is beyond the range of {dtype}; write fp32")
        if shard and sum(map(num_bytes, shard.values())) + num_bytes(stored) > shard_bytes:
            yield shard
            shard.clear()
        shard[name] = stored
    yield shard


def num_bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def write_json(path: Path, data: dict[str, Any]) -> None:
    path.write_text(json.dumps(data, indent=2) + "\n", encoding="utf-8")
