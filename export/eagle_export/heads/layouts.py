"""How the producers of EAGLE heads write their folders: one row per layout, and the way from each to the official one.

A layout is recognised by names of tensors and keys of config.json; the first row that fits is taken. The official
layout is SafeAILab's: `midlayer.*` for EAGLE-3, one flat config. All other modules read that alone.

Letters: i layer of the target. A tap is an index into transformers' hidden_states, where 0 is the embedding and i + 1
the output of layer i.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_export.base.errors import ExportError
from eagle_export.heads.ahead_reader import HYDRA, MEDUSA, MEDUSA_IN_TARGET, OTHER_PARTS, VLLM_MEDUSA, AheadNames
from eagle_export.heads.assistant_config import official_assistant
from eagle_export.heads.block_layouts import block_layout, official_block
from eagle_export.heads.layout import LLAMA_TYPES, PREDICTING, TRANSFORMERS_DEFAULTS, HeadLayout
from eagle_export.heads.prediction import DEEPSEEK, MIMO, QWEN, SPECULATORS, in_parts
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.nested import language_model

PAIRED = "layers.0.hidden_norm.weight"  # the norm of the features: EAGLE-3's first layer has it, no other layer does

LAYOUTS = (
    HeadLayout(
        "transformers",
        "assistant",
        source="huggingface/transformers: src/transformers/models/gemma4_assistant",
        keys=("backbone_hidden_size",),
        tensors=("pre_projection.", "post_projection."),
    ),
    HeadLayout(
        "Medusa",
        "medusa",
        source="FasterDecoding/Medusa: medusa/model/medusa_model.py, medusa/train/train_legacy.py",
        names=MEDUSA,
    ),
    HeadLayout(
        "Medusa, in its target's checkpoint",
        "medusa",
        source="FasterDecoding/Medusa: medusa/model/medusa_model.py",
        names=MEDUSA_IN_TARGET,
    ),
    HeadLayout(
        "vLLM Medusa",
        "medusa",
        source="vllm-project/vllm: vllm/model_executor/models/medusa.py",
        names=VLLM_MEDUSA,
    ),
    HeadLayout(
        "Hydra",
        "hydra",
        source="zankner/Hydra: hydra/model/hydra_heads/mlp_head.py, hydra/model/hydra_model.py",
        names=HYDRA,
    ),
    # In all four the feature is the target's hidden state after its last norm, and what is fed back is the layer's
    # output after its own norm. (vLLM's deepseek_mtp.py feeds back what is before it, transformers' MtpLayer does not.)
    HeadLayout(
        "MiMo MTP",
        "mtp",
        source="XiaomiMiMo/MiMo: modeling_mimo.py; vllm-project/vllm: vllm/model_executor/models/mimo_mtp.py",
        names=MIMO,
        hidden_first=True,
        masks_first=True,
    ),
    HeadLayout(
        "speculators MTP",
        "mtp",
        source="vllm-project/speculators: src/speculators/models/mtp/{config,core,model_definitions}.py",
        keys=("speculators_model_type",),
        nested="transformer_layer_config",
        defaults=TRANSFORMERS_DEFAULTS,
        names=SPECULATORS,
    ),
    HeadLayout(
        "DeepSeek MTP",
        "mtp",
        source="vllm-project/vllm: vllm/model_executor/models/deepseek_mtp.py",
        tensors=("model.layers.0.",),
        names=DEEPSEEK,
        masks_first=True,
    ),
    HeadLayout(
        "Qwen MTP",
        "mtp",
        source="vllm-project/vllm: vllm/model_executor/models/{qwen3_next_mtp,qwen3_5_mtp}.py",
        tensors=("mtp.layers.0.",),
        names=QWEN,
    ),
    HeadLayout(
        "speculators",
        "eagle3",
        # Layer ids are vLLM's: src/speculators/models/utils.py takes [2, N // 2, N - 3] where none are given, and
        # scripts/launch_vllm.py hands them to vLLM unchanged. Where norm_before_residual is absent, config.py reads
        # false and vLLM (transformers_utils/configs/speculators/algos.py) true.
        source="vllm-project/speculators: src/speculators/models/eagle3/{config,core}.py",
        keys=("speculators_model_type",),
        tensors=(PAIRED,),
        nested="transformer_layer_config",
        defaults=TRANSFORMERS_DEFAULTS,
        ids="input",
        norm_output=("recurrent", "logits"),
        normed_residual=None,
    ),
    HeadLayout(
        "DeepSpec",
        "eagle3",
        source="deepseek-ai/DeepSpec: deepspec/modeling/eagle3/qwen3/{config,modeling}.py",
        keys=("target_layer_ids",),
        tensors=(PAIRED,),
        id_key="target_layer_ids",
        ids="output",
    ),
    HeadLayout(
        "vLLM EAGLE-3",
        "eagle3",
        source="vllm-project/vllm: vllm/model_executor/models/llama_eagle3.py",
        architectures=("Eagle3LlamaForCausalLM", "Eagle3Qwen3ForCausalLM"),
        tensors=(PAIRED,),
        ids="input",
        norm_output=("recurrent", "logits"),
    ),
    HeadLayout(
        "vLLM EAGLE-1",
        "eagle1",
        source="vllm-project/vllm: vllm/transformers_utils/configs/eagle.py, vllm/model_executor/models/eagle.py",
        keys=("model",),
        tensors=("fc.weight", "layers.0."),
        nested="model",
    ),
    HeadLayout(
        "ModelOpt",
        "eagle3",
        # TorchSpec's tools/convert_to_hf.py writes the same names.
        source="NVIDIA/Model-Optimizer: modelopt/torch/export/plugins/{hf_spec_export,hf_spec_configs}.py",
        tensors=(PAIRED,),
    ),
    HeadLayout(
        "AngelSlim",
        "eagle3",
        source="Tencent/AngelSlim: angelslim/compressor/speculative/train/models/draft/llama_eagle3.py",
        architectures=("Eagle3LlamaForCausalLM",),
        tensors=("midlayer.",),
        layer="midlayer.",
    ),
    HeadLayout(
        "SpecForge",
        "eagle3",
        source="sgl-project/SpecForge: specforge/modeling/draft/llama3_eagle.py, specforge/export/to_hf.py",
        architectures=("LlamaForCausalLMEagle3",),
        tensors=("midlayer.",),
        layer="midlayer.",
        norm_output=("logits", "none"),
    ),
    HeadLayout(
        "SafeAILab EAGLE-3",
        "eagle3",
        source="SafeAILab/EAGLE: eagle/model/cnets.py",
        tensors=("midlayer.",),
        layer="midlayer.",
    ),
    HeadLayout(
        "SafeAILab EAGLE-1/2",
        "eagle1",
        source="SafeAILab/EAGLE: eagle/model/cnets1.py",
        tensors=("fc.weight", "layers.0."),
        default_fc_bias=True,
    ),
)

# What is known and cannot be exported: a pattern of tensor names, and what such a head is.
REFUSED_TENSORS = (
    (r"mask_hidden$", "a P-EAGLE head, which drafts several tokens in one pass (mask_hidden)"),
    (r"parallel_draft_heads\.", "a ModelOpt head with parallel draft heads (parallel_draft_heads)"),
    (r"medusa_|(^|\.)medusa_head", "a Medusa head of another layout"),
    (r"(^|\.)kv_a_proj_with_mqa\.", "a head with latent attention (kv_a_proj_with_mqa)"),
    (r"\.experts\.|\.mlp\.gate\.", "a layer with a mixture of experts"),
    (r"\.linear_attn\.", "a layer with linear attention"),
    (r"(^|\.)(mtp|mtp_layers)\.|\.eh_proj\.", "a multi-token-prediction layer, not an EAGLE head"),
    (r"(^|\.)(context_proj|markov_head|markov_w1|prefix_gru)\b", "a head that drafts blocks of tokens"),
    (
        r"(^|\.)(embedding_layernorm|hidden_states_layernorm|pre_lm_head_layernorm)\.",
        "an EAGLE-1 head of the HASS kind",
    ),
    (r"(^|\.)fusion_fc\.", "an EAGLE-1 head of early speculators (fusion_fc)"),
    (r"_scale(_2|_inv)?$|\.(input|weight)_scale", "a quantised head"),
)
OTHER_HEADS = r"(DFlash2|Domino|DFly|DFlare|PEagle|Medusa|MTP|DeepseekV\d)"
REFUSED_KEYS = (
    ("quantization_config", "the head is quantised already; export the original one"),
    ("dflash_config", "this is a head that drafts blocks of tokens; give an EAGLE head"),
    ("parallel_drafting", "this is a head for parallel drafting; give an EAGLE head"),
    ("use_sliding_window", "sliding-window attention in a head is not supported"),
)
READ_EAGLE_KEYS: tuple[tuple[str, tuple[object, ...]], ...] = (  # of eagle_config: the values that can be exported
    ("use_mtp_layernorm", (None, False)),
    ("parallel_draft_step", (None, 0, 1)),
    ("use_aux_hidden_state", (None, True)),
    ("use_last_layernorm", (None, True)),
)


def official(head: Checkpoint) -> tuple[HeadLayout, Checkpoint]:
    """Returns a head's layout, and the head with the official names and one flat config. Raises ExportError for a head
    of another kind, by its name if it is known."""
    if not isinstance(settings := head.config.get("eagle_config") or {}, Mapping):
        raise ExportError(f"{head.folder / 'config.json'}: eagle_config is {settings!r}, but must be an object")
    if "model.fc.weight" in head.tensors and "fc.weight" not in head.tensors:
        # vLLM's own state dict puts "model." before all but lm_head and the vocabulary's maps.
        head = replace(head, tensors={name.removeprefix("model."): each for name, each in head.tensors.items()})
    if (block := block_layout(head)) is not None:
        return official_block(head, block)
    layout = next((each for each in LAYOUTS if each.fits(head)), None)
    if layout is not None and layout.kind == "assistant":
        return layout, official_assistant(head)
    if layout is not None and isinstance(layout.names, AheadNames):
        head = replace(head, tensors=layout.names.official(head))
        _refuse_heads(head)
    elif layout is not None and layout.names is not None:
        head = language_model(head)
        head = replace(head, tensors=layout.names.official(head))
        _refuse_layer(head, layout)
        head = in_parts(head)
    else:
        _refuse_known(head)
    if layout is None:
        some = ", ".join(sorted(head.tensors)[:3]) or "nothing"
        raise ExportError(
            f"{head.folder} is neither an EAGLE-1/2 head (fc, layers.0) nor an EAGLE-3 head (fc, midlayer or layers.0 "
            "with hidden_norm), and has no multi-token-prediction layer and no Medusa or Hydra heads: "
            f"it holds {some}; docs/heads.md lists the layouts"
        )
    config = _flat_config(head, layout)
    tensors = {_official_name(name, layout): tensor for name, tensor in head.tensors.items()}
    if len(tensors) < len(head.tensors):
        raise ExportError(
            f"{head.folder} holds a tensor under two names of the {layout.producer} layout; it is damaged"
        )
    return layout, replace(head, config=config, tensors=tensors)


def _official_name(name: str, layout: HeadLayout) -> str:
    if layout.kind == "eagle3" and name.startswith(layout.layer):
        return "midlayer." + name.removeprefix(layout.layer)
    return {"draft_id_to_target_id": "d2t"}.get(name, name)


def _flat_config(head: Checkpoint, layout: HeadLayout) -> dict[str, Any]:
    where = head.folder / "config.json"
    config = dict(head.config)
    if layout.nested is not None:
        inner = config.pop(layout.nested, {})
        if not isinstance(inner, Mapping):
            raise ExportError(f"{where}: {layout.nested} is {inner!r}, but must be an object")
        if (kind := inner.get("model_type", "llama")) not in LLAMA_TYPES:
            raise ExportError(
                f"{where}: the head's layer is of type {kind!r}, but only {', '.join(LLAMA_TYPES)} layers are known"
            )
        config = {**dict(layout.defaults), **{key: config[key] for key in config if key not in inner}, **inner}
        if "eagle_fc_bias" in config:  # vLLM's name; the wrapped config has it as an extra key
            config["bias"] = config["eagle_fc_bias"]
    return config


def _refuse_known(head: Checkpoint) -> None:
    where = head.folder / "config.json"
    if blocks := [name for name in head.architectures if re.search(OTHER_HEADS, name)]:
        raise ExportError(f"{where}: {blocks[0]} is not an EAGLE head; docs/heads.md lists the layouts that are read")
    kind = head.config.get("speculators_model_type", "eagle3")
    if kind != "eagle3":
        raise ExportError(f"{where}: this is a speculators head of type {kind!r}, but only 'eagle3' and 'mtp' are read")
    _refuse_contents(head)
    settings = head.config.get("eagle_config") or {}
    for key, read in READ_EAGLE_KEYS:
        if settings.get(key) not in read:
            raise ExportError(f"{where}: eagle_config.{key} is {settings[key]!r}, a variant that is not supported")


def _refuse_layer(head: Checkpoint, layout: HeadLayout) -> None:
    """Raises ExportError for a multi-token-prediction layer that is no plain decoder layer. head: by official names."""
    _refuse_contents(head)
    kind = head.config.get("model_type")
    if layout.nested is None and kind not in PREDICTING:
        raise ExportError(
            f"{head.folder / 'config.json'}: a multi-token-prediction layer of a model of type {kind!r} is not known, "
            f"only of {', '.join(PREDICTING)}"
        )


def _refuse_heads(head: Checkpoint) -> None:
    """Raises ExportError for Hydra heads with more than small networks. head: with the official names."""
    if others := sorted(name for name in head.tensors if name.startswith(OTHER_PARTS)):
        raise ExportError(
            f"{head.folder} holds {head.tensors[others[0]].name!r}: Hydra heads with a decoder layer (prefix-mlp, "
            "cross-attn, eagle-attn) are not supported, only those of architecture 'mlp'"
        )
    _refuse_contents(head)


def _refuse_contents(head: Checkpoint) -> None:
    """Raises ExportError for tensors and settings of what is known and cannot be exported."""
    for pattern, what in REFUSED_TENSORS:
        if names := sorted(name for name in head.tensors if re.search(pattern, name)):
            raise ExportError(
                f"{head.folder} holds {head.tensors[names[0]].name!r}: it is {what}, which is not supported"
            )
    for key, why in REFUSED_KEYS:
        if head.config.get(key):
            raise ExportError(f"{head.folder / 'config.json'}: {key} is set: {why}")
