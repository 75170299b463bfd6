"""Multi-token-prediction layers as each producer writes them: inside a target's checkpoint, or in their own folder.

Every writer takes the layer's tensors by MiMo's names after "model.mtp_layers.0.", whose input_proj reads [hidden ;
embedding]; the others read [embedding ; hidden].
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from eagle_export.heads.config import HeadConfig
from eagle_export.heads.eagle1 import PredictionHead

Tensors = dict[str, Tensor]
Config = dict[str, Any]


def read_folder(folder: Path) -> tuple[Tensors, Config]:
    config: Config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return load_file(folder / "model.safetensors"), config


def write_folder(folder: Path, tensors: Tensors, config: Config) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    return folder


def random_layer(config: Config, *, bias: bool = True) -> Tensors:
    """A layer for a target of these sizes."""
    hidden, heads, mlp = config["hidden_size"], config["num_attention_heads"], config["intermediate_size"]
    width = config.get("head_dim") or hidden // heads
    shapes: dict[str, tuple[int, ...]] = {"input_proj.weight": (hidden, 2 * hidden)}
    norms = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", "post_attention_layernorm")
    shapes |= {f"{name}.weight": (hidden,) for name in norms}
    for name, count in (("q", heads), ("k", config["num_key_value_heads"]), ("v", config["num_key_value_heads"])):
        shapes[f"self_attn.{name}_proj.weight"] = (count * width, hidden)
        if bias:
            shapes[f"self_attn.{name}_proj.bias"] = (count * width,)
    shapes["self_attn.o_proj.weight"] = (hidden, heads * width)
    shapes |= {f"mlp.{name}_proj.weight": (mlp, hidden) for name in ("gate", "up")}
    shapes["mlp.down_proj.weight"] = (hidden, mlp)
    random = torch.Generator().manual_seed(5)
    scale = hidden**-0.5
    return {
        name: 1 + 0.3 * torch.randn(shape, generator=random)
        if "norm" in name
        else torch.randn(shape, generator=random) * (scale if len(shape) > 1 else 0.3)
        for name, shape in shapes.items()
    }


def swapped(weight: Tensor) -> Tensor:
    """input_proj for the inputs in the other order."""
    return torch.cat(weight.chunk(2, 1)[::-1], 1)


def mimo(target: Path, layer: Tensors, folder: Path) -> Path:
    """XiaomiMiMo/MiMo modeling_mimo.py (MiMoModel.mtp_layers) and configuration_mimo.py, on a Llama or a Qwen2."""
    tensors, config = read_folder(target)
    for index in range(config["num_hidden_layers"]):
        for name in "qkv":
            stem = f"model.layers.{index}.self_attn.{name}_proj"
            tensors.setdefault(f"{stem}.bias", torch.zeros(len(tensors[f"{stem}.weight"])))
    tensors |= {f"model.mtp_layers.0.{name}": tensor for name, tensor in layer.items()}
    config |= {
        "architectures": ["MiMoForCausalLM"],
        "model_type": "mimo",
        "auto_map": {
            "AutoConfig": "configuration_mimo.MiMoConfig",
            "AutoModelForCausalLM": "modeling_mimo.MiMoForCausalLM",
        },
        "attention_bias": True,
        "num_nextn_predict_layers": 1,
        "use_sliding_window": False,
    }
    return write_folder(folder, tensors, config)


def deepseek(target: Path, layer: Tensors, folder: Path) -> Path:
    """deepseek-ai/DeepSeek-V3 (vllm/model_executor/models/deepseek_mtp.py): a further layer with the shared weights."""
    tensors, config = read_folder(target)
    stem = f"model.layers.{config['num_hidden_layers']}."
    names = {"token_layernorm": "enorm", "hidden_layernorm": "hnorm", "final_layernorm": "shared_head.norm"}
    for name, tensor in layer.items():
        part = name.removesuffix(".weight")
        tensors[f"{stem}{names[part]}.weight" if part in names else stem + name] = tensor
    tensors[f"{stem}eh_proj.weight"] = swapped(tensors.pop(f"{stem}input_proj.weight"))
    tensors[f"{stem}embed_tokens.weight"] = tensors["model.embed_tokens.weight"].clone()
    tensors[f"{stem}shared_head.head.weight"] = tensors["lm_head.weight"].clone()
    return write_folder(folder, tensors, config | {"num_nextn_predict_layers": 1})


def qwen(target: Path, layer: Tensors, folder: Path) -> Path:
    """Qwen3-Next's names (vllm/model_executor/models/qwen3_next_mtp.py)."""
    tensors, config = read_folder(target)
    names = {
        "input_proj": "fc",
        "token_layernorm": "pre_fc_norm_embedding",
        "hidden_layernorm": "pre_fc_norm_hidden",
        "final_layernorm": "norm",
    }
    for name, tensor in layer.items():
        part = name.removesuffix(".weight")
        tensors[f"mtp.{names[part]}.weight" if part in names else f"mtp.layers.0.{name}"] = tensor
    tensors["mtp.fc.weight"] = swapped(tensors["mtp.fc.weight"])
    return write_folder(folder, tensors, config)


def speculators(target: Path, layer: Tensors, folder: Path) -> Path:
    """vllm-project/speculators src/speculators/models/mtp/{config,core}.py: the layer alone, the target's config as a
    difference from the defaults of transformers' class."""
    _, config = read_folder(target)
    tensors = {f"mtp_layers.0.{name}": tensor for name, tensor in layer.items()}
    tensors["mtp_layers.0.input_proj.weight"] = swapped(layer["input_proj.weight"])
    own = {
        "architectures": ["MTPDraftModel"],
        "speculators_model_type": "mtp",
        "speculators_version": "0.6.0",
        "speculators_config": {
            "algorithm": "mtp",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 3}],
            "verifier": {"name_or_path": "some/target", "architectures": config.get("architectures", [])},
        },
        "num_nextn_predict_layers": 1,
        "transformer_layer_config": config,
    }
    return write_folder(folder, tensors, own)


WRITERS: dict[str, Callable[[Path, Tensors, Path], Path]] = {
    "MiMo MTP": mimo,
    "DeepSeek MTP": deepseek,
    "Qwen MTP": qwen,
    "speculators MTP": speculators,
}


def trained_layer(model: Any, texts: Tensor) -> Tensors:
    """A layer that learned a target's own texts [N, T] in a second. model: the target in transformers, a Llama or a
    Qwen2. Position 0 is left out, as vLLM does it."""
    config = model.config
    width, eps = config.hidden_size // config.num_attention_heads, config.rms_norm_eps
    sizes = (config.hidden_size, config.hidden_size, config.vocab_size, config.vocab_size, 1)
    heads = (config.num_attention_heads, config.num_key_value_heads, width, config.intermediate_size, eps)
    rope = {"rope_parameters": config.rope_parameters}
    own = {"output_norm": "recurrent", "hidden_first": True, "masks_first": True}
    torch.manual_seed(0)
    head = PredictionHead(HeadConfig("mtp", *sizes, *heads, rope, True, False, (), **own))  # type: ignore[arg-type]
    head.embed_tokens.weight = torch.nn.Parameter(model.get_input_embeddings().weight, requires_grad=False)
    head.lm_head.weight = torch.nn.Parameter(model.get_output_embeddings().weight, requires_grad=False)
    with torch.no_grad():
        features = model.model(input_ids=texts).last_hidden_state[:, :-2].clone()
    optimizer = torch.optim.Adam([each for each in head.parameters() if each.requires_grad], 1e-2)
    rows = texts.shape[1] - 2
    mask = torch.full((1, 1, rows, rows), -1e30).triu(1)
    empty = torch.zeros(len(texts), 0, config.num_key_value_heads, width)
    for _ in range(80):
        hidden, _new = head(texts[:, 1:-1], features, torch.arange(rows)[None], mask, [(empty, empty)])
        loss = torch.nn.functional.cross_entropy(head.logits(hidden).flatten(0, 1), texts[:, 2:].flatten())
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    names = {"embed_norm": "token_layernorm", "hidden_norm": "hidden_layernorm", "norm": "final_layernorm"}
    names |= {"fc": "input_proj"}
    return {
        names.get(part := name.removesuffix(".weight"), part.removeprefix("layers.0.")) + name[len(part) :]: tensor
        for name, tensor in head.state_dict().items()
        if not name.startswith(("embed_tokens", "lm_head"))
    }
