"""Heads that eagle-train writes for other engines: what vLLM's and SGLang's loaders expect, and this project's own.

The loaders below follow the engines' code, which their docstrings name. Sizes are those that the engine's model would
have by the written config.json alone, so a key that is missing or wrong shows as a shape that does not fit.
"""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from conftest import GOLDEN
from eagle_export.graphs.pair import Pair, open_pair, weight_sources
from eagle_train.cli import main

TARGET = GOLDEN / "target"
GIVEN = GOLDEN / "head_eagle3_dv44"
Shapes = dict[str, tuple[int, ...]]
PARTS = (
    (".qkv_proj", ".q_proj"),
    (".qkv_proj", ".k_proj"),
    (".qkv_proj", ".v_proj"),
    (".gate_up_proj", ".gate_proj"),
    (".gate_up_proj", ".up_proj"),
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "text.jsonl"
    rows = [{"ids": [(7 * row + 3 * i) % 250 + 3 for i in range(40)]} for row in range(8)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return path


def written(data: Path, folder: Path, *options: str) -> tuple[dict[str, Tensor], dict[str, Any]]:
    """A head that was not trained further, so its weights are those of the given one."""
    command = ["head", str(TARGET), "--data", str(data), "-o", str(folder), "--steps", "0", "--threads", "1"]
    assert main([*command, "--backend", "cpu", "--seq-len", "32", *options]) == 0
    return load_file(folder / "model.safetensors"), json.loads((folder / "config.json").read_text(encoding="utf-8"))


def layer_shapes(config: dict[str, Any], layer: str) -> Shapes:
    """Parameters of EAGLE-3's layer as both engines build it: fused q, k, v over twice the width, fused gate and up."""
    hidden, middle, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    return {
        f"{layer}.self_attn.qkv_proj.weight": (queries + 2 * keys, 2 * hidden),
        f"{layer}.self_attn.o_proj.weight": (hidden, queries),
        f"{layer}.mlp.gate_up_proj.weight": (2 * middle, hidden),
        f"{layer}.mlp.down_proj.weight": (hidden, middle),
        **{f"{layer}.{name}.weight": (hidden,) for name in norms},
    }


def vllm_parameters(config: dict[str, Any]) -> Shapes:
    """vllm-project/vllm vllm/model_executor/models/llama_eagle3.py, LlamaModel and Eagle3LlamaForCausalLM."""
    hidden, fed = config["hidden_size"], config.get("target_hidden_size", config["hidden_size"])
    assert config["num_hidden_layers"] == 1
    assert not config.get("norm_before_residual", False)
    return {
        **layer_shapes(config, "model.layers.0"),
        "model.fc.weight": (hidden, 3 * fed),
        "model.norm.weight": (hidden,),
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
        "draft_id_to_target_id": (config["draft_vocab_size"],),
    }


def vllm_name(name: str) -> str | None:
    """load_weights of the same file: t2d is dropped, d2t is renamed, all but lm_head get a prefix."""
    if "t2d" in name:
        return None
    if "d2t" in name:
        return name.replace("d2t", "draft_id_to_target_id")
    name = name if "lm_head" in name else f"model.{name}"
    return name.replace("midlayer.", "layers.0.")


def sglang_parameters(config: dict[str, Any]) -> Shapes:
    """sgl-project/sglang python/sglang/srt/models/llama_eagle3.py, LlamaModel and LlamaForCausalLMEagle3."""
    hidden = config["hidden_size"]
    assert config["num_hidden_layers"] == 1 and not config["tie_word_embeddings"] and not config.get("bias", False)
    return {
        **layer_shapes(config, "model.midlayer"),
        "model.fc.weight": (hidden, 3 * config.get("target_hidden_size", hidden)),
        "model.norm.weight": (hidden,),
        "model.embed_tokens.weight": (config["vocab_size"], hidden),
        "lm_head.weight": (config["draft_vocab_size"], hidden),
    }


def sglang_name(name: str) -> str | None:
    """load_weights of the same file: d2t becomes the list of hot tokens. Unknown names are ignored there, so a wrong
    name would leave a parameter as it was initialised."""
    return None if name in ("d2t", "t2d") else name if name == "lm_head.weight" else f"model.{name}"


def assert_loads(tensors: dict[str, Tensor], parameters: Shapes, engine_name: Any) -> None:
    """Every tensor has a place, and every parameter is filled but the embedding, which engines take from the target."""
    rows: dict[str, int] = dict.fromkeys(parameters, 0)
    for name, tensor in tensors.items():
        place = engine_name(name)
        if place is None:
            continue
        for fused, part in PARTS:
            place = place.replace(part, fused)
        assert place in parameters, name
        assert tuple(tensor.shape[1:]) == parameters[place][1:], name
        rows[place] += tensor.shape[0]
    filled = {name: count for name, count in rows.items() if count}
    assert filled == {name: shape[0] for name, shape in parameters.items() if "embed_tokens" not in name}


def same_head(one: Pair, other: Pair) -> None:
    assert one.head is not None and other.head is not None
    assert replace(one.head.config, rope={}) == replace(other.head.config, rope={})
    theta = [pair.head.config.rope["rope_parameters"]["rope_theta"] for pair in (one, other) if pair.head is not None]
    assert theta[0] == theta[1]
    for graph, weights in weight_sources(one).items():
        for name, weight in weight_sources(other)[graph].items():
            assert torch.equal(weights[name].source.read(), weight.source.read()), name


def test_safeailabs_layout_loads_in_vllm_and_sglang(data: Path, tmp_path: Path) -> None:
    tensors, config = written(data, tmp_path / "head", "--kind", "eagle3", "--init", str(GIVEN))
    assert config["architectures"] == ["LlamaForCausalLMEagle3"]  # a class of SGLang, and a name that vLLM knows
    assert_loads(tensors, vllm_parameters(config), vllm_name)
    assert_loads(tensors, sglang_parameters(config), sglang_name)
    assert tensors["d2t"].dtype == torch.int64 and tensors["t2d"].dtype == torch.bool
    assert int(tensors["t2d"].sum()) == config["draft_vocab_size"]
    assert bool(tensors["t2d"][tensors["d2t"] + torch.arange(len(tensors["d2t"]))].all())
    same_head(open_pair(TARGET, tmp_path / "head"), open_pair(TARGET, GIVEN))


def test_speculators_layout_loads_in_vllm(data: Path, tmp_path: Path) -> None:
    """vllm/transformers_utils/configs/speculators/{base,algos}.py turn the nested config into the model's."""
    options = ("--kind", "eagle3", "--init", str(GIVEN), "--layout", "speculators")
    tensors, config = written(data, tmp_path / "head", *options)
    assert config["speculators_model_type"] == "eagle3"
    flat = dict(config["transformer_layer_config"])
    assert flat["model_type"] in ("llama", "qwen3")
    for key, default in (("norm_before_residual", True), ("norm_before_fc", False), ("fc_norm", False)):
        flat[key] = config.get(key, default)
    flat |= {key: config[key] for key in ("draft_vocab_size", "target_hidden_size")}
    assert not flat["norm_before_fc"] and not flat["fc_norm"] and not config["norm_output"]
    assert_loads(tensors, vllm_parameters(flat), vllm_name)
    given = config["speculators_config"]
    assert isinstance(given["proposal_methods"][0]["speculative_tokens"], int)
    assert given["default_proposal_method"] in [method["proposal_type"] for method in given["proposal_methods"]]
    assert given["algorithm"] == "eagle3"
    assert given["verifier"] == {"name_or_path": str(TARGET), "architectures": ["LlamaForCausalLM"]}
    assert config["eagle_aux_hidden_state_layer_ids"] == [2, 4, 5]  # inputs of layers, as vLLM collects them
    pair = open_pair(TARGET, tmp_path / "head")
    assert pair.head is not None and pair.head.layout.producer == "speculators"
    same_head(pair, open_pair(TARGET, GIVEN))


def test_a_head_of_speculators_layout_is_trained_further(data: Path, tmp_path: Path) -> None:
    layout = ("--kind", "eagle3", "--layout", "speculators")
    written(data, tmp_path / "first", *layout, "--init", str(GIVEN))
    written(data, tmp_path / "second", "--kind", "eagle3", "--init", str(tmp_path / "first"))
    same_head(open_pair(TARGET, tmp_path / "second"), open_pair(TARGET, GIVEN))


def test_speculators_has_no_eagle1(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["head", str(TARGET), "--kind", "eagle1", "--layout", "speculators", "--data", str(data), "--steps", "1"]
    assert main([*command, "-o", str(tmp_path / "head")]) == 2
    assert "speculators has no layout for other heads" in capsys.readouterr().err
    assert not (tmp_path / "head").exists()
