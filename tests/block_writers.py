"""Folders of block heads as each producer's code writes them, made of the weights of the recorded ones.

The writers follow the code that their docstrings name.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

import torch
from safetensors.torch import load_file
from torch import Tensor

from conftest import GOLDEN
from head_writers import Config, Head, Tensors, target_tensor

RECORDED = load_file(GOLDEN / "block_heads.fixture.safetensors")
CONFIGS: dict[str, Config] = json.loads((GOLDEN / "block_heads.json").read_text(encoding="utf-8"))
LAYER = (
    *("model_type", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"),
    *("num_key_value_heads", "head_dim", "rope_parameters", "layer_types", "sliding_window"),
)
DRAFT = 44  # tokens of a reduced vocabulary


def weights(name: str) -> Tensors:
    start = f"{name}.weights."
    return {key.removeprefix(start): value for key, value in RECORDED.items() if key.startswith(start)}


def copies() -> Tensors:
    """The target's own parts, as DeepSpec keeps them."""
    return {
        "embed_tokens.weight": target_tensor("model.embed_tokens.weight"),
        "lm_head.weight": target_tensor("lm_head.weight"),
    }


def dflash() -> Head:
    """z-lab/dflash dflash/model.py; SpecForge and ModelOpt write the same."""
    return Head(weights("dflash"), dict(CONFIGS["dflash"]))


def jetspec() -> Head:
    """hao-ai-lab/JetSpec jetspec/models/draft_head.py: dflash_config.causal_head."""
    return Head(weights("dflash"), dict(CONFIGS["jetspec"]))


def deepspec() -> Head:
    """deepseek-ai/DeepSpec deepspec/modeling/dspark/qwen3: all settings at the top, copies of the target's parts."""
    return Head(weights("dspark") | copies(), dict(CONFIGS["dspark"]))


MOVED = ("mask_token_id", "target_layer_ids", "markov_rank", "markov_head_type", "enable_confidence_head")


def specforge_dspark() -> Head:
    """sgl-project/SpecForge configs/qwen3-8b-dspark.json: settings in dflash_config, nothing of the target."""
    config = dict(CONFIGS["dspark"])
    inner = {key: config.pop(key) for key in (*MOVED, "confidence_head_with_markov")}
    config |= {"architectures": ["DSparkDraftModel"], "dflash_config": {"projector_type": "dspark", **inner}}
    return Head(weights("dspark"), config)


def modelopt_dspark() -> Head:
    """NVIDIA/Model-Optimizer modelopt/torch/export/plugins/hf_spec_export.py: DSparkExporter."""
    head = specforge_dspark()
    plain = {name.removeprefix("markov_head."): tensor for name, tensor in head.tensors.items()}
    plain = {name.replace("confidence_head.proj.", "confidence_proj."): tensor for name, tensor in plain.items()}
    inner = {key: head.config["dflash_config"][key] for key in MOVED[:4]}
    inner |= {"projector_type": "dspark", "shift_label": True, "use_confidence_head": True}
    return Head(plain, head.config | {"architectures": ["DFlashDraftModel"], "dflash_config": inner})


def _speculators(kind: str, tensors: Tensors, config: Config, taps: list[int]) -> Head:
    """Taps are indices into hidden_states; the layers' settings without defaults; a vocabulary of DRAFT tokens."""
    chosen = torch.arange(0, 5 * DRAFT, 5)
    reduced: Tensors = {
        "d2t": chosen - torch.arange(DRAFT),
        "t2d": torch.zeros(config["vocab_size"], dtype=torch.bool).index_fill(0, chosen, True),
        "lm_head.weight": target_tensor("lm_head.weight")[chosen],
        "embed_tokens.weight": target_tensor("model.embed_tokens.weight"),
    }
    own: Config = {
        "speculators_model_type": kind,
        "architectures": ["DSparkSpeculator" if kind == "dspark" else "DFlashSpeculator"],
        "transformer_layer_config": {key: config[key] for key in LAYER},
        "aux_hidden_state_layer_ids": taps,
        "draft_vocab_size": DRAFT,
        "sliding_window_non_causal": False,
        **{key: config[key] for key in ("block_size", "mask_token_id") if key in config},
    }
    return Head(tensors | reduced, own)


def speculators_dflash() -> Head:
    """vllm-project/speculators src/speculators/models/dflash/{config,core}.py."""
    config = CONFIGS["dflash"]
    return _speculators("dflash", weights("dflash"), config | {"mask_token_id": 2}, [2, 6])


def speculators_dspark() -> Head:
    """vllm-project/speculators src/speculators/models/dspark/{config,core}.py."""
    config, tensors = CONFIGS["dspark"], weights("dspark")
    head = _speculators("dspark", tensors, config, [1, 4, 7])
    head.tensors["markov_head.markov_w2.weight"] = tensors["markov_head.markov_w2.weight"][: 5 * DRAFT : 5]
    head.config |= {"markov_rank": 6, "markov_head_type": "vanilla", "sample_from_anchor": True}
    return head


def eagle_train() -> Head:
    """train/eagle_train/block: Llama's layers without q/k norms, an embedding of its own for the mask."""
    head = deepspec()
    dropped = ("embed_tokens", "confidence_head")
    tensors = {n: t for n, t in head.tensors.items() if "q_norm" not in n and "k_norm" not in n}
    tensors = {name: tensor for name, tensor in tensors.items() if not name.startswith(dropped)}
    tensors["mask_embedding"] = torch.linspace(-1, 1, 64)[None, None]
    tensors["lm_head.weight"] = tensors["lm_head.weight"] + 1  # trained
    own: Config = {"architectures": ["EagleTrainBlockModel"], "model_type": "llama"}
    own |= {"mask_token_id": None, "sample_from_anchor": True, "causal": True, "enable_confidence_head": False}
    return Head(tensors, head.config | own)


def reads_state() -> Head:
    """train/eagle_train/blocks, with --init: rows read their embedding and the target's last state before the root."""
    head = eagle_train()
    identity = torch.eye(64)
    head.tensors["input_fc.weight"] = torch.cat([identity, identity / 4], 1)
    return head


WRITERS: Mapping[str, Callable[[], Head]] = {
    "speculators DSpark": speculators_dspark,
    "speculators DFlash": speculators_dflash,
    "eagle-train": eagle_train,
    "DeepSpec DSpark": deepspec,
    "SpecForge DSpark": specforge_dspark,
    "ModelOpt DSpark": modelopt_dspark,
    "JetSpec": jetspec,
    "DFlash": dflash,
}


def changed(head: Head, drop: tuple[str, ...] = (), **config: object) -> Head:
    """A copy without some tensors, with other settings."""
    kept: dict[str, Tensor] = {name: tensor for name, tensor in head.tensors.items() if name not in drop}
    return Head(kept, {**head.config, **config})
