"""The layouts in which a trained head is written: names of its tensors and content of its config.json.

safeailab: SafeAILab's, which SGLang (python/sglang/srt/models/llama_eagle3.py) and vLLM
(vllm/model_executor/models/llama_eagle3.py) load. speculators: vllm-project/speculators'
(src/speculators/models/eagle3/config.py), which vLLM serves by the head's name alone
(vllm/transformers_utils/configs/speculators/). Block heads have a layout of their own: that of DeepSpec's DSpark
(deepspec/modeling/dspark), with a mask embedding, an LM head, a draft vocabulary and input_fc besides, under a class of
another name: a program that knows DSpark's alone would leave input_fc out without a word.
"""

from __future__ import annotations

from typing import Any

import torch

from eagle_export.heads.block_layouts import OWN_CLASS
from eagle_export.heads.config import HeadConfig
from eagle_train.kinds import Layout
from eagle_train.target import FrozenTarget

SPECULATIVE_TOKENS = 3  # that a server drafts where nobody says how many; as speculators' own converter writes


def stored_name(layout: Layout, name: str) -> str:
    """Returns the name of a parameter in the file."""
    return "layers.0." + name.removeprefix("midlayer.") if layout == "speculators" and "midlayer." in name else name


def config_json(layout: Layout, shape: HeadConfig, target: FrozenTarget, dtype: torch.dtype) -> dict[str, Any]:
    """Returns config.json's content. shape: of the head. dtype: of its tensors."""
    if shape.kind == "block":
        return _block(shape, target, dtype)
    return _speculators(shape, target, dtype) if layout == "speculators" else _safeailab(shape, target, dtype)


def _safeailab(shape: HeadConfig, target: FrozenTarget, dtype: torch.dtype) -> dict[str, Any]:
    """It has no layer ids: the taps are the default ones, and engines disagree on ids."""
    config = {
        "architectures": ["LlamaForCausalLMEagle3" if shape.kind == "eagle3" else "LlamaForCausalLM"],
        **_layer(shape, dtype),
        "rope_theta": shape.rope["rope_parameters"]["rope_theta"],
    }
    for name in ("bos_token_id", "eos_token_id", "pad_token_id"):
        config[name] = target.checkpoint.config.get(name)
    if shape.kind == "eagle3":
        return {**config, "draft_vocab_size": shape.draft_vocab_size}
    return {**config, "bias": shape.fc_bias}


def _speculators(shape: HeadConfig, target: FrozenTarget, dtype: torch.dtype) -> dict[str, Any]:
    """All switches are written out: speculators and vLLM read a config without norm_before_residual differently."""
    rope = shape.rope["rope_parameters"]
    given = target.checkpoint.config
    return {
        "architectures": ["Eagle3Speculator"],
        "speculators_model_type": "eagle3",
        "speculators_version": "0.4.0",
        "speculators_config": {
            "algorithm": "eagle3",
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": SPECULATIVE_TOKENS}],
            "verifier": {
                "name_or_path": given.get("_name_or_path") or str(target.checkpoint.folder),
                "architectures": given.get("architectures") or [],
            },
        },
        # transformers before 5 reads rope_theta, later releases rope_parameters
        "transformer_layer_config": {**_layer(shape, dtype), "rope_theta": rope["rope_theta"], "rope_parameters": rope},
        "draft_vocab_size": shape.draft_vocab_size,
        "target_hidden_size": shape.target_hidden_size,
        "eagle_aux_hidden_state_layer_ids": list(shape.taps),  # as vLLM counts: inputs of layers
        "norm_before_residual": shape.normed_residual,
        "norm_before_fc": False,
        "fc_norm": False,
        "norm_output": False,
        "embed_requires_grad": False,
        "tie_word_embeddings": False,
        "torch_dtype": str(dtype).removeprefix("torch."),
    }


def _block(shape: HeadConfig, target: FrozenTarget, dtype: torch.dtype) -> dict[str, Any]:
    """A layer id names the output of a layer, so it is a tap minus 1. No mask_token_id: the mask has its own row."""
    block = shape.block
    assert block is not None
    config = {
        "architectures": [OWN_CLASS],
        **_layer(shape, dtype),
        "rope_theta": shape.rope["rope_parameters"]["rope_theta"],
        "target_hidden_size": shape.target_hidden_size,
        "num_target_layers": int(target.config.num_hidden_layers),
        "target_layer_ids": [tap - 1 for tap in shape.taps],
        "block_size": block.size,
        "mask_token_id": block.mask_id,
        "sample_from_anchor": block.anchor,
        "causal": block.causal,
        "layer_types": ["full_attention"] * shape.num_layers,
        "draft_vocab_size": shape.draft_vocab_size,
    }
    if block.markov_rank:
        config |= {"markov_rank": block.markov_rank, "markov_head_type": "vanilla", "enable_confidence_head": False}
    return config


def _layer(shape: HeadConfig, dtype: torch.dtype) -> dict[str, Any]:
    """What all layouts say of the decoder layer."""
    return {
        "model_type": "llama",
        "hidden_act": "silu",
        "hidden_size": shape.hidden_size,
        "intermediate_size": shape.intermediate_size,
        "num_attention_heads": shape.num_heads,
        "num_key_value_heads": shape.num_kv_heads,
        "head_dim": shape.head_dim,
        "num_hidden_layers": shape.num_layers,
        "rms_norm_eps": shape.rms_norm_eps,
        "max_position_embeddings": shape.rope["max_position_embeddings"],
        "vocab_size": shape.vocab_size,
        "tie_word_embeddings": False,
        "attention_bias": shape.qkv_bias,
        "mlp_bias": False,
        "initializer_range": 0.02,
        "torch_dtype": str(dtype).removeprefix("torch."),
        "use_cache": True,
    }
