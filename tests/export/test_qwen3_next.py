"""Qwen3-Next in checkpoints as they are published, and in GGUF files: Qwen3.5's model of other tensors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Qwen3NextConfig, Qwen3NextForCausalLM

from eagle_export.base.errors import ExportError
from eagle_export.graphs.pair import open_pair, weight_sources
from eagle_export.reading.families.source import load_source
from gguf_writer import write_gguf
from tiny_families import CONTEXT, EXPERTS, HIDDEN, NETS, VOCAB

# Keys of config.json of Qwen/Qwen3-Next-80B-A3B-Instruct and Qwen/Qwen3-Coder-Next; the kinds of layers are not stated.
CONFIG = {
    **{key: value for key, value in NETS.items() if key != "layer_types"}, **EXPERTS,
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": CONTEXT, "initializer_range": 0.15,
    "moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
STATED: dict[str, Any] = {
    "full_attention_interval": 4, "partial_rotary_factor": 0.25, "rope_theta": 10000000, "rope_scaling": None,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True,
}  # fmt: skip
IDS = torch.tensor([[5, 7, 20, 33, 7, 5, 9, 41]])


@pytest.fixture(scope="module")
def model() -> Any:
    torch.manual_seed(7)
    model = Qwen3NextForCausalLM(Qwen3NextConfig(**CONFIG, rope_theta=10000000)).eval()
    for name, parameter in model.named_parameters():
        if name.endswith(("norm.weight", "dt_bias", "gate.weight")):  # else all ones or zeros
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.3)
        if name.endswith("A_log"):  # the file has exp of it, of which nearer 0 the logarithm has other last bits
            torch.nn.init.uniform_(parameter, 2, 2.7)
    return model


@pytest.fixture(scope="module")
def folder(model: Any, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_next") / "model"
    model.save_pretrained(folder)
    config = json.loads((folder / "config.json").read_text())
    kept = {key: value for key, value in config.items() if key not in ("layer_types", "rope_parameters")}
    (folder / "config.json").write_text(json.dumps(kept | STATED))
    return folder


def test_its_logits_are_those_of_transformers_own_class(model: Any, folder: Path) -> None:
    pair = open_pair(folder, None)
    assert pair.family.name == "Qwen3-Next"
    assert pair.config.layer_types == ["linear_attention"] * 3 + ["full_attention"]
    with torch.inference_mode():
        torch.testing.assert_close(load_source(folder)(IDS).logits, model(IDS).logits, atol=1e-6, rtol=1e-5)


def test_a_gguf_file_holds_the_same_weights(folder: Path, tmp_path: Path) -> None:
    write_gguf(folder, tmp_path / "model.gguf")
    of_folder, of_file = (weight_sources(open_pair(path, None))["target"] for path in (folder, tmp_path / "model.gguf"))
    assert of_file.keys() == of_folder.keys()
    for name, weight in of_folder.items():
        read, wanted = of_file[name].source.read().float(), weight.source.read().float()
        torch.testing.assert_close(read, wanted, atol=0, rtol=1e-6, msg=name)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"mlp_only_layers": [1]}, r"mlp_only_layers is \[1\], but only models with \[\] are supported"),
        ({"norm_topk_prob": False}, "norm_topk_prob is False, but only models with True"),
        ({"linear_key_head_dim": 24}, r"in_proj_qkvz.weight' has shape \[128, 32\], but config.json asks for"),
    ],
)
def test_another_variant_is_refused(folder: Path, tmp_path: Path, changed: dict[str, Any], message: str) -> None:
    (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | changed))
    with pytest.raises(ExportError, match=message):
        open_pair(tmp_path, None)
