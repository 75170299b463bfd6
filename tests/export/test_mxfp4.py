"""Experts of gpt-oss in MXFP4: their numbers are those that transformers reads, and what does not fit is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.graphs.pair import open_pair
from eagle_export.reading.families.source import load_source
from eagle_export.reading.families.target import open_target
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from insides import bundle_in
from tiny_families import TINY_YARN, Row, save_source

WIDTHS = {"hidden_size": 64, "intermediate_size": 96, "head_dim": 16, "num_hidden_layers": 2, "sliding_window": 12}
ROW = Row("gpt_oss", {"num_local_experts": 4, "num_experts_per_tok": 2, **WIDTHS, **TINY_YARN})
EXPERTS = "model.layers.{}.mlp.experts.{}_proj"


@pytest.fixture(scope="module")
def packed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with random numbers in MXFP4, by the names and in the shapes of the published ones."""
    folder = tmp_path_factory.mktemp("mxfp4") / "source"
    save_source(ROW, folder)
    tensors, rng = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(3)
    for layer in range(2):
        for part in ("gate_up", "down"):
            name = EXPERTS.format(layer, part)
            count, inputs, columns = tensors.pop(name).shape
            shape = count, columns, inputs // 32
            tensors[f"{name}_blocks"] = torch.randint(0, 256, (*shape, 16), dtype=torch.uint8, generator=rng)
            tensors[f"{name}_scales"] = torch.randint(121, 126, shape, dtype=torch.uint8, generator=rng)
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    packing = {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]}
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": packing}))
    return folder


def test_numbers_are_those_that_transformers_reads(packed: Path) -> None:
    """To the bit, in each expert's matrices and in the model that transformers makes of them."""
    stored, checkpoint = load_file(packed / "model.safetensors"), open_target(packed)
    parts = dict(load_source(packed).named_parameters())
    for layer in range(2):
        for part, matrices in (("gate_up", ("gate_proj", "up_proj")), ("down", ("down_proj",))):
            name = EXPERTS.format(layer, part)
            theirs = convert_moe_packed_tensors(stored[f"{name}_blocks"], stored[f"{name}_scales"])
            assert torch.equal(parts[name], theirs.float())
            for number in range(4):
                for start, matrix in enumerate(matrices):
                    own = checkpoint.tensors[f"model.layers.{layer}.mlp.experts.{number}.{matrix}.weight"]
                    assert torch.equal(own.read(), theirs[number].T[start :: len(matrices)])
                    assert own.stored_as == "MXFP4" and own.num_bytes * 32 == 17 * own.read().numel()


@torch.no_grad()
def test_a_bundle_computes_what_transformers_does(packed: Path, tmp_path: Path) -> None:
    text = np.random.default_rng(1).integers(0, 64, 90).tolist()
    expected = load_source(packed)(torch.tensor([text])).logits[0].numpy()
    export(packed, None, tmp_path / "bundle", Settings(certify=False))
    with EagleModel.load(tmp_path / "bundle") as model:
        logits = np.concatenate(list(bundle_in(model).target.score(text)))
    np.testing.assert_allclose(logits, expected, atol=1e-4)


def without_scales(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    del tensors[EXPERTS.format(1, "down") + "_scales"]


def cut_blocks(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    name = EXPERTS.format(0, "gate_up") + "_blocks"
    tensors[name] = tensors[name][..., :8].contiguous()


def odd_columns(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    for kind in ("_blocks", "_scales"):
        name = EXPERTS.format(0, "gate_up") + kind
        tensors[name] = tensors[name][:, 1:].contiguous()


def another_method(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["quantization_config"] = {"quant_method": "fp8"}


def fewer_experts(tensors: dict[str, Any], config: dict[str, Any]) -> None:
    config["num_local_experts"] = 3


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (without_scales, r"down_proj_blocks' has shape \[4, 64, 3, 16\], which no experts of gpt-oss have"),
        (cut_blocks, r"gate_up_proj_blocks' has shape \[4, 192, 2, 8\], which no experts"),
        (odd_columns, r"gate_up_proj_blocks' has shape \[4, 191, 2, 16\], which no experts"),
        (another_method, "the weights are quantised already"),
        (fewer_experts, "is not used by this kind of model"),
    ],
)
def test_what_does_not_fit_is_refused(
    packed: Path, tmp_path: Path, change: Callable[[dict[str, Any], dict[str, Any]], None], said: str
) -> None:
    tensors = load_file(packed / "model.safetensors")
    config = json.loads((packed / "config.json").read_text(encoding="utf-8"))
    change(tensors, config)
    (tmp_path / "source").mkdir()
    save_file(tensors, tmp_path / "source/model.safetensors", {"format": "pt"})
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    with pytest.raises(ExportError, match=said):
        export(tmp_path / "source", None, tmp_path / "bundle", Settings(certify=False))
    assert not (tmp_path / "bundle").exists()


def test_bytes_of_a_cache_cannot_hold_sinks(packed: Path, tmp_path: Path) -> None:
    config = json.loads((packed / "config.json").read_text(encoding="utf-8"))
    config["layer_types"] = ["full_attention"] * 2
    (tmp_path / "source").mkdir()
    (tmp_path / "source/config.json").write_text(json.dumps(config))
    (tmp_path / "source/model.safetensors").symlink_to(packed / "model.safetensors")
    assert open_pair(tmp_path / "source", None).has_sinks
    with pytest.raises(ExportError, match="attention with sinks, which an int8 cache cannot have"):
        export(tmp_path / "source", None, tmp_path / "out", Settings(precision="int8", cache_precision="int8"))
