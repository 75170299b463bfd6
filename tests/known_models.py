"""Published targets and heads as headers: their config.json and the names, shapes and types of their tensors.

Weights are not here: a file has its header and is as long as the real one, without using the disk (files with holes).
Sizes of targets are those of Lightning-AI/litgpt, litgpt/config.py, which cites each model's config.json, and for the
families that cannot be exported the defaults of transformers' config classes, which are of these models. MiMo's are
in NVIDIA-NeMo/Megatron-Bridge, tests/unit_tests/models/mimo/test_mimo_bridge.py; Qwen3.5's add up to the parameters
and bytes that the hub states of each. Heads follow the configurations that
their producers train with: see docs/dev/inspect.md.
"""

from __future__ import annotations

import json
from math import prod
from pathlib import Path
from typing import Any

Config = dict[str, Any]
Shapes = dict[str, tuple[str, tuple[int, ...]]]
WIDTHS = {"F16": 2, "BF16": 2, "F32": 4, "I64": 8, "BOOL": 1, "U8": 1}


def sizes(kind: str, hidden: int, mlp: int, layers: int, heads: int, kv: int, vocab: int, context: int) -> Config:
    return {
        "model_type": kind,
        "hidden_size": hidden,
        "intermediate_size": mlp,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": kv,
        "vocab_size": vocab,
        "max_position_embeddings": context,
        "tie_word_embeddings": False,
    }


def qwen3(hidden: int, mlp: int, layers: int, heads: int, tied: bool = False) -> Config:
    base = sizes("qwen3", hidden, mlp, layers, heads, 8, 151936, 40960)
    return {**base, "head_dim": 128, "tie_word_embeddings": tied}


def qwen3_moe(context: int) -> Config:
    experts = {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768, "head_dim": 128}
    return {**sizes("qwen3_moe", 2048, 6144, 48, 32, 4, 151936, context), **experts}


def delta_nets(values: int) -> Config:
    """values: heads of values."""
    return {
        "linear_conv_kernel_dim": 4,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": values,
    }


def qwen35(hidden: int, mlp: int, layers: int, heads: int, kv: int, values: int, tied: bool = True) -> Config:
    """values: heads of a delta net's values. Without the settings of the part for images."""
    rope = {"rope_type": "default", "rope_theta": 10000000, "partial_rotary_factor": 0.25}
    own = {
        "head_dim": 256,
        "tie_word_embeddings": tied,
        "layer_types": (["linear_attention"] * 3 + ["full_attention"]) * (layers // 4),
        **delta_nets(values),
        "mtp_num_hidden_layers": 1,
        "rope_parameters": {"mrope_interleaved": True, "mrope_section": [11, 11, 10], **rope},
    }
    text = {**sizes("qwen3_5_text", hidden, mlp, layers, heads, kv, 248320, 262144), **own}
    return {"model_type": "qwen3_5", "tie_word_embeddings": tied, "text_config": text}


def gpt_oss(layers: int, experts: int) -> Config:
    return {
        **sizes("gpt_oss", 2880, 2880, layers, 64, 8, 201088, 131072),
        "head_dim": 64,
        "num_local_experts": experts,
        "num_experts_per_tok": 4,
        "attention_bias": True,
        "sliding_window": 128,
        "layer_types": ["sliding_attention", "full_attention"] * (layers // 2),
        "quantization_config": {"quant_method": "mxfp4"},
    }


LLAMA3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA3 |= {"original_max_position_embeddings": 8192}
LLAMA_31 = {**sizes("llama", 4096, 14336, 32, 32, 8, 128256, 131072), "rope_theta": 500000.0, "rope_scaling": LLAMA3}
MIMO = {
    **sizes("mimo", 4096, 11008, 36, 32, 8, 151680, 32768),
    "architectures": ["MiMoForCausalLM"],
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
    "rms_norm_eps": 1e-5,
    "rope_theta": 640000.0,
}
TARGETS: dict[str, Config] = {
    "meta-llama/Llama-2-7b-chat-hf": sizes("llama", 4096, 11008, 32, 32, 32, 32000, 4096),
    "meta-llama/Llama-2-13b-chat-hf": sizes("llama", 5120, 13824, 40, 40, 40, 32000, 4096),
    "meta-llama/Meta-Llama-3-8B-Instruct": sizes("llama", 4096, 14336, 32, 32, 8, 128256, 8192),
    "meta-llama/Llama-3.1-8B-Instruct": LLAMA_31,
    "deepseek-ai/DeepSeek-R1-Distill-Llama-8B": LLAMA_31,
    "mistralai/Mixtral-8x7B-Instruct-v0.1": {
        **sizes("mixtral", 4096, 14336, 32, 32, 8, 32000, 32768),
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "Qwen/Qwen3-1.7B": qwen3(2048, 6144, 28, 16, tied=True),
    "Qwen/Qwen3-4B": qwen3(2560, 9728, 36, 32, tied=True),
    "Qwen/Qwen3-8B": qwen3(4096, 12288, 36, 32),
    "Qwen/Qwen3-14B": qwen3(5120, 17408, 40, 40),
    "Qwen/Qwen3-32B": qwen3(5120, 25600, 64, 64),
    "Qwen/Qwen3-30B-A3B": qwen3_moe(40960),
    "Qwen/Qwen3-30B-A3B-Instruct-2507": qwen3_moe(262144),
    "Qwen/Qwen3.5-0.8B": qwen35(1024, 3584, 24, 8, 2, 16),
    "Qwen/Qwen3.5-2B": qwen35(2048, 6144, 24, 8, 2, 16),
    "Qwen/Qwen3.5-4B": qwen35(2560, 9216, 32, 16, 4, 32),
    "Qwen/Qwen3.5-9B": qwen35(4096, 12288, 32, 16, 4, 32, tied=False),
    "XiaomiMiMo/MiMo-7B-RL": MIMO,
    "XiaomiMiMo/MiMo-7B-RL-0530": {**MIMO, "max_position_embeddings": 65536},
    "zai-org/GLM-4.5-Air": {
        **sizes("glm4_moe", 4096, 10944, 46, 96, 8, 151552, 131072),
        "head_dim": 128,
        "n_routed_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1408,
        "num_nextn_predict_layers": 1,
    },
    "deepseek-ai/DeepSeek-V3": sizes("deepseek_v3", 7168, 18432, 61, 128, 128, 129280, 4096),
    "openai/gpt-oss-120b": gpt_oss(36, 128),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": {
        **sizes("qwen3_next", 2048, 5632, 48, 16, 2, 151936, 262144),
        **delta_nets(32),
        "head_dim": 256,
        "num_experts": 512,
        "num_experts_per_tok": 10,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "full_attention_interval": 4,
        "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "meta-llama/Llama-4-Scout-17B-16E-Instruct": {
        "model_type": "llama4",
        "text_config": {**sizes("llama4_text", 5120, 8192, 48, 40, 8, 202048, 131072), "head_dim": 128},
    },
}


# LM heads that are stored next to the embedding to which config.json ties them.
COPIES: dict[str, Shapes] = {"Qwen/Qwen3-1.7B": {"lm_head.weight": ("BF16", (151936, 2048))}}


def target_tensors(config: Config) -> Shapes:
    """As transformers names them. Of families that cannot be exported the embedding alone is made."""
    config = config.get("text_config", config)
    h, v, kind = config["hidden_size"], config["vocab_size"], config["model_type"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (v, h)}
    if kind not in (
        "llama",
        "qwen3",
        "mimo",
        "mixtral",
        "qwen3_moe",
        "gpt_oss",
        "glm4_moe",
        "qwen3_5_text",
        "qwen3_next",
    ):
        return {name: ("BF16", shape) for name, shape in shapes.items()}
    if kind == "gpt_oss":
        return gpt_oss_tensors(config)
    if kind == "glm4_moe":
        return glm_air_tensors(config)
    if kind == "qwen3_5_text":
        return qwen35_tensors(config)
    if kind == "qwen3_next":
        return qwen3_next_tensors(config)
    shapes["model.norm.weight"] = (h,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, h)
    width = config.get("head_dim", h // config["num_attention_heads"])
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        shapes |= layer_shapes(start, h, h, width, config, dense=kind in ("llama", "qwen3", "mimo"))
        shapes[f"{start}input_layernorm.weight"] = shapes[f"{start}post_attention_layernorm.weight"] = (h,)
        if kind == "mimo":
            shapes |= qkv_biases(start, width, config)
        if kind.startswith("qwen3"):
            shapes |= {f"{start}self_attn.{part}_norm.weight": (width,) for part in "qk"}
        if kind == "mixtral":
            shapes[f"{start}block_sparse_moe.gate.weight"] = (config["num_local_experts"], h)
            for expert in range(config["num_local_experts"]):
                part, wide = f"{start}block_sparse_moe.experts.{expert}.", config["intermediate_size"]
                shapes |= {f"{part}w1.weight": (wide, h), f"{part}w2.weight": (h, wide), f"{part}w3.weight": (wide, h)}
        if kind == "qwen3_moe":
            shapes[f"{start}mlp.gate.weight"] = (config["num_experts"], h)
            for expert in range(config["num_experts"]):
                shapes |= mlp_shapes(f"{start}mlp.experts.{expert}.", h, config["moe_intermediate_size"])
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def layer_shapes(
    start: str, read: int, h: int, width: int, config: Config, *, dense: bool
) -> dict[str, tuple[int, ...]]:
    """Attention that reads `read` channels, and the MLP of a layer with one."""
    q, kv = config["num_attention_heads"] * width, config["num_key_value_heads"] * width
    shapes: dict[str, tuple[int, ...]] = {
        f"{start}self_attn.q_proj.weight": (q, read),
        f"{start}self_attn.k_proj.weight": (kv, read),
        f"{start}self_attn.v_proj.weight": (kv, read),
        f"{start}self_attn.o_proj.weight": (h, q),
    }
    return shapes | (mlp_shapes(f"{start}mlp.", h, config["intermediate_size"]) if dense else {})


def gpt_oss_tensors(config: Config) -> Shapes:
    """transformers' modeling_gpt_oss.py; of the packed experts integrations/mxfp4.py."""
    h, wide, experts = config["hidden_size"], config["intermediate_size"], config["num_local_experts"]
    heads, width = config["num_attention_heads"], config["head_dim"]
    plain: dict[str, tuple[int, ...]] = {"model.norm.weight": (h,)}
    plain |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (config["vocab_size"], h))
    packed: dict[str, tuple[int, ...]] = {}
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        plain |= layer_shapes(start, h, h, width, config, dense=False) | qkv_biases(start, width, config)
        plain |= {f"{start}self_attn.o_proj.bias": (h,), f"{start}self_attn.sinks": (heads,)}
        plain |= {f"{start}{name}_layernorm.weight": (h,) for name in ("input", "post_attention")}
        plain |= {f"{start}mlp.router.weight": (experts, h), f"{start}mlp.router.bias": (experts,)}
        for part, columns, inputs in (("gate_up", 2 * wide, h), ("down", h, wide)):
            name = f"{start}mlp.experts.{part}_proj"
            plain[f"{name}_bias"] = (experts, columns)
            packed[f"{name}_blocks"] = (experts, columns, inputs // 32, 16)
            packed[f"{name}_scales"] = (experts, columns, inputs // 32)
    of_bytes = {name: ("U8", shape) for name, shape in packed.items()}
    return {name: ("BF16", shape) for name, shape in plain.items()} | of_bytes


def glm_air_tensors(config: Config) -> Shapes:
    """transformers' modeling_glm4_moe.py: the first layer has no experts. Without the prediction layer."""
    h, v, wide = config["hidden_size"], config["vocab_size"], config["moe_intermediate_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (h,), "model.embed_tokens.weight": (v, h)}
    shapes["lm_head.weight"] = (v, h)
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        shapes |= layer_shapes(start, h, h, config["head_dim"], config, dense=layer == 0)
        shapes |= {f"{start}{name}_layernorm.weight": (h,) for name in ("input", "post_attention")}
        if layer == 0:
            continue
        count = config["n_routed_experts"]
        shapes |= {f"{start}mlp.gate.weight": (count, h), f"{start}mlp.gate.e_score_correction_bias": (count,)}
        for part in ("shared_experts", *(f"experts.{expert}" for expert in range(count))):
            shapes |= mlp_shapes(f"{start}mlp.{part}.", h, wide)
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def qwen35_tensors(config: Config) -> Shapes:
    """transformers' modeling_qwen3_5.py; of the part for images one tensor."""
    h, v, heads = config["hidden_size"], config["vocab_size"], config["linear_num_value_heads"]
    keys, values = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * 128
    model = "model.language_model."
    shapes: dict[str, tuple[int, ...]] = {f"{model}norm.weight": (h,), f"{model}embed_tokens.weight": (v, h)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (v, h)
    exact: dict[str, tuple[int, ...]] = {}
    for layer, kind in enumerate(config["layer_types"]):
        start = f"{model}layers.{layer}."
        shapes |= mlp_shapes(f"{start}mlp.", h, config["intermediate_size"])
        if kind == "full_attention":
            shapes |= gated_attention(start, config)
            continue
        part, (own, more) = f"{start}linear_attn.", delta_net(start, config)
        shapes |= own | {f"{part}in_proj_qkv.weight": (keys + values, h), f"{part}in_proj_z.weight": (values, h)}
        shapes |= {f"{part}in_proj_{name}.weight": (heads, h) for name in "ab"}
        exact |= more
    shapes["model.visual.patch_embed.proj.bias"] = (h,)
    return {name: ("BF16", shape) for name, shape in shapes.items()} | {name: ("F32", exact[name]) for name in exact}


def qwen3_next_tensors(config: Config) -> Shapes:
    """transformers' modeling_qwen3_next.py, with an expert's matrices one by one, and without the prediction layer."""
    h, heads, v = config["hidden_size"], config["linear_num_value_heads"], config["vocab_size"]
    keys, values = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * 128
    shapes: dict[str, tuple[int, ...]] = {"model.norm.weight": (h,)}
    shapes |= dict.fromkeys(("model.embed_tokens.weight", "lm_head.weight"), (v, h))
    for layer in range(config["num_hidden_layers"]):
        start = f"model.layers.{layer}."
        if layer % config["full_attention_interval"] == config["full_attention_interval"] - 1:
            shapes |= gated_attention(start, config)
        else:
            own, more = delta_net(start, config)
            shapes |= own | more | {f"{start}linear_attn.in_proj_qkvz.weight": (keys + 2 * values, h)}
            shapes[f"{start}linear_attn.in_proj_ba.weight"] = (2 * heads, h)
        shapes |= {
            f"{start}mlp.gate.weight": (config["num_experts"], h),
            f"{start}mlp.shared_expert_gate.weight": (1, h),
        }
        shapes |= mlp_shapes(f"{start}mlp.shared_expert.", h, config["shared_expert_intermediate_size"])
        for expert in range(config["num_experts"]):
            shapes |= mlp_shapes(f"{start}mlp.experts.{expert}.", h, config["moe_intermediate_size"])
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def delta_net(start: str, config: Config) -> tuple[dict[str, tuple[int, ...]], dict[str, tuple[int, ...]]]:
    """What a layer with a delta net has in Qwen3.5 and in Qwen3-Next: most of it, and what Qwen3.5 has in fp32."""
    h, heads = config["hidden_size"], config["linear_num_value_heads"]
    keys, values = 2 * config["linear_num_key_heads"] * config["linear_key_head_dim"], heads * 128
    part = f"{start}linear_attn."
    shapes: dict[str, tuple[int, ...]] = {
        f"{start}{name}_layernorm.weight": (h,) for name in ("input", "post_attention")
    }
    shapes |= {f"{part}conv1d.weight": (keys + values, 1, 4), f"{part}out_proj.weight": (h, values)}
    shapes[f"{part}dt_bias"] = (heads,)
    return shapes, {f"{part}A_log": (heads,), f"{part}norm.weight": (128,)}


def gated_attention(start: str, config: Config) -> dict[str, tuple[int, ...]]:
    """A layer of Qwen3.5 with attention, without its MLP: q_proj has the gates too."""
    h, width = config["hidden_size"], config["head_dim"]
    shapes = layer_shapes(start, h, h, width, config, dense=False)
    shapes[f"{start}self_attn.q_proj.weight"] = (2 * config["num_attention_heads"] * width, h)
    shapes |= {f"{start}{name}_layernorm.weight": (h,) for name in ("input", "post_attention")}
    return shapes | {f"{start}self_attn.{part}_norm.weight": (width,) for part in "qk"}


def qwen35_layer(config: Config) -> Shapes:
    """vllm-project/vllm vllm/model_executor/models/qwen3_5_mtp.py."""
    own = config["text_config"]
    h = own["hidden_size"]
    shapes = gated_attention("mtp.layers.0.", own) | {"mtp.fc.weight": (h, 2 * h)}
    shapes |= mlp_shapes("mtp.layers.0.mlp.", h, own["intermediate_size"])
    shapes |= {f"mtp.{name}.weight": (h,) for name in QWEN_NEXT}
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def qkv_biases(start: str, width: int, config: Config) -> dict[str, tuple[int, ...]]:
    heads = {"q": config["num_attention_heads"], "k": config["num_key_value_heads"], "v": config["num_key_value_heads"]}
    return {f"{start}self_attn.{part}_proj.bias": (count * width,) for part, count in heads.items()}


def mimo_layer(config: Config) -> Shapes:
    """XiaomiMiMo/MiMo modeling_mimo.py: the multi-token-prediction layer of MiMo-7B."""
    start, h, width = "model.mtp_layers.0.", config["hidden_size"], 128
    shapes = layer_shapes(start, h, h, width, config, dense=True) | qkv_biases(start, width, config)
    shapes[f"{start}input_proj.weight"] = (h, 2 * h)
    names = ("token_layernorm", "hidden_layernorm", "final_layernorm", "input_layernorm", "post_attention_layernorm")
    shapes |= {f"{start}{name}.weight": (h,) for name in names}
    return {name: ("BF16", shape) for name, shape in shapes.items()}


def part_of_layer(h: int, start: str, norms: tuple[str, ...], fc: str, other: str, shape: tuple[int, ...]) -> Shapes:
    """What of a multi-token-prediction layer decides that it is refused."""
    shapes: dict[str, tuple[int, ...]] = {f"{start}{name}.weight": (h,) for name in norms}
    shapes |= {f"{start}{fc}.weight": (h, 2 * h), f"{start}{other}.weight": shape}
    return {name: ("BF16", each) for name, each in shapes.items()}


def mlp_shapes(start: str, h: int, wide: int) -> dict[str, tuple[int, ...]]:
    names = {"gate_proj": (wide, h), "up_proj": (wide, h), "down_proj": (h, wide)}
    return {f"{start}{name}.weight": shape for name, shape in names.items()}


def eagle1(hidden: int, mlp: int, heads: int, kv: int, vocab: int, **more: Any) -> tuple[Config, Shapes]:
    """SafeAILab/EAGLE eagle/model/cnets1.py."""
    config = {**sizes("llama", hidden, mlp, 1, heads, kv, vocab, 2048), "architectures": ["LlamaForCausalLM"], **more}
    shapes = layer_shapes("layers.0.", hidden, hidden, hidden // heads, config, dense=True)
    shapes |= {"embed_tokens.weight": (vocab, hidden), "fc.weight": (hidden, 2 * hidden)}
    shapes["layers.0.post_attention_layernorm.weight"] = (hidden,)
    if more.get("bias", True):  # absent means a bias
        shapes["fc.bias"] = (hidden,)
    return config, {name: ("F16", shape) for name, shape in shapes.items()}


def eagle3(
    name: str, target: str, mlp: int, start: str = "midlayer.", taps: int = 3, draft: int = 32000, **more: Any
) -> tuple[Config, Shapes]:
    """name: of the class in config.json. Attention is as wide as the target's, as in all heads of the table."""
    of = TARGETS[target].get("text_config", TARGETS[target])
    h, v, heads = of["hidden_size"], of["vocab_size"], of["num_attention_heads"]
    width = of.get("head_dim", h // heads)
    config = {**sizes("llama", h, mlp, 1, heads, of["num_key_value_heads"], v, 2048), "architectures": [name]}
    config |= {"draft_vocab_size": draft, "head_dim": width, **more}
    shapes = layer_shapes(start, 2 * h, h, width, config, dense=True)
    shapes |= {f"{start}{norm}.weight": (h,) for norm in ("hidden_norm", "input_layernorm", "post_attention_layernorm")}
    shapes |= {"norm.weight": (h,), "fc.weight": (h, taps * h), "lm_head.weight": (draft, h)}
    tensors = {key: ("BF16", shape) for key, shape in shapes.items()}
    if draft < v:
        tensors |= {"d2t": ("I64", (draft,)), "t2d": ("BOOL", (v,))}
    return config, tensors


def with_embedding(head: tuple[Config, Shapes]) -> tuple[Config, Shapes]:
    config, tensors = head
    return config, {**tensors, "embed_tokens.weight": ("BF16", (config["vocab_size"], config["hidden_size"]))}


def deepspec(target: str, ids: list[int]) -> tuple[Config, Shapes]:
    """deepseek-ai/DeepSpec deepspec/modeling/eagle3/qwen3/{config,modeling}.py and config/eagle3/*.py."""
    of = TARGETS[target]
    config, tensors = with_embedding(
        eagle3("Qwen3Eagle3Model", target, of["intermediate_size"], "layers.0.", len(ids), of["vocab_size"])
    )
    del config["draft_vocab_size"]
    config |= {"model_type": "qwen3", "target_layer_ids": ids, "layer_types": ["full_attention"], "ttt_length": 7}
    norms = {f"layers.0.self_attn.{part}_norm.weight": ("BF16", (128,)) for part in "qk"}
    return config, {**tensors, **norms}


def speculators(kind: str, target: str, mlp: int, **more: Any) -> tuple[Config, Shapes]:
    """vllm-project/speculators src/speculators/models/{eagle3,peagle}/config.py."""
    flat, tensors = with_embedding(eagle3("", target, mlp, "layers.0."))
    layer = {key: flat[key] for key in flat if key not in ("architectures", "draft_vocab_size")}
    config = {
        "architectures": [{"eagle3": "Eagle3Speculator", "peagle": "PEagleSpeculator"}[kind]],
        "speculators_model_type": kind,
        "speculators_config": {"algorithm": kind, "verifier": {"name_or_path": target}},
        "transformer_layer_config": layer,
        "draft_vocab_size": 32000,
        **more,
    }
    if kind == "peagle":
        tensors["mask_hidden"] = ("BF16", (1, 1, 3 * flat["hidden_size"]))
    return config, tensors


def block(name: str, ids: list[int], size: int, *, rank: int = 0, lm_head: bool = False) -> tuple[Config, Shapes]:
    """A head of five layers for Qwen3-8B: sgl-project/SpecForge configs/qwen3-8b-dflash.json; with a rank
    deepseek-ai/DeepSpec config/dspark/dspark_qwen3_8b.py. lm_head: whether it has that and an embedding."""
    of = TARGETS["Qwen/Qwen3-8B"]
    h, v, own = of["hidden_size"], of["vocab_size"], {"mask_token_id": 151669, "target_layer_ids": ids}
    config = {**of, "num_hidden_layers": 5, "num_target_layers": 36, "block_size": size, "architectures": [name]}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(ids) * h),
        "hidden_norm.weight": (h,),
        "norm.weight": (h,),
    }
    for at in (f"layers.{layer}." for layer in range(5)):
        shapes |= layer_shapes(at, h, h, 128, config, dense=True)
        shapes |= {f"{at}{norm}_layernorm.weight": (h,) for norm in ("input", "post_attention")}
        shapes |= {f"{at}self_attn.{part}_norm.weight": (128,) for part in "qk"}
    if rank:
        shapes |= {f"markov_head.markov_w{number}.weight": (v, rank) for number in (1, 2)}
        shapes |= {"confidence_head.proj.weight": (1, h + rank), "confidence_head.proj.bias": (1,)}
        config |= {"markov_rank": rank, "markov_head_type": "vanilla", **own}
    else:
        config["dflash_config"] = own
    if lm_head:
        shapes |= {"embed_tokens.weight": (v, h), "lm_head.weight": (v, h)}
    return config, {key: ("BF16", shape) for key, shape in shapes.items()}


def speculators_dflash(taps: list[int]) -> tuple[Config, Shapes]:
    """vllm-project/speculators src/speculators/models/dflash/{config,core}.py: with the layers that it takes by default
    and a vocabulary of 32000."""
    flat, tensors = block("", taps, 8, lm_head=True)
    reduced = {"lm_head.weight": ("BF16", (32000, 4096)), "d2t": ("I64", (32000,)), "t2d": ("BOOL", (151936,))}
    config = {
        "architectures": ["DFlashSpeculator"],
        "speculators_model_type": "dflash",
        "speculators_config": {"algorithm": "dflash", "verifier": {"name_or_path": "Qwen/Qwen3-8B"}},
        "transformer_layer_config": {key: flat[key] for key in [*TARGETS["Qwen/Qwen3-8B"], "num_hidden_layers"]},
        "aux_hidden_state_layer_ids": taps,
        "block_size": 8,
        "mask_token_id": 151669,
        "draft_vocab_size": 32000,
        "sample_from_anchor": False,
    }
    return config, tensors | reduced


LLAMA, QWEN = "meta-llama/Llama-3.1-8B-Instruct", "Qwen/Qwen3-8B"
SPECFORGE, ANGELSLIM = "LlamaForCausalLMEagle3", "Eagle3LlamaForCausalLM"
LLAMA_HEAD = eagle3("LlamaForCausalLM", LLAMA, 14336)
HEADS: dict[str, tuple[Config, Shapes]] = {
    "yuhuili/EAGLE-llama2-chat-7B": eagle1(4096, 11008, 32, 32, 32000),
    "yuhuili/EAGLE-llama2-chat-13B": eagle1(5120, 13824, 40, 40, 32000),
    "yuhuili/EAGLE-mixtral-instruct-8x7B": eagle1(4096, 14336, 32, 32, 32000),
    "yuhuili/EAGLE-LLaMA3-Instruct-8B": eagle1(4096, 14336, 32, 8, 128256, bias=False, rope_theta=5e5),
    "yuhuili/EAGLE-LLaMA3.1-Instruct-8B": eagle1(4096, 14336, 32, 8, 128256, bias=False, rope_theta=5e5),
    "yuhuili/EAGLE3-LLaMA3.1-Instruct-8B": LLAMA_HEAD,
    "yuhuili/EAGLE3-DeepSeek-R1-Distill-LLaMA-8B": LLAMA_HEAD,
    "lmsys/SGLang-EAGLE3-Llama-3.1-8B-Instruct-SpecForge": with_embedding(eagle3(SPECFORGE, LLAMA, 14336)),
    "lmsys/SGLang-EAGLE3-Qwen3-30B-A3B-Instruct-2507-SpecForge-Nex": with_embedding(
        eagle3(SPECFORGE, "Qwen/Qwen3-30B-A3B-Instruct-2507", 12288, rope_theta=1e6)
    ),
    "AngelSlim/Qwen3-1.7B_eagle3": with_embedding(eagle3(ANGELSLIM, "Qwen/Qwen3-1.7B", 6144, rope_theta=1e6)),
    "AngelSlim/Qwen3-4B_eagle3": with_embedding(eagle3(ANGELSLIM, "Qwen/Qwen3-4B", 9728, rope_theta=1e6)),
    "AngelSlim/Qwen3-8B_eagle3": with_embedding(eagle3(ANGELSLIM, QWEN, 12288, rope_theta=1e6)),
    "AngelSlim/Qwen3-14B_eagle3": with_embedding(eagle3(ANGELSLIM, "Qwen/Qwen3-14B", 17408, rope_theta=1e6)),
    "AngelSlim/Qwen3-32B_eagle3": with_embedding(eagle3(ANGELSLIM, "Qwen/Qwen3-32B", 25600, rope_theta=1e6)),
    "AngelSlim/Qwen3-a3B_eagle3": with_embedding(eagle3(ANGELSLIM, "Qwen/Qwen3-30B-A3B", 6144, rope_theta=1e6)),
    "deepseek-ai/eagle3_qwen3_4b_ttt7": deepspec("Qwen/Qwen3-4B", [1, 9, 17, 25, 33]),
    "deepseek-ai/eagle3_qwen3_8b_ttt7": deepspec(QWEN, [1, 9, 17, 25, 33]),
    "deepseek-ai/eagle3_qwen3_14b_ttt7": deepspec("Qwen/Qwen3-14B", [1, 10, 19, 28, 37]),
    "RedHatAI/Llama-3.1-8B-Instruct-speculator.eagle3": speculators("eagle3", LLAMA, 14336, norm_before_residual=False),
    "RedHatAI/Qwen3-8B-speculator.peagle": speculators("peagle", QWEN, 12288),
    "RedHatAI/Qwen3-8B-speculator.dflash": speculators_dflash([2, 18, 33]),
    "z-lab/Qwen3-8B-DFlash-b16": block("DFlashDraftModel", [1, 9, 17, 25, 33], 16),
    "deepseek-ai/dspark_qwen3_8b_block7": block("Qwen3DSparkModel", [1, 9, 17, 25, 33], 7, rank=256, lm_head=True),
    "lmsys/EAGLE3-gpt-oss-120b-bf16": with_embedding(
        eagle3(
            SPECFORGE,
            "openai/gpt-oss-120b",
            17280,
            eagle_config={"eagle_aux_hidden_state_layer_ids": [1, 17, 33]},
        )
    ),
    "lmsys/SGLang-EAGLE3-Llama-4-Scout-17B-16E-Instruct-SpecForge": with_embedding(
        eagle3(SPECFORGE, "meta-llama/Llama-4-Scout-17B-16E-Instruct", 32768)
    ),
    "lmsys/SGLang-EAGLE3-Qwen3-Next-80B-A3B-Instruct-FP8-perfect-blend-regenerated": with_embedding(
        eagle3(SPECFORGE, "Qwen/Qwen3-Next-80B-A3B-Instruct", 16384, rope_theta=1e7)
    ),
}


DEEPSEEK, QWEN_NEXT = ("enorm", "hnorm", "shared_head.norm"), ("pre_fc_norm_embedding", "pre_fc_norm_hidden", "norm")
# Multi-token-prediction layers in the checkpoints of targets: vllm/model_executor/models/{mimo,glm4_moe,deepseek,
# qwen3_next}_mtp.py of vllm-project/vllm have their names.
LAYERS: dict[str, Shapes] = {
    "XiaomiMiMo/MiMo-7B-RL": mimo_layer(MIMO),
    "XiaomiMiMo/MiMo-7B-RL-0530": mimo_layer(MIMO),
    **{name: qwen35_layer(TARGETS[name]) for name in TARGETS if name.startswith("Qwen/Qwen3.5-")},
    "zai-org/GLM-4.5-Air": part_of_layer(
        4096, "model.layers.46.", DEEPSEEK, "eh_proj", "mlp.experts.0.up_proj", (1408, 4096)
    ),
    "deepseek-ai/DeepSeek-V3": part_of_layer(
        7168, "model.layers.61.", DEEPSEEK, "eh_proj", "self_attn.kv_a_proj_with_mqa", (576, 7168)
    ),
    "Qwen/Qwen3-Next-80B-A3B-Instruct": part_of_layer(
        2048, "mtp.", QWEN_NEXT, "fc", "layers.0.mlp.experts.0.up_proj", (512, 2048)
    ),
}


def write(folder: Path, config: Config, tensors: Shapes) -> Path:
    """Writes config.json, and model.safetensors with a header and a hole in the place of the numbers."""
    folder.mkdir(parents=True)
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * WIDTHS[dtype]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [start, end]}
    encoded = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(encoded).to_bytes(8, "little") + encoded)
        file.truncate(8 + len(encoded) + end)
    return folder
