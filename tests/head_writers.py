"""Folders of heads as each producer's code writes them, made of the weights of a head in the official layout.

The writers follow the code that their docstrings name.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from safetensors.torch import load_file, save_file
from torch import Tensor

from conftest import GOLDEN

TARGET = GOLDEN / "target"
Tensors = dict[str, Tensor]
Config = dict[str, Any]


@dataclass
class Head:
    """What a head's folder holds."""

    tensors: Tensors
    config: Config

    def write(self, folder: Path) -> Path:
        folder.mkdir(exist_ok=True)
        save_file({name: tensor.contiguous() for name, tensor in self.tensors.items()}, folder / "model.safetensors")
        (folder / "config.json").write_text(json.dumps(self.config), encoding="utf-8")
        return folder


def read(folder: Path) -> Head:
    """A head in the official layout."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return Head(load_file(folder / "model.safetensors"), config)


def golden_head(kind: str) -> Head:
    return read(GOLDEN / {"eagle1": "head_eagle1", "eagle3": "head_eagle3_dv44"}[kind])


def target_tensor(name: str) -> Tensor:
    return load_file(TARGET / "model.safetensors")[name]


def renamed(tensors: Tensors, old: str, new: str) -> Tensors:
    return {new + name.removeprefix(old) if name.startswith(old) else name: t for name, t in tensors.items()}


def layer_config(config: Config, *names: str) -> Config:
    return {name: config[name] for name in names if name in config}


SIZES = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
    "num_key_value_heads",
    "rms_norm_eps",
    "max_position_embeddings",
    "rope_theta",
)


def head_dim(head: Head) -> int:
    return int(head.config["hidden_size"]) // int(head.config["num_attention_heads"])


def safeailab(head: Head) -> Head:
    """SafeAILab/EAGLE eagle/traineagle3/main.py: frozen parameters (the embedding) are not saved."""
    return Head(head.tensors, {**head.config, "architectures": ["LlamaForCausalLM"]})


def specforge(head: Head) -> Head:
    """sgl-project/SpecForge specforge/export/to_hf.py: the target's embedding is added."""
    return Head(
        {**head.tensors, "embed_tokens.weight": target_tensor("model.embed_tokens.weight")},
        {
            **head.config,
            "architectures": ["LlamaForCausalLMEagle3"],
            "attention_bias": False,
            "head_dim": 16,
            "norm_output": True,
            "use_sliding_window": False,
            "eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 3, 4], "use_aux_hidden_state": True},
        },
    )


def angelslim(head: Head) -> Head:
    """Tencent/AngelSlim angelslim/compressor/speculative/train/models/draft/llama_eagle3.py and configs/*.json."""
    return Head(
        {**head.tensors, "embed_tokens.weight": target_tensor("model.embed_tokens.weight")},
        {**head.config, "architectures": ["Eagle3LlamaForCausalLM"], "target_model_type": "llama", "head_dim": 16},
    )


def modelopt(head: Head) -> Head:
    """NVIDIA/Model-Optimizer modelopt/torch/export/plugins/hf_spec_export.py: layers.0, no t2d, no embedding."""
    tensors = renamed(head.tensors, "midlayer.", "layers.0.")
    del tensors["t2d"]
    eagle = {
        "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
        "next_layer_regular": True,
        "parallel_draft_step": 1,
        "parallel_draft_heads_num_layers": 1,
    }
    config = {**head.config, "rope_scaling": {"rope_type": "default", "rope_theta": 10000}, "eagle_config": eagle}
    return Head(tensors, {**config, "architectures": ["LlamaForCausalLMEagle3"], "head_dim": 16, "mlp_bias": False})


def speculators(head: Head) -> Head:
    """vllm-project/speculators src/speculators/convert/eagle/eagle3_converter.py and models/eagle3/config.py. The
    layer's config is a difference from the defaults of transformers' class (PretrainedConfig.to_diff_dict)."""
    tensors = renamed(head.tensors, "midlayer.", "layers.0.")
    tensors["embed_tokens.weight"] = target_tensor("model.embed_tokens.weight")
    layer = layer_config(head.config, *SIZES)
    del layer["rope_theta"]  # 10000 is the default
    return Head(
        tensors,
        {
            "architectures": ["Eagle3Speculator"],
            "speculators_model_type": "eagle3",
            "speculators_version": "0.4.0",
            "speculators_config": {
                "algorithm": "eagle3",
                "default_proposal_method": "greedy",
                "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
                "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
            },
            "transformer_layer_config": {**layer, "model_type": "llama", "head_dim": head_dim(head)},
            "draft_vocab_size": head.config["draft_vocab_size"],
            "target_hidden_size": None,
            "norm_before_residual": False,
            "norm_before_fc": False,
            "fc_norm": False,
            "norm_output": False,
            "eagle_aux_hidden_state_layer_ids": [2, 4, 5],
            "embed_requires_grad": False,
        },
    )


def vllm_eagle3(head: Head) -> Head:
    """vllm-project/vllm vllm/model_executor/models/llama_eagle3.py: what its own parameters are called."""
    tensors = renamed(head.tensors, "midlayer.", "layers.0.")
    del tensors["t2d"]
    tensors["draft_id_to_target_id"] = tensors.pop("d2t")
    outside = ("lm_head.weight", "draft_id_to_target_id")
    tensors = {name if name in outside else f"model.{name}": tensor for name, tensor in tensors.items()}
    ids = {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 4, 5], "use_aux_hidden_state": True}}
    return Head(tensors, {**head.config, **ids, "architectures": ["Eagle3LlamaForCausalLM"]})


def vllm_eagle1(head: Head) -> Head:
    """The conversion that vllm/model_executor/models/eagle.py describes: the target's LM head is added, the config is
    wrapped (vllm/transformers_utils/configs/eagle.py)."""
    config = {key: value for key, value in head.config.items() if key != "bias"} | {"eagle_fc_bias": True}
    tensors = {**head.tensors, "lm_head.weight": target_tensor("lm_head.weight")}
    return Head(tensors, {"model_type": "eagle", "model": config})


WRITERS: dict[str, tuple[str, Callable[[Head], Head]]] = {
    "SafeAILab EAGLE-1/2": ("eagle1", lambda head: head),
    "SafeAILab EAGLE-3": ("eagle3", safeailab),
    "SpecForge": ("eagle3", specforge),
    "AngelSlim": ("eagle3", angelslim),
    "ModelOpt": ("eagle3", modelopt),
    "speculators": ("eagle3", speculators),
    "vLLM EAGLE-3": ("eagle3", vllm_eagle3),
    "vLLM EAGLE-1": ("eagle1", vllm_eagle1),
}
