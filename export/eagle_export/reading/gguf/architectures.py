"""llama.cpp's architectures that hold families of this exporter: what their tensors are called there, and their config.

What a file does not say is what llama.cpp fills in when it loads one (src/models/*.cpp of ggml-org/llama.cpp).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from eagle_export.base.errors import ExportError
from eagle_export.reading.gguf.file import GgufFile, Order
from eagle_export.reading.gguf.gemma4 import gemma4_config
from eagle_export.reading.gguf.qwen35 import qwen35_config, value_order
from eagle_export.reading.gguf.rope import rope_parameters

Config = dict[str, Any]
Shape = tuple[int, ...]
TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
TABLES = {  # of what is added to each layer, by token
    "per_layer_token_embd.weight": "model.embed_tokens_per_layer.weight",
    "per_layer_model_proj.weight": "model.per_layer_model_projection.weight",
    "per_layer_proj_norm.weight": "model.per_layer_projection_norm.weight",
}
PROJECTIONS = {
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
}
MLP = {"ffn_gate": "mlp.gate_proj", "ffn_up": "mlp.up_proj", "ffn_down": "mlp.down_proj"}
QK_NORMS = {"attn_q_norm": "self_attn.q_norm", "attn_k_norm": "self_attn.k_norm"}
BEFORE_BOTH = {"attn_norm": "input_layernorm", "post_attention_norm": "post_attention_layernorm"}
BEFORE = {"attn_norm": "input_layernorm", "ffn_norm": "post_attention_layernorm"}
AFTER = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
AROUND = {"attn_norm": "input_layernorm", "ffn_norm": "pre_feedforward_layernorm", **AFTER}
DELTA_NET = {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_alpha": "linear_attn.in_proj_a",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_a": "linear_attn.A_log",
    "ssm_dt": "linear_attn.dt_bias",
    "ssm_conv1d": "linear_attn.conv1d",
    "ssm_norm": "linear_attn.norm",
    "ssm_out": "linear_attn.out_proj",
}
STATE_SPACE = {
    "ssm_in": "mamba.in_proj",
    "ssm_conv1d": "mamba.conv1d",
    "ssm_dt": "mamba.dt_bias",
    "ssm_a": "mamba.A_log",
    "ssm_d": "mamba.D",
    "ssm_norm": "mamba.norm",
    "ssm_out": "mamba.out_proj",
}
SHARED_MLP = {"gate": "shared_mlp.gate_proj", "up": "shared_mlp.up_proj", "down": "shared_mlp.output_linear"}
LLAMA_NAMES = {**PROJECTIONS, **MLP, **BEFORE}
NORMS_AFTER = {**PROJECTIONS, **MLP, **AFTER, **QK_NORMS}
EXPERTS = {f"ffn_{name}": f"mlp.experts.{{}}.{name}_proj" for name in ("gate", "up", "gate_up", "down")}
SHARED = {f"ffn_{name}_shexp": f"mlp.shared_experts.{name}_proj" for name in ("gate", "up", "down")}
SHARED_GATED = {  # of an MLP that a sigmoid multiplies
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    **{name: part.replace("shared_experts", "shared_expert") for name, part in SHARED.items()},
}
BESIDE_EXPERTS = {  # of Gemma-4
    "ffn_gate_inp": "router.proj",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
CORRECTED = "exp_probs_b"  # what is added to the shares by which experts are chosen
W123 = {"gate": "w1", "down": "w2", "up": "w3"}
MIXTRAL = {f"ffn_{name}": f"block_sparse_moe.experts.{{}}.{part}" for name, part in W123.items()}
LFM2_NAMES = {
    **PROJECTIONS,
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    **{f"ffn_{name}": f"feed_forward.{part}" for name, part in W123.items()},
    **{f"shortconv.{name}": f"conv.{name}" for name in ("in_proj", "conv", "out_proj")},
    "attn_norm": "operator_norm",
    "ffn_norm": "ffn_norm",
}
LFM2_TOP = {**TOP, **dict.fromkeys(("token_embd_norm.weight", "output_norm.weight"), "model.embedding_norm.weight")}


@dataclass(frozen=True, slots=True)
class Architecture:
    """model_type: of the config. layer: name of a part of a block -> name in a layer. config: file, the config of all
    -> what differs in it. layers: file -> what a config says of layers that are not alike; None for equal ones. top:
    names of what belongs to no layer. turned: whether rows of queries and keys are in llama.cpp's order. norm_added:
    what the gains of norms have in addition to the checkpoint's. partly: whether a part of each head may be rotated
    alone. experts: part of a block -> name of an expert's, with {} for its number. bare: parts of a block whose names
    in a layer end with them, without "weight". shaped: part -> its shape in a checkpoint, made of that in a file.
    ordered: file, part, its shape -> the order of its numbers where it is not a checkpoint's. exponential: parts that
    are -exp of a checkpoint's. eps: of norms, where a file need not say it."""

    model_type: str
    layer: Mapping[str, str]
    config: Callable[[GgufFile, Config], Config] = lambda file, config: {}
    layers: Callable[[GgufFile], Config] | None = None
    top: Mapping[str, str] = field(default_factory=lambda: TOP)
    turned: bool = False
    norm_added: float = 0.0
    partly: bool = False
    experts: Mapping[str, str] = field(default_factory=dict)
    bare: tuple[str, ...] = ()
    shaped: Mapping[str, Callable[[Shape], Shape]] = field(default_factory=dict)
    ordered: Callable[[GgufFile, str, Shape], Order | None] = lambda file, part, shape: None
    exponential: tuple[str, ...] = ()
    eps: float | None = None


def _biases(file: GgufFile, config: Config) -> Config:
    return {"attention_bias": "blk.0.attn_q.bias" in file.tensors or "blk.0.attn_qkv.bias" in file.tensors}


def _llama(file: GgufFile, config: Config) -> Config:
    return {
        **_biases(file, config),
        "mlp_bias": "blk.0.ffn_up.bias" in file.tensors,
    }


def _mixtral(file: GgufFile, config: Config) -> Config:
    counts = {"num_local_experts": "expert_count", "num_experts_per_tok": "expert_used_count"}
    return {**{key: file.integer(name) for key, name in counts.items()}, "sliding_window": None}


def _ministral3(file: GgufFile, config: Config) -> Config:
    scaling = {
        "mscale": 1.0,
        "mscale_all_dim": file.number("rope.scaling.yarn_log_multiplier"),
        "llama_4_scaling_beta": file.number("attention.temperature_scale"),
    }
    return {"sliding_window": None, "rope_parameters": {**config["rope_parameters"], **scaling}}


def _smollm3(file: GgufFile, config: Config) -> Config:
    rotated = [int((layer + 1) % 4 != 0) for layer in range(config["num_hidden_layers"])]
    return {**_biases(file, config), "no_rope_layers": rotated, "use_sliding_window": False}


def _granite(file: GgufFile, config: Config) -> Config:
    if file.optional("rope.scaling.finetuned") is False:  # how llama.cpp says so of this family
        raise ExportError(f"{file.path}: the model does not rotate queries and keys, which is not supported")
    return {**_llama(file, config), **_granite_scales(file, config["head_dim"])}


def _granite_scales(file: GgufFile, width: int) -> Config:
    return {
        "attention_multiplier": file.number("attention.scale", width**-0.5),
        "embedding_multiplier": file.number("embedding_scale", 1.0),
        "residual_multiplier": file.number("residual_scale", 1.0),
        "logits_scaling": file.number("logit_scale"),
    }


def _granite4(file: GgufFile) -> Config:
    """Layers with a state space have no key/value heads."""
    key, hidden, experts = "attention.head_count_kv", file.integer("embedding_length"), file.count("expert_count")
    width = hidden // file.integer("attention.head_count")
    mixture = {"num_experts_per_tok": file.integer("expert_used_count")} if experts else {}
    shared = file.integer("expert_shared_feed_forward_length" if experts else "feed_forward_length")
    return {
        "attention_bias": any(name.endswith(".attn_q.bias") for name in file.tensors),
        **_granite_scales(file, width),
        **mixture,
        "num_local_experts": experts,
        "intermediate_size": file.integer("feed_forward_length"),
        "shared_intermediate_size": shared,
        "num_key_value_heads": file.one_of_some_layers(key),
        "layer_types": ["full_attention" if each else "linear_attention" for each in file.each_layer(key, least=0)],
        "position_embedding_type": "nope" if file.optional("rope.scaling.finetuned") is False else "rope",
        "rope_parameters": rope_parameters(file, width),
        "mamba_n_heads": file.integer("ssm.time_step_rank"),
        "mamba_n_groups": file.integer("ssm.group_count"),
        "mamba_d_state": file.integer("ssm.state_size"),
        "mamba_d_conv": file.integer("ssm.conv_kernel"),
        "mamba_expand": file.integer("ssm.inner_size") // hidden,
    }


def _granite_moe(file: GgufFile, config: Config) -> Config:
    counts = _mixtral(file, config)
    return {**_granite(file, config), **{name: counts[name] for name in ("num_local_experts", "num_experts_per_tok")}}


def _part_rotated(file: GgufFile, config: Config) -> Config:
    share = file.integer("rope.dimension_count", config["head_dim"]) / config["head_dim"]
    rope = {**config["rope_parameters"], "partial_rotary_factor": share}
    return {"partial_rotary_factor": share, "rope_parameters": rope}


def _phi3(file: GgufFile, config: Config) -> Config:
    original = file.integer("rope.scaling.original_context_length", config["max_position_embeddings"])
    window = file.optional("attention.sliding_window")  # 0 for Phi-4
    return {
        "original_max_position_embeddings": original,
        **_part_rotated(file, config),
        "sliding_window": window or None,
        "head_dim": None,
    }


def _gemma2(file: GgufFile, config: Config) -> Config:
    return {
        "sliding_window": file.integer("attention.sliding_window", 4096),
        "layer_types": _layer_types(file, config, 2),
        "attn_logit_softcapping": file.number("attn_logit_softcapping", 50.0),
        "final_logit_softcapping": file.number("final_logit_softcapping", 30.0),
        "query_pre_attn_scalar": _scalar(config, 46),
    }


def _gemma3(file: GgufFile, config: Config) -> Config:
    """Ollama's converter has names of its own for what rotates, or leaves out what all models with images have."""
    window, cap = file.optional("attention.sliding_window"), file.optional("final_logit_softcapping")
    far, local = (file.number(f"rope.{kind}.freq_base", base) for kind, base in (("global", 1e6), ("local", 1e4)))
    full = {**config["rope_parameters"], "rope_theta": file.number("rope.freq_base", far)}
    near = {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", local)}
    if file.optional("mm.tokens_per_image") and not file.optional("rope.freq_base") and full["rope_type"] == "default":
        full |= {"rope_type": "linear", "factor": 8.0}
    return {
        "sliding_window": window or config["max_position_embeddings"],
        "layer_types": _layer_types(file, config, 6 if window else 1),
        "final_logit_softcapping": cap and file.number("final_logit_softcapping"),
        "query_pre_attn_scalar": _scalar(config, 62),
        "rope_parameters": {"full_attention": full, "sliding_attention": near},
    }


def _layer_types(file: GgufFile, config: Config, period: int) -> list[str]:
    """Every `period`-th layer sees all keys, the others have a window."""
    stated = file.optional("attention.sliding_window_pattern")
    layers = range(config["num_hidden_layers"])
    if isinstance(stated, list) and len(stated) == len(layers):
        windowed = [bool(each) for each in stated]
    else:
        period = stated if type(stated) is int and stated > 0 else period
        windowed = [(layer + 1) % period != 0 for layer in layers]
    return ["sliding_attention" if each else "full_attention" for each in windowed]


def _scalar(config: Config, largest: int) -> int:
    """The largest model of Gemma-2 and of Gemma-3 divides scores by the root of another width than its heads'."""
    if config["num_hidden_layers"] == largest:
        return int(config["hidden_size"] // config["num_attention_heads"])
    return int(config["head_dim"])


def _no_window(file: GgufFile, config: Config) -> Config:
    return {**_biases(file, config), "use_sliding_window": False}


def _qwen3_moe(file: GgufFile, config: Config) -> Config:
    used = file.integer("expert_used_count")
    return {
        **_biases(file, config),
        "num_experts": file.integer("expert_count"),
        "num_experts_per_tok": used,
        "moe_intermediate_size": file.integer("expert_feed_forward_length", config["intermediate_size"] // used),
        "norm_topk_prob": True,  # llama.cpp always does it
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "sliding_window": None,
        "use_sliding_window": False,
    }


def _olmoe(file: GgufFile, config: Config) -> Config:
    clip = file.optional("attention.clamp_kqv")
    return {
        **_biases(file, config),
        "num_experts": file.integer("expert_count"),
        "num_experts_per_tok": file.integer("expert_used_count"),
        "norm_topk_prob": False,
        "clip_qkv": clip and file.number("attention.clamp_kqv"),
    }


def _olmo3(file: GgufFile, config: Config) -> Config:
    full = config["rope_parameters"]
    near = {"rope_type": "default", "rope_theta": file.number("rope.freq_base_swa", full["rope_theta"])}
    return {
        **_biases(file, config),
        "sliding_window": file.integer("attention.sliding_window"),
        "layer_types": _layer_types(file, config, 4),
        "rope_parameters": {"full_attention": full, "sliding_attention": near},
    }


def _exaone4(file: GgufFile, config: Config) -> Config:
    window = file.optional("attention.sliding_window")
    return {"sliding_window": window or None, "layer_types": _layer_types(file, config, 4 if window else 1)}


def _gpt_oss(file: GgufFile, config: Config) -> Config:
    rope = config["rope_parameters"]
    return {
        **_mixtral(file, config),
        "attention_bias": True,
        "intermediate_size": file.integer("expert_feed_forward_length", config["intermediate_size"]),
        "sliding_window": file.integer("attention.sliding_window"),
        "layer_types": _layer_types(file, config, 2),
        # llama.cpp keeps whole numbers of the bounds between frequencies, transformers not.
        "rope_parameters": {**rope, "truncate": False} if rope["rope_type"] == "yarn" else rope,
    }


def _glm4(file: GgufFile, config: Config) -> Config:
    return {**_biases(file, config), **_part_rotated(file, config)}


def _ernie(file: GgufFile, config: Config) -> Config:
    return {"use_bias": "blk.0.attn_q.bias" in file.tensors}


def _ernie_moe(file: GgufFile, config: Config) -> Config:
    return {
        **_ernie(file, config),
        "moe_num_experts": file.integer("expert_count"),
        "moe_k": file.integer("expert_used_count"),
        "moe_intermediate_size": file.integer("expert_feed_forward_length"),
        "moe_num_shared_experts": file.count("expert_shared_count"),
        "moe_layer_start_index": file.count("leading_dense_block_count"),
        "moe_layer_end_index": config["num_hidden_layers"] - 1,
        "moe_layer_interval": file.integer("interleave_moe_layer_step", 1),
    }


def _glm4_moe(file: GgufFile, config: Config) -> Config:
    return {
        **_glm4(file, config),
        "n_routed_experts": file.integer("expert_count"),
        "num_experts_per_tok": file.integer("expert_used_count"),
        "moe_intermediate_size": file.integer("expert_feed_forward_length"),
        "n_shared_experts": file.integer("expert_shared_count"),
        "first_k_dense_replace": file.count("leading_dense_block_count"),
        "routed_scaling_factor": file.number("expert_weights_scale", 1.0),
        "norm_topk_prob": bool(file.optional("expert_weights_norm")),
        "use_qk_norm": "blk.0.attn_q_norm.weight" in file.tensors,
    }


def _lfm2(file: GgufFile) -> Config:
    """Layers with a convolution have no key/value heads."""
    key = "attention.head_count_kv"
    return {
        "intermediate_size": file.integer("feed_forward_length"),
        "block_auto_adjust_ff_dim": False,
        "num_key_value_heads": file.one_of_some_layers(key),
        "layer_types": ["full_attention" if each else "conv" for each in file.each_layer(key, least=0)],
        "conv_L_cache": file.integer("shortconv.l_cache"),
        "norm_eps": file.number("attention.layer_norm_rms_epsilon"),
        "rope_parameters": rope_parameters(
            file, file.integer("embedding_length") // file.integer("attention.head_count")
        ),
    }


def _lfm2_moe(file: GgufFile, config: Config) -> Config:
    return {
        "num_experts": file.integer("expert_count"),
        "num_experts_per_tok": file.integer("expert_used_count"),
        "moe_intermediate_size": file.integer("expert_feed_forward_length"),
        "num_dense_layers": file.count("leading_dense_block_count"),
        "routed_scaling_factor": file.number("expert_weights_scale", 1.0),
        "norm_topk_prob": True,  # llama.cpp always does it
    }


def _seed_oss(file: GgufFile, config: Config) -> Config:
    return {**_biases(file, config), "attention_out_bias": "blk.0.attn_output.bias" in file.tensors}


def _channels(shape: Shape) -> Shape:
    """Of a convolution of each channel, which a file has as a matrix, and of its bias."""
    return (shape[0], 1, *shape[1:]) if len(shape) > 1 else shape


def _numbers(shape: Shape) -> Shape:
    """Of a vector, which a file has as a matrix."""
    return (math.prod(shape),)


QWEN35 = Architecture(
    "qwen3_5_text",
    {**PROJECTIONS, **MLP, **BEFORE_BOTH, **QK_NORMS, **DELTA_NET},
    layers=qwen35_config,
    norm_added=1.0,
    bare=("ssm_a", "ssm_dt"),
    shaped={"ssm_conv1d": _channels},
    ordered=value_order,
    exponential=("ssm_a",),
)
QWEN35_MOE = replace(
    QWEN35,
    model_type="qwen3_5_moe_text",
    layer={**QWEN35.layer, **SHARED_GATED, "ffn_gate_inp": "mlp.gate"},
    experts=EXPERTS,
    shaped={**QWEN35.shaped, "ffn_gate_inp_shexp": lambda shape: (1, shape[-1])},
)
LFM2_SHAPED: Mapping[str, Callable[[Shape], Shape]] = {"shortconv.conv": _channels}
ARCHITECTURES = {
    "llama": Architecture("llama", LLAMA_NAMES, _llama, turned=True),
    "qwen2": Architecture("qwen2", LLAMA_NAMES, _no_window),
    "qwen3": Architecture("qwen3", {**LLAMA_NAMES, **QK_NORMS}, _no_window),
    "qwen35": QWEN35,
    "qwen35moe": QWEN35_MOE,
    "qwen3next": replace(  # whose values stay in a checkpoint's order
        QWEN35_MOE,
        model_type="qwen3_next",
        layer={**QWEN35_MOE.layer, "ssm_ba": "linear_attn.in_proj_ba", "ssm_in": "linear_attn.in_proj_qkvz"},
        ordered=lambda file, part, shape: None,
    ),
    "phi3": Architecture(
        "phi3",
        {
            "attn_qkv": "self_attn.qkv_proj",
            "attn_output": "self_attn.o_proj",
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
            **BEFORE,
        },
        _phi3,
        partly=True,
    ),
    "gemma": Architecture("gemma", LLAMA_NAMES, norm_added=1.0),
    "gemma2": Architecture("gemma2", {**PROJECTIONS, **MLP, **AROUND}, _gemma2, norm_added=1.0),
    "gemma3": Architecture(
        "gemma3_text", {**PROJECTIONS, **MLP, **AROUND, **QK_NORMS}, _gemma3, norm_added=1.0, eps=1e-6
    ),
    "gemma4": Architecture(
        "gemma4_text",
        {
            **PROJECTIONS,
            **MLP,
            **AROUND,
            **QK_NORMS,
            "inp_gate": "per_layer_input_gate",
            "proj": "per_layer_projection",
            "post_norm": "post_per_layer_input_norm",
            "layer_output_scale": "layer_scalar",
            **BESIDE_EXPERTS,
        },
        layers=gemma4_config,
        top={**TOP, **TABLES},
        experts={name: part.removeprefix("mlp.") for name, part in EXPERTS.items()},
        bare=("layer_output_scale", "ffn_gate_inp.scale", "ffn_down_exps.scale"),
    ),
    "smollm3": Architecture("smollm3", LLAMA_NAMES, _smollm3, turned=True),
    "granite": Architecture("granite", LLAMA_NAMES, _granite, turned=True),
    "granitemoe": Architecture(
        "granitemoe",
        {**PROJECTIONS, **BEFORE, "ffn_gate_inp": "block_sparse_moe.router"},
        _granite_moe,
        turned=True,
        experts={name: part.replace("mlp", "block_sparse_moe") for name, part in EXPERTS.items()},
    ),
    "granitehybrid": Architecture(
        "granitemoehybrid",
        {
            **PROJECTIONS,
            **BEFORE,
            **STATE_SPACE,
            **{f"ffn_{name}{end}": part for name, part in SHARED_MLP.items() for end in ("", "_shexp")},
            "ffn_gate_inp": "block_sparse_moe.router",
        },
        layers=_granite4,
        turned=True,
        experts={name: part.replace("mlp", "block_sparse_moe") for name, part in EXPERTS.items()},
        bare=("ssm_a", "ssm_d", "ssm_dt"),
        shaped={"ssm_conv1d": _channels, **dict.fromkeys(("ssm_a", "ssm_d", "ssm_norm"), _numbers)},
        exponential=("ssm_a",),
    ),
    "olmo2": Architecture("olmo2", NORMS_AFTER, _biases),
    "glm4": Architecture(
        "glm4",
        {
            **PROJECTIONS,
            "ffn_up": "mlp.gate_up_proj",
            "ffn_down": "mlp.down_proj",
            **BEFORE,
            "post_attention_norm": "post_self_attn_layernorm",
            "post_ffw_norm": "post_mlp_layernorm",
        },
        _glm4,
        partly=True,
    ),
    "ernie4_5": Architecture("ernie4_5", LLAMA_NAMES, _ernie),
    "ernie4_5-moe": Architecture(
        "ernie4_5_moe",
        {**LLAMA_NAMES, **SHARED, "ffn_gate_inp": "mlp.gate", CORRECTED: "mlp.moe_statics.e_score_correction_bias"},
        _ernie_moe,
        experts=EXPERTS,
        bare=(CORRECTED,),
        shaped={CORRECTED: lambda shape: (1, *shape)},
    ),
    "glm4moe": Architecture(
        "glm4_moe",
        {
            **PROJECTIONS,
            **MLP,
            **SHARED,
            **BEFORE_BOTH,
            "ffn_gate_inp": "mlp.gate",
            CORRECTED: "mlp.gate.e_score_correction_bias",
        },
        _glm4_moe,
        partly=True,
        experts=EXPERTS,
        bare=(CORRECTED,),
    ),
    "hunyuan-dense": Architecture(
        "hunyuan_v1_dense",
        {**LLAMA_NAMES, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"},
        _biases,
    ),
    "exaone4": Architecture("exaone4", NORMS_AFTER, _exaone4),
    "lfm2": Architecture("lfm2", LFM2_NAMES, layers=_lfm2, top=LFM2_TOP, shaped=LFM2_SHAPED),
    "lfm2moe": Architecture(
        "lfm2_moe",
        {**LFM2_NAMES, "ffn_gate_inp": "feed_forward.gate", CORRECTED: "feed_forward.expert_bias"},
        _lfm2_moe,
        layers=_lfm2,
        top=LFM2_TOP,
        experts={f"ffn_{name}": f"feed_forward.experts.{{}}.{part}" for name, part in W123.items()},
        bare=(CORRECTED,),
        shaped=LFM2_SHAPED,
    ),
    "seed_oss": Architecture(
        "seed_oss",
        {**PROJECTIONS, **MLP, **BEFORE_BOTH},
        _seed_oss,
    ),
    "mistral3": Architecture("ministral3", LLAMA_NAMES, _ministral3, turned=True),
    "arcee": Architecture("arcee", LLAMA_NAMES, _llama, turned=True),
    "qwen3moe": Architecture(
        "qwen3_moe", {**PROJECTIONS, **BEFORE, **QK_NORMS, "ffn_gate_inp": "mlp.gate"}, _qwen3_moe, experts=EXPERTS
    ),
    "olmoe": Architecture(
        "olmoe", {**PROJECTIONS, **BEFORE, **QK_NORMS, "ffn_gate_inp": "mlp.gate"}, _olmoe, experts=EXPERTS
    ),
    "gpt-oss": Architecture(
        "gpt_oss",
        {
            **PROJECTIONS,
            **BEFORE_BOTH,
            "attn_sinks": "self_attn.sinks",
            "ffn_gate_inp": "mlp.router",
        },
        _gpt_oss,
        experts=EXPERTS,
        bare=("attn_sinks",),
    ),
}
# Of architecture llama too, as Mistral is, which is a Llama there: windows are not stored.
MIXTRAL_OF_LLAMA = Architecture(
    "mixtral",
    {**PROJECTIONS, **BEFORE, "ffn_gate_inp": "block_sparse_moe.gate"},
    _mixtral,
    turned=True,
    experts=MIXTRAL,
)
# Of architecture olmo2 too, with windows.
OLMO3_OF_OLMO2 = Architecture("olmo3", NORMS_AFTER, _olmo3)


def architecture_of(file: GgufFile) -> Architecture:
    """Returns the architecture of a file. Raises ExportError for one that holds no family of this exporter."""
    kind = file.metadata.get("general.type", "model")
    if kind != "model":  # such a file need not name an architecture
        raise ExportError(f"{file.path} holds a {kind}, no model; give the file of the model")
    name = file.architecture
    if file.optional("pooling_type") or file.optional("attention.causal") is False:
        raise ExportError(f"{file.path} holds a model of embeddings, which writes no text; give a model that does")
    if name not in ARCHITECTURES:
        raise ExportError(
            f"{file.path} holds a model of architecture {name!r}, but only {', '.join(map(repr, ARCHITECTURES))} are "
            "supported as GGUF; export the original checkpoint if its family is (docs/families.md)"
        )
    if name == "llama" and file.optional("expert_count"):
        return MIXTRAL_OF_LLAMA
    if name == "mistral3" and not file.optional("attention.temperature_scale"):  # Mistral Small 3.1 and 3.2
        return ARCHITECTURES["llama"]
    if name == "olmo2" and file.optional("attention.sliding_window"):
        return OLMO3_OF_OLMO2
    return ARCHITECTURES[name]


def config_of(file: GgufFile, architecture: Architecture) -> Config:
    """Returns the content of a config.json, without the ids of special tokens. Raises ExportError."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None:
        raise ExportError(f"{file.path} has no tensor 'token_embd.weight'; it holds no whole model")
    config: Config = {
        "model_type": architecture.model_type,
        "hidden_size": file.integer("embedding_length"),
        "num_hidden_layers": file.layers,
        "num_attention_heads": file.integer("attention.head_count"),
        "vocab_size": embedding.shape[0],
        "max_position_embeddings": file.integer("context_length"),
        "rms_norm_eps": file.number("attention.layer_norm_rms_epsilon", architecture.eps),
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "pad_token_id": None,
    }
    config |= _equal_layers(file, architecture, config) if architecture.layers is None else architecture.layers(file)
    config |= architecture.config(file, config)
    return {
        key: value for key, value in config.items() if value is not None or key in ("sliding_window", "pad_token_id")
    }


def _equal_layers(file: GgufFile, architecture: Architecture, config: Config) -> Config:
    """Widths, heads and rotation of layers that have the same."""
    heads = config["num_attention_heads"]
    head_dim = file.integer("attention.key_length", max(1, config["hidden_size"] // heads))
    if file.integer("attention.value_length", head_dim) != head_dim:
        raise ExportError(f"{file.path}: keys and values of a head differ in width, which is not supported")
    if not architecture.partly and file.integer("rope.dimension_count", head_dim) != head_dim:
        raise ExportError(f"{file.path}: a part of each head is rotated, which {file.architecture} is not known to do")
    return {
        "intermediate_size": file.integer("feed_forward_length"),
        "num_key_value_heads": file.integer("attention.head_count_kv", heads),
        "head_dim": head_dim,
        "rope_parameters": rope_parameters(file, head_dim),
    }
