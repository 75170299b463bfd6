"""Writes a hardened pair as Hugging Face folders in fp32."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from eagle_export.graphs.pair import Pair
from eagle_export.reading.checkpoint import LM_HEAD
from eagle_tools.harden.strength import HardenError
from eagle_tools.harden.weights import Tensors, Weights, head_part

COPIED_FILES = ["tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja", "generation_config.json"]


def write_pair(pairs: list[Pair], out: Path, sizes: dict[str, Any], ratio: float, weights: Weights) -> None:
    """Write out/target and the heads' folders.

    pairs: the source, once per head, or once without a head. sizes: entries of config.json that are new in all folders.
    ratio: factor of the norms' epsilon."""
    source = pairs[0].target
    config = {
        **source.config,
        **sizes,
        "head_dim": pairs[0].head_dim,
        "tie_word_embeddings": LM_HEAD not in weights.target,
    }
    config["rms_norm_eps"] = float(pairs[0].config.rms_norm_eps) * ratio
    write_folder(out / "target", config, weights.target)
    for name in COPIED_FILES:
        if (source.folder / name).is_file():
            shutil.copyfile(source.folder / name, out / "target" / name)
    for pair in pairs:
        if pair.head is None:
            continue
        head = head_part(pair)
        config = {**head.checkpoint.config, **sizes, "head_dim": head.config.head_dim}
        if "intermediate_size" in sizes:
            config["intermediate_size"] = head.config.intermediate_size  # heads' MLPs keep their units
        config["rms_norm_eps"] = head.config.rms_norm_eps * ratio
        stored = head.checkpoint.tensors
        vocabulary_map = {name: stored[name].read() for name in ("d2t", "t2d") if name in stored}
        write_folder(out / head.config.kind, config, weights.heads[head.config.kind] | vocabulary_map)


def write_folder(folder: Path, config: dict[str, Any], tensors: Tensors) -> None:
    """Write config.json and the tensors in fp32. Integers keep their type."""
    folder.mkdir(parents=True)
    config = {key: value for key, value in config.items() if key != "torch_dtype"} | {"dtype": "float32"}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    stored = {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}
    stored = {name: tensor.contiguous() for name, tensor in stored.items()}
    save_file(stored, folder / "model.safetensors", metadata={"format": "pt"})


def write_tokenizer(source: Path, folder: Path, first: int | None) -> None:
    """Write the source's tokenizer.json, if there is one, to the folder. It puts the token `first`, if any, before
    every text, unless it has a post-processor already. Raises HardenError."""
    if not (source / "tokenizer.json").is_file():
        return
    tokenizer = json.loads((source / "tokenizer.json").read_text(encoding="utf-8"))
    if first is not None and tokenizer.get("post_processor") is None:
        tokenizer["post_processor"] = _begins_with(tokenizer, first)
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")


def _begins_with(tokenizer: dict[str, Any], first: int) -> dict[str, Any]:
    """The post-processor, as tokenizer.json describes it, that puts the token before a text."""
    names = [token["content"] for token in tokenizer.get("added_tokens", []) if token["id"] == first]
    if not names:
        raise HardenError(
            f"tokenizer.json has no added token of id {first}, which begins texts; harden without the sink"
        )
    start = {"SpecialToken": {"id": names[0], "type_id": 0}}
    text, second = ({"Sequence": {"id": name, "type_id": 0}} for name in "AB")
    return {
        "type": "TemplateProcessing",
        "single": [start, text],
        "pair": [start, text, second],
        "special_tokens": {names[0]: {"id": names[0], "ids": [first], "tokens": [names[0]]}},
    }
