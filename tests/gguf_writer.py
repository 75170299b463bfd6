"""GGUF files of small checkpoints as llama.cpp's convert_hf_to_gguf.py does (ggml-org/llama.cpp).

Names of tensors come from the package gguf, which the converter uses too; the metadata of each architecture, the added
1 of Gemma's gains and the order of rows follow conversion/base.py, llama.py, gemma.py, phi.py, granite.py, olmo.py and
qwen.py there. `python -m gguf_writer FOLDER OUT.gguf` writes one for a comparison with the converter's own.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

from eagle_export.reading.families.registry import family_of, read_config
from eagle_export.reading.families.target import open_target
from eagle_export.reading.gguf.rope import llama_factors
from eagle_tools.peers.gguf_file import permuted

ARCHITECTURES = {
    "mistral": "llama",
    "mixtral": "llama",
    "ministral3": "mistral3",
    "gemma3_text": "gemma3",
    "gemma4_text": "gemma4",
    "qwen3_moe": "qwen3moe",
    "olmo3": "olmo2",
    "hunyuan_v1_dense": "hunyuan-dense",
    "gpt_oss": "gpt-oss",
    "ernie4_5_moe": "ernie4_5-moe",
    "glm4_moe": "glm4moe",
    "lfm2_moe": "lfm2moe",
    "qwen3_5_text": "qwen35",
    "qwen3_5_moe_text": "qwen35moe",
    "qwen3_next": "qwen3next",
    "granitemoehybrid": "granitehybrid",
}
LFM2 = ("lfm2", "lfm2moe")
QWEN35 = ("qwen35", "qwen35moe", "qwen3next")
GRANITES = ("granite", "granitemoe", "granitehybrid")
TURNED = ("llama", "smollm3", *GRANITES, "arcee", "mistral3")
KINDS = {
    "f32": "F32",
    "f16": "F16",
    "bf16": "BF16",
    "q8_0": "Q8_0",
    "q4_0": "Q4_0",
    "q4_1": "Q4_1",
    "q5_1": "Q5_1",
    "mxfp4": "MXFP4",
}
SCALED = {"scale": "router.proj", "per_expert_scale": "experts.down_proj"}  # of Gemma-4's router
KINDS_OF_TOKENS = {"normal": 1, "control": 3, "user": 4, "unused": 5}


def write_gguf(folder: Path, path: Path, kind: str = "f32", *, pre: str = "gpt-2", shard_tensors: int = 0) -> None:
    """Writes a checkpoint as a GGUF file. kind: a key of KINDS, of its matrices; vectors stay in fp32, as the converter
    has them. pre: how its tokenizer cuts text. shard_tensors: tensors per part, for a split file."""
    source = open_target(folder)
    config = read_config(family_of(source), source)
    kind_of_model = source.config["model_type"]  # Qwen3-Next's config is of another's class
    name = ARCHITECTURES.get(kind_of_model, kind_of_model)
    split = {"split_max_tensors": shard_tensors} if shard_tensors else {}
    writer = gguf.GGUFWriter(path, name, **split)
    writer.add_type("model")
    _metadata(writer, config, name)
    if (folder / "tokenizer.json").is_file():
        _tokenizer(writer, folder, config, pre)
    for each, values in _tensors(source, config, name):
        quantised = (
            kind != "f32"
            and values.ndim > 1
            and not each.endswith(("gate_inp.weight", ".bias", "shortconv.conv.weight", "ssm_conv1d.weight"))
            and not each.endswith(("ssm_a", "ssm_d", "norm.weight"))
        )
        form = gguf.GGMLQuantizationType[KINDS[kind] if quantised else "F32"]
        stored = quantize(np.ascontiguousarray(values, dtype=np.float32), form)
        writer.add_tensor(each, stored, raw_dtype=form)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def _metadata(writer: Any, config: Any, name: str) -> None:
    rope = config.rope_parameters
    full = rope.get("full_attention", rope)
    heads = config.num_attention_heads
    layer = config.per_layer_config[0] if name == "gemma4" else config  # has a window
    width = getattr(layer, "head_dim", None) or config.hidden_size // heads
    further = _further(config)
    writer.add_block_count(config.num_hidden_layers + further)
    if further:
        writer.add_nextn_predict_layers(further)
    writer.add_context_length(config.max_position_embeddings)
    writer.add_embedding_length(config.hidden_size)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(heads)
    if name not in LFM2:
        writer.add_head_count_kv(layer.num_key_value_heads)
    writer.add_layer_norm_rms_eps(config.norm_eps if name in LFM2 else config.rms_norm_eps)
    if name in LFM2:
        writer.add_head_count_kv([config.num_key_value_heads * (kind != "conv") for kind in config.layer_types])
        writer.add_shortconv_l_cache(config.conv_L_cache)
        writer.add_feed_forward_length(_adjusted_width(config) if name == "lfm2" else config.intermediate_size)
    if name not in ("gemma", "gemma2"):
        alpha = full.get("alpha") or 1.0  # of Hunyuan, whose converter writes the base that it makes
        writer.add_rope_freq_base(full["rope_theta"] * alpha ** (width / (width - 2)))
    if full.get("rope_type") == "linear":
        writer.add_rope_scaling_type(gguf.RopeScalingType.LINEAR)
        writer.add_rope_scaling_factor(full["factor"])
    if full.get("rope_type") == "yarn":
        writer.add_rope_scaling_type(gguf.RopeScalingType.YARN)
        writer.add_rope_scaling_factor(full["factor"])
        writer.add_rope_scaling_orig_ctx_len(full["original_max_position_embeddings"])
    if name == "mistral3":
        writer.add_rope_scaling_yarn_log_mul(full["mscale_all_dim"])
        writer.add_attn_temperature_scale(full["llama_4_scaling_beta"])
    if name in TURNED:
        writer.add_vocab_size(config.vocab_size)
        writer.add_rope_dimension_count(width)
    if getattr(layer, "head_dim", None) and name not in (*GRANITES, "phi3"):
        writer.add_key_length(width)
        writer.add_value_length(width)
    if name in ("gemma2", "gemma3", "olmo2", "exaone4", "gpt-oss") and getattr(config, "sliding_window", None):
        writer.add_sliding_window(config.sliding_window)
    if name in ("olmo2", "exaone4") and getattr(config, "sliding_window", None):
        writer.add_sliding_window_pattern([kind == "sliding_attention" for kind in config.layer_types])
    if name in ("glm4", "glm4moe", *QWEN35):
        writer.add_rope_dimension_count(int(width * full["partial_rotary_factor"]))
    if name == "gemma2":
        writer.add_attn_logit_softcapping(config.attn_logit_softcapping)
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    if name == "gemma4":
        _gemma4_metadata(writer, config)
    if name in ("gemma3", "gemma4"):
        writer.add_rope_freq_base_swa(rope["sliding_attention"]["rope_theta"])
    if name in GRANITES:
        writer.add_attention_scale(config.attention_multiplier)
        writer.add_embedding_scale(config.embedding_multiplier)
        writer.add_residual_scale(config.residual_multiplier)
        writer.add_logit_scale(config.logits_scaling)
    if name == "phi3":
        rotated = int(full.get("partial_rotary_factor", 1.0) * config.hidden_size) // heads
        writer.add_rope_dimension_count(rotated)
        writer.add_rope_scaling_orig_ctx_len(config.original_max_position_embeddings)
        writer.add_sliding_window(config.sliding_window or 0)
        if full.get("rope_type") == "longrope":
            scale, original = config.max_position_embeddings, config.original_max_position_embeddings
            writer.add_rope_scaling_attn_factors(math.sqrt(1 + math.log(scale / original) / math.log(original)))
    if experts := getattr(config, "num_local_experts", None) or getattr(config, "num_experts", None):
        writer.add_expert_count(experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
    if name == "ernie4_5-moe":
        writer.add_interleave_moe_layer_step(config.moe_layer_interval)
        writer.add_leading_dense_block_count(config.moe_layer_start_index)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.moe_num_shared_experts)
        writer.add_expert_shared_feed_forward_length(config.moe_num_shared_experts * config.moe_intermediate_size)
    if name == "glm4moe":
        writer.add_expert_count(config.n_routed_experts)
        writer.add_expert_used_count(config.num_experts_per_tok)
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_expert_shared_count(config.n_shared_experts)
        writer.add_leading_dense_block_count(config.first_k_dense_replace)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
        writer.add_expert_weights_scale(config.routed_scaling_factor)
        writer.add_expert_weights_norm(config.norm_topk_prob)
    if name == "lfm2moe":
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
        writer.add_leading_dense_block_count(config.num_dense_layers)
        writer.add_expert_gating_func(gguf.ExpertGatingFuncType.SIGMOID)
    if name in QWEN35:
        writer.add_ssm_conv_kernel(config.linear_conv_kernel_dim)
        writer.add_ssm_state_size(config.linear_key_head_dim)
        writer.add_ssm_group_count(config.linear_num_key_heads)
        writer.add_ssm_time_step_rank(config.linear_num_value_heads)
        writer.add_ssm_inner_size(config.linear_value_head_dim * config.linear_num_value_heads)
        writer.add_full_attention_interval(4)
    if name in ("qwen35", "qwen35moe"):
        recurrent = [kind == "linear_attention" for kind in config.layer_types] + [False] * further
        writer.add_array(f"{name}.attention.recurrent_layers", recurrent)
        writer.add_rope_dimension_sections([11, 11, 10, 0])
    if name == "granitehybrid":
        _granite4_metadata(writer, config)
    if name == "gpt-oss":
        writer.add_expert_feed_forward_length(config.intermediate_size)
    if name in ("qwen3moe", "qwen35moe", "qwen3next") or getattr(config, "enable_moe_block", False):
        writer.add_expert_feed_forward_length(config.moe_intermediate_size)
    if name in ("qwen35moe", "qwen3next"):
        writer.add_expert_shared_feed_forward_length(config.shared_expert_intermediate_size)


def _granite4_metadata(writer: Any, config: Any) -> None:
    """What the metadata of all had is overwritten."""
    if config.num_local_experts:
        writer.add_expert_shared_feed_forward_length(config.shared_intermediate_size)
    writer.add_ssm_conv_kernel(config.mamba_d_conv)
    writer.add_ssm_state_size(config.mamba_d_state)
    writer.add_ssm_group_count(config.mamba_n_groups)
    writer.add_ssm_inner_size(config.mamba_expand * config.hidden_size)
    writer.add_ssm_time_step_rank(config.mamba_n_heads)
    writer.add_head_count_kv([config.num_key_value_heads * (kind == "full_attention") for kind in config.layer_types])
    writer.add_rope_scaling_finetuned(False)
    writer.add_context_length(2**20)


def _further(config: Any) -> int:
    """Layers that predict further tokens."""
    return getattr(config, "num_nextn_predict_layers", 0) or getattr(config, "mtp_num_hidden_layers", 0)


def _adjusted_width(config: Any) -> int:
    """Of LFM2's MLP."""
    width = int(config.intermediate_size)
    if config.block_auto_adjust_ff_dim:
        width = int(config.block_ffn_dim_multiplier * int(2 * width / 3))
        width = -(-width // config.block_multiple_of) * int(config.block_multiple_of)
    return width


def _gemma4_metadata(writer: Any, config: Any) -> None:
    """In the converter's order; what the metadata of all had is overwritten."""
    first, last = config.per_layer_config[0], config.per_layer_config[config.num_hidden_layers - 1]
    if config.final_logit_softcapping:
        writer.add_final_logit_softcapping(config.final_logit_softcapping)
    writer.add_sliding_window(config.sliding_window)
    writer.add_shared_kv_layers(config.num_kv_shared_layers)
    writer.add_embedding_length_per_layer_input(config.hidden_size_per_layer_input or 0)
    windowed = [kind == "sliding_attention" for kind in config.layer_types]
    writer.add_sliding_window_pattern(windowed)
    writer.add_key_length(last.head_dim)
    writer.add_value_length(last.head_dim)
    writer.add_key_length_swa(first.head_dim)
    writer.add_value_length_swa(first.head_dim)
    if config.use_double_wide_mlp:
        width, kept = config.intermediate_size, config.num_hidden_layers - config.num_kv_shared_layers
        writer.add_feed_forward_length([width if n < kept else 2 * width for n in range(config.num_hidden_layers)])
    if config.attention_k_eq_v:
        counts = {True: first.num_key_value_heads, False: last.num_key_value_heads}
        writer.add_head_count_kv([counts[each] for each in windowed])
    writer.add_rope_dimension_count(last.head_dim)
    writer.add_rope_dimension_count_swa(first.head_dim)


def _tensors(source: Any, config: Any, name: str) -> list[tuple[str, np.ndarray]]:
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == name)
    names = gguf.get_tensor_name_map(arch, config.num_hidden_layers)
    out: list[tuple[str, Any]] = []
    experts: dict[str, dict[int, Any]] = {}
    rope = config.rope_parameters
    if rope.get("rope_type") == "llama3":
        width = config.head_dim
        waves = 2 * np.pi * rope["rope_theta"] ** (np.arange(0, width, 2) / width)
        factor, low, high = (rope[key] for key in ("factor", "low_freq_factor", "high_freq_factor"))
        factors = llama_factors(waves, factor, low, high, rope["original_max_position_embeddings"])
        out.append(("rope_freqs.weight", factors.astype(np.float32)))
    if name == "gemma4":
        full, width = rope["full_attention"], config.per_layer_config[config.num_hidden_layers - 1].head_dim
        turning = int(width * full["partial_rotary_factor"] / 2)
        slowed = [1.0] * turning + [1e30] * (width // 2 - turning)
        out.append(("rope_freqs.weight", np.array(slowed, np.float32)))
    if rope.get("rope_type") == "longrope":
        for each in ("long", "short"):
            out.append((f"rope_factors_{each}.weight", np.array(rope[f"{each}_factor"], np.float32)))
    for full, tensor in source.tensors.items():
        values = tensor.read().float().numpy()
        if name in ("gemma", "gemma2", "gemma3"):
            if full == "lm_head.weight":
                continue
            values = values + np.float32(1) if full.endswith("norm.weight") else values
        if name in QWEN35:
            values = _qwen35_values(config, full, values, tiled=name != "qwen3next")
        if name == "qwen3next" and full.endswith(".in_proj_a.weight"):
            continue  # with those of in_proj_b
        if name == "qwen3next" and full.endswith(".in_proj_b.weight"):
            both = (values, source.tensors[full.replace("in_proj_b", "in_proj_a")].read().float().numpy())
            groups = [each.reshape(config.linear_num_key_heads, -1, config.hidden_size) for each in both]
            values = np.concatenate(groups, 1).reshape(-1, config.hidden_size)
            full = full.replace("in_proj_b", "in_proj_ba")
        if name in TURNED and "q_proj." in full:
            values = permuted(values, config.num_attention_heads)
        if name in TURNED and "k_proj." in full:
            values = permuted(values, config.num_key_value_heads)
        if ".shared_mlp." in full:
            part = "mlp.shared_expert" if config.num_local_experts else "mlp"
            if full.endswith("input_linear.weight"):
                for each, half in zip(("gate", "up"), np.split(values, 2), strict=True):
                    base = full.replace("shared_mlp.input_linear.weight", f"{part}.{each}_proj")
                    out.append((f"{names.get_name(base)}.weight", half))
                continue
            full = full.replace("shared_mlp.output_linear", f"{part}.down_proj")
        if name in ("granitemoe", "granitehybrid"):  # by the names of Qwen3-MoE, which the package knows
            full = full.replace("block_sparse_moe.router", "mlp.gate").replace("block_sparse_moe", "mlp")
        values = values.reshape(-1) if full.endswith("correction_bias") else values
        values = values.squeeze(1) if full.endswith((".conv.conv.weight", ".conv1d.weight")) else values
        values = values.squeeze(0) if full.endswith(".shared_expert_gate.weight") else values
        full = full.replace("e_score_correction_bias", "e_score_correction.bias")
        full = full.replace(".expert_bias", ".expert_bias.bias")
        full = full.replace(".dt_bias", ".dt_proj.bias")
        if name == "granitehybrid" and full.endswith((".A_log", ".D", ".mamba.norm.weight")):
            values = values.reshape(config.mamba_n_groups if full.endswith("weight") else len(values), -1)
            values = -np.exp(values) if full.endswith(".A_log") else values
        if full.endswith((".A_log", ".mamba.D")):
            out.append((names.get_name(full), values))
            continue
        if (scaled := SCALED.get(full.partition(".router.")[2])) is not None:
            out.append((f"{names.get_name(full.partition('router.')[0] + scaled)}.scale", values))
            continue
        base, _, kind = (f"{full}.weight" if full.endswith((".sinks", ".layer_scalar")) else full).rpartition(".")
        if ".experts." in base:
            before, _, after = base.partition(".experts.")
            number, part = after.split(".")
            part = "gate_up_proj" if name == "gemma4" and part != "down_proj" else part
            key = (
                f"{before}.experts.{part}".replace("model.layers", "layers").replace("block_sparse_moe", "feed_forward")
                if name in ("llama", "lfm2moe")
                else f"{before}.experts.{part}"
            )
            own = experts.setdefault(f"{key}.{kind}", {})
            own[int(number)] = np.concatenate((own[int(number)], values)) if int(number) in own else values
            continue
        mapped = names.get_name(base)
        assert mapped is not None, full
        out.append((f"{mapped}.{kind}", values))
    if _further(config):  # one of the tensors that the converter writes of such a layer
        further = np.zeros((config.hidden_size, 2 * config.hidden_size), np.float32)
        out.append((f"blk.{config.num_hidden_layers}.nextn.eh_proj.weight", further))
    for key, parts in experts.items():
        base, _, kind = key.rpartition(".")
        mapped = names.get_name(base)
        assert mapped is not None, key
        out.append((f"{mapped}.{kind}", np.stack([parts[number] for number in sorted(parts)])))
    return out


def _qwen35_values(config: Any, full: str, values: np.ndarray, *, tiled: bool) -> np.ndarray:
    """A tensor as the converter changes it, in the checkpoint's shape. tiled: whether heads of values change places."""
    part = full.partition(".linear_attn.")[2].partition(".")[0]
    keys, width = config.linear_num_key_heads if tiled else 1, config.linear_value_head_dim
    if part in ("in_proj_qkv", "conv1d"):
        start = 2 * config.linear_num_key_heads * config.linear_key_head_dim
        return np.concatenate((values[:start], _tiled(values[start:], 0, keys, width)))
    if part in ("in_proj_z", "out_proj"):
        return _tiled(values, int(part == "out_proj"), keys, width)
    if part in ("in_proj_a", "in_proj_b", "A_log", "dt_bias"):
        values = _tiled(values, 0, keys, 1)
    if full.endswith("norm.weight") and part != "norm":
        values = values + np.float32(1)
    return -np.exp(values) if part == "A_log" else values


def _tiled(values: np.ndarray, axis: int, keys: int, width: int) -> np.ndarray:
    """Heads that lie along an axis: of those of each key the first, then the second ones."""
    heads = values.reshape(*values.shape[:axis], keys, -1, width, *values.shape[axis + 1 :])
    return heads.swapaxes(axis, axis + 1).reshape(values.shape)


def _tokenizer(writer: Any, folder: Path, config: Any, pre: str) -> None:
    """A tokenizer.json, byte-level or of sentencepiece's kind, as base.py's get_vocab_base and LlamaHfVocab list it."""
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    model, added = content["model"], {each["id"]: each for each in content["added_tokens"]}
    tokens = {number: token for token, number in model["vocab"].items()}
    tokens |= {number: each["content"] for number, each in added.items()}
    listed, kinds = [], []
    for number in range(config.vocab_size):
        if number not in tokens:
            listed.append(f"[PAD{number}]")
            kinds.append(KINDS_OF_TOKENS["unused"])
            continue
        listed.append(tokens[number])
        kind = "normal" if number not in added else "control" if added[number]["special"] else "user"
        kinds.append(KINDS_OF_TOKENS[kind])
    if model.get("byte_fallback"):
        writer.add_tokenizer_model("llama")
        writer.add_tokenizer_pre("default")
        merged = {left + right: rank for rank, (left, right) in enumerate(map(_pair, model["merges"]))}
        writer.add_token_scores([-float(merged.get(token, -1.0)) for token in listed])
        kinds = [
            6 if token.startswith("<0x") else 2 if token == model["unk_token"] else kind
            for token, kind in zip(listed, kinds, strict=True)
        ]
    else:
        writer.add_tokenizer_model("gpt2")
        writer.add_tokenizer_pre(pre)
        writer.add_token_merges([" ".join(_pair(merge)) for merge in model["merges"]])
    writer.add_token_list(listed)
    writer.add_token_types(kinds)
    settings = json.loads((folder / "tokenizer_config.json").read_text(encoding="utf-8"))
    ids = {token: number for number, token in tokens.items()}
    for each in ("bos", "eos", "unk", "pad"):
        if isinstance(settings.get(f"{each}_token"), str):
            getattr(writer, f"add_{each}_token_id")(ids[settings[f"{each}_token"]])
    if (add := settings.get("add_bos_token")) is not None:
        writer.add_add_bos_token(add)
    template = settings.get("chat_template")
    if (folder / "chat_template.jinja").is_file():
        template = (folder / "chat_template.jinja").read_text(encoding="utf-8")
    if template is not None:
        writer.add_chat_template(template)
    if config.model_type in ("gemma", "gemma2"):
        writer.add_add_space_prefix(False)


def _pair(merge: Any) -> tuple[str, str]:
    left, right = merge.split(" ") if isinstance(merge, str) else merge
    return left, right


if __name__ == "__main__":
    write_gguf(Path(sys.argv[1]), Path(sys.argv[2]))
