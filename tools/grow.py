"""Grow a small pair to the size of a real model: the same outputs at the cost of a large one, for timing.

    python tools/grow.py TARGET EAGLE1_HEAD EAGLE3_HEAD BLOCK_HEAD -o OUT --layers 16 --hidden 2048 --heads 32 \\
        --kv-heads 8 --head-dim 64 --intermediate 8192 --vocab 128256 --draft-vocab 32000

writes OUT/target, OUT/eagle1, OUT/eagle3 and OUT/block: Hugging Face folders of the given shape whose logits equal the
small pair's up to rounding. Each step preserves the function, in the manner of Net2Net (arXiv 1511.05641):

    wider     Every coordinate, attention head and MLP unit is copied until the width is filled. A matrix that writes a
              vector writes every copy; a matrix that reads it gives each copy a share of the weight. The shares are
              powers of two, so that fp16 represents the grown weights as exactly as the small ones.
    head_dim  Rotary pair i of d moves to pair i * D / d of D, which rotates at the same speed. The pairs between are
              silent: their keys are 0 and their queries random.
    deeper    Inserted layers have random weights in adjacent equal pairs, read with opposite signs: they cost as much
              as any layer and add nothing. They are placed so that a head's taps read the same states as before.
    tokens    The residual stream reserves the last 128 coordinates (one, if there are not as many) for a constant, from
              which the rows of added tokens read a logit far below all others. The constant replaces a part of the
              norms' epsilon.

No weight or operation is left out, and but for the reserved coordinates almost no weight is zero. The LM head is stored
on its own even if the small target's is tied to the embedding. Needs memory for one tensor and one file of the output.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from eagle_export.graphs.pair import open_pair
from eagle_export.heads.kinds import KINDS
from eagle_runtime.base.errors import EagleError
from eagle_tools.grow.axes import grow_stream, grown_taps, head_layer, target_layer
from eagle_tools.grow.shape import GROWN, GrowError, Shape, check_shape, head_of
from eagle_tools.grow.tensors import NamedTensors, head_tensors, target_tensors

DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
SHARD_BYTES = 1 << 30  # default maximum size of a file
COPIED_FILES = ["tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"]
COPIED_FILES += ["generation_config.json"]


def main(argv: list[str] | None = None) -> int:
    """Entry point; returns the exit status: 0, or 2 after an error in the input."""
    parser = argparse.ArgumentParser(prog="grow.py", description=(__doc__ or "").splitlines()[0])
    parser.add_argument("target", type=Path, help="folder of the small target")
    parser.add_argument("heads", type=Path, nargs="+", help="folders of its heads, at most one of each kind")
    parser.add_argument("-o", "--out", type=Path, required=True, help="folder to write")
    for field in fields(Shape):
        size = {"default": 0} if field.name.endswith("vocab") else {"required": True}
        parser.add_argument(f"--{field.name.replace('_', '-')}", dest=f"shape_{field.name}", type=int, **size)
    parser.add_argument("--dtype", choices=sorted(DTYPES), default="fp16", help="default: %(default)s")
    args = parser.parse_args(argv)
    shape = Shape(**{field.name: getattr(args, f"shape_{field.name}") for field in fields(Shape)})
    try:
        grow(args.target, args.heads, args.out, shape, args.dtype)
    except EagleError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


def grow(
    target: Path, heads: list[Path], out: Path, shape: Shape, dtype: str = "fp16", shard_bytes: int = SHARD_BYTES
) -> None:
    """Write the grown target to out/target and each head to a folder named after its kind. Raises EagleError.

    dtype: one of DTYPES. shard_bytes: maximum size of a file; a larger tensor gets a file of its own."""
    pairs = [open_pair(target, head) for head in heads]
    if pairs[0].family.model_type != "llama":
        raise GrowError(f"{target} is a {pairs[0].family.name} model, but only 'llama' targets can be grown")
    kinds = [head_of(pair).config.kind for pair in pairs]
    if others := [kind for kind in kinds if kind not in GROWN]:
        raise GrowError(
            f"{heads[kinds.index(others[0])]} is of kind {KINDS[others[0]].title!r}, but only EAGLE and block heads "
            "are grown"
        )
    if len(set(kinds)) < len(kinds):
        raise GrowError(f"two of the heads are {max(kinds, key=kinds.count)} heads; give one of a kind")
    for name in ("target", *kinds):
        if (out / name).exists():
            raise GrowError(f"{out / name} exists; choose another folder or remove it")
    check_shape(pairs, shape)
    target_layer(pairs[0], shape)  # computed again for the tensors; here for its checks, before anything is written
    for pair in pairs:
        head_layer(pair, shape)
    stream = grow_stream(pairs, shape)
    config = dict(pairs[0].target.config) | {
        **shape.config(),
        "vocab_size": shape.vocab or int(pairs[0].config.vocab_size),
        "num_hidden_layers": shape.layers,
        "rms_norm_eps": stream.epsilon(float(pairs[0].config.rms_norm_eps)),
        "tie_word_embeddings": False,
    }
    write_folder(out / "target", config, target_tensors(pairs[0], shape, stream), DTYPES[dtype], shard_bytes)
    for name in COPIED_FILES:
        if (target / name).is_file():
            shutil.copyfile(target / name, out / "target" / name)
    for pair in pairs:
        head = head_of(pair).config
        config = dict(head_of(pair).checkpoint.config) | {
            **shape.config(),
            "vocab_size": shape.vocab or head.vocab_size,
            "rms_norm_eps": stream.epsilon(head.rms_norm_eps),
        }
        if not head.borrows:
            config["draft_vocab_size"] = shape.draft_vocab or head.draft_vocab_size
        if GROWN[head.kind].names_taps:
            layers = int(pairs[0].config.num_hidden_layers)
            config |= {"target_hidden_size": shape.hidden, "num_target_layers": shape.layers}
            config["target_layer_ids"] = [tap - 1 for tap in grown_taps(head.taps, layers, shape.layers)]
        write_folder(out / head.kind, config, head_tensors(pair, shape, stream), DTYPES[dtype], shard_bytes)


def write_folder(
    folder: Path, config: dict[str, Any], tensors: NamedTensors, dtype: torch.dtype, shard_bytes: int
) -> None:
    """Write config.json, the tensors in files of at most shard_bytes, and the index. Integers keep their type."""
    folder.mkdir(parents=True)
    config = {key: value for key, value in config.items() if key != "torch_dtype"}
    config["dtype"] = str(dtype).removeprefix("torch.")
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    files: list[list[str]] = []
    total = 0
    for shard in sharded(tensors, dtype, shard_bytes):
        save_file(shard, folder / f"shard-{len(files)}", metadata={"format": "pt"})
        files.append(list(shard))
        total += sum(tensor.nbytes for tensor in shard.values())
    weight_map: dict[str, str] = {}
    for number, names in enumerate(files):
        name = f"model-{number + 1:05}-of-{len(files):05}.safetensors"
        (folder / f"shard-{number}").rename(folder / name)
        weight_map |= dict.fromkeys(names, name)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    text = json.dumps(index, indent=2) + "\n"
    (folder / "model.safetensors.index.json").write_text(text, encoding="utf-8")


def sharded(tensors: NamedTensors, dtype: torch.dtype, shard_bytes: int) -> Iterator[dict[str, Tensor]]:
    """Yields the converted tensors in groups of at most shard_bytes. Raises GrowError for values out of range."""
    shard: dict[str, Tensor] = {}
    for name, tensor in tensors:
        stored = (tensor.to(dtype) if tensor.is_floating_point() else tensor).contiguous()
        del tensor  # else it would stay in memory while the next one is made
        if stored.is_floating_point() and not bool(torch.isfinite(torch.stack(torch.aminmax(stored))).all()):
            raise GrowError(f"tensor {name!r} is beyond the range of {dtype}; write fp32")
        if shard and sum(other.nbytes for other in shard.values()) + stored.nbytes > shard_bytes:
            yield shard
            shard.clear()
        shard[name] = stored
    yield shard


if __name__ == "__main__":
    sys.exit(main())
