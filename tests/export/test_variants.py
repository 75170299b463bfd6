"""All supported published forms of target and head, compared with a plain re-implementation without cache or mask.

The pairs are random and tiny. The bundle, run by the runtime, is compared with transformers (the target) and with the
equations of the EAGLE papers, which are written out below (the head).
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor
from transformers import LlamaConfig, LlamaForCausalLM

from eagle_export.bundle import export
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.drafting.head import Scratch
from fakes import observed
from insides import bundle_in

PROMPT = [5, 17, 3, 60, 41, 2, 33, 8, 19, 4, 55]


@dataclass(frozen=True)
class Variant:
    """How a pair differs from the usual one."""

    kind: str
    target_layers: int = 7
    target: dict[str, Any] = field(default_factory=dict)
    head: dict[str, Any] = field(default_factory=dict)
    hidden: int = 32  # width of the head
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 8
    taps: tuple[int, ...] = ()
    draft_vocab: int = 64
    fc_bias: bool = False
    qkv_bias: bool = False
    layers: int = 1
    own_embedding: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    tap_norm: str = "none"
    normed_residual: bool = False
    output_norm: str = "logits"
    midlayer: str = "midlayer"  # name of the layer in the file
    dtype: torch.dtype = torch.float32
    shards: bool = False


LLAMA3_ROPE = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
VARIANTS = {
    # Llama-3.2: tied embedding, llama3 rope, bf16 in shards; head without bias and embedding, with its own rope_theta
    "eagle1_llama3": Variant(
        "eagle1",
        target_layers=2,
        target={"tie_word_embeddings": True, "rope_theta": 500000.0, "rope_scaling": LLAMA3_ROPE},
        head={"rope_theta": 500000.0, "bias": False},
        dtype=torch.bfloat16,
        shards=True,
    ),
    # Qwen2-like head: biases everywhere, two layers, an embedding that is not the target's
    "eagle1_two_layers": Variant("eagle1", 2, fc_bias=True, qkv_bias=True, layers=2, own_embedding=True, head_dim=16),
    # full vocabulary without maps; rope_theta left out, so 10000 and not the target's; fp16 files
    "eagle3_full_vocabulary": Variant(
        "eagle3", target={"rope_theta": 500000.0}, taps=(2, 3, 4), dtype=torch.float16, kv_heads=4
    ),
    # narrower head with its own embedding, four taps named by layer outputs, maps
    "eagle3_narrow": Variant(
        "eagle3",
        head={"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 2, 4, 5]}},
        hidden=24,
        head_dim=12,
        taps=(2, 3, 5, 6),
        draft_vocab=20,
        own_embedding=True,
    ),
    # speculators: a normed residual, a norm per tap, a hidden state after the last norm, biases; ids are inputs
    "eagle3_speculators": Variant(
        "eagle3",
        head={
            "speculators_model_type": "eagle3",
            "transformer_layer_config": {"model_type": "llama", "attention_bias": True, "rope_theta": 500.0},
            "norm_before_residual": True,
            "fc_norm": True,
            "norm_output": True,
            "eagle_aux_hidden_state_layer_ids": [1, 3, 4],
        },
        taps=(1, 3, 4),
        draft_vocab=20,
        qkv_bias=True,
        o_bias=True,
        tap_norm="each",
        normed_residual=True,
        output_norm="recurrent",
        midlayer="layers.0",
    ),
    # DeepSpec: five taps, normalised queries and keys
    "eagle3_deepspec": Variant(
        "eagle3",
        head={"architectures": ["Qwen3Eagle3Model"], "target_layer_ids": [0, 1, 2, 4, 5]},
        taps=(1, 2, 3, 5, 6),
        qk_norm=True,
        own_embedding=True,
        midlayer="layers.0",
    ),
    # vLLM: one norm over all taps
    "eagle3_vllm": Variant(
        "eagle3",
        head={"architectures": ["Eagle3LlamaForCausalLM"], "eagle_config": {"norm_before_fc": True}},
        taps=(2, 3, 4),
        tap_norm="all",
        midlayer="layers.0",
    ),
    # SpecForge without a norm before the LM head
    "eagle3_unnormed": Variant(
        "eagle3",
        head={"architectures": ["LlamaForCausalLMEagle3"], "norm_output": False},
        taps=(2, 3, 4),
        output_norm="none",
    ),
}


def make_target(variant: Variant, folder: Path) -> LlamaForCausalLM:
    config = LlamaConfig(
        **{
            "hidden_size": 32,
            "intermediate_size": 48,
            "num_hidden_layers": variant.target_layers,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 8,
            "vocab_size": 64,
            "max_position_embeddings": 256,
            "tie_word_embeddings": False,
            "eos_token_id": [1, 7],
            "initializer_range": 0.1,
            **variant.target,
        }
    )
    model = LlamaForCausalLM(config).to(variant.dtype).eval()
    model.generation_config.eos_token_id = [1, 7]
    model.save_pretrained(folder, max_shard_size="20KB" if variant.shards else "1GB")
    return model.float()


def make_head(variant: Variant, folder: Path, target: LlamaForCausalLM) -> dict[str, Tensor]:
    """Random tensors under the published names, written to `folder`; returned in fp32."""
    h, q, kv = variant.hidden, variant.heads * variant.head_dim, variant.kv_heads * variant.head_dim
    wide = 2 * h if variant.kind == "eagle3" else h
    tensors: dict[str, Tensor] = {}
    shapes: dict[str, tuple[int, ...]] = {
        "fc.weight": (h, len(variant.taps) * 32) if variant.kind == "eagle3" else (h, 2 * h)
    }
    layers = ["midlayer"] if variant.kind == "eagle3" else [f"layers.{i}" for i in range(variant.layers)]
    for index, layer in enumerate(layers):
        for name, rows in (("q", q), ("k", kv), ("v", kv)):
            shapes[f"{layer}.self_attn.{name}_proj.weight"] = (rows, wide)
            if variant.qkv_bias:
                shapes[f"{layer}.self_attn.{name}_proj.bias"] = (rows,)
        shapes[f"{layer}.self_attn.o_proj.weight"] = (h, q)
        if variant.o_bias:
            shapes[f"{layer}.self_attn.o_proj.bias"] = (h,)
        if variant.qk_norm:
            shapes |= {f"{layer}.self_attn.{name}_norm.weight": (variant.head_dim,) for name in "qk"}
        for name in ("gate", "up"):
            shapes[f"{layer}.mlp.{name}_proj.weight"] = (40, h)
        shapes[f"{layer}.mlp.down_proj.weight"] = (h, 40)
        norms = ["post_attention_layernorm"]
        if variant.kind == "eagle3":
            norms += ["hidden_norm", "input_layernorm"]
        elif index > 0:
            norms.append("input_layernorm")
        shapes |= {f"{layer}.{name}.weight": (h,) for name in norms}
    if variant.fc_bias:
        shapes["fc.bias"] = (h,)
    if variant.kind == "eagle3":
        shapes |= {"norm.weight": (h,), "lm_head.weight": (variant.draft_vocab, h)}
    if variant.own_embedding:
        shapes["embed_tokens.weight"] = (64, h)
    if variant.tap_norm == "each":
        shapes |= {f"fc_norm.{i}.weight": (32,) for i in range(len(variant.taps))}
    if variant.tap_norm == "all":
        shapes["input_norm.weight"] = (32 * len(variant.taps),)
    for name, shape in shapes.items():
        tensors[name] = torch.randn(shape) * (0.3 if len(shape) > 1 else 0.2) + ("norm" in name)
    tensors = {name: tensor.to(variant.dtype) for name, tensor in tensors.items()}
    if variant.draft_vocab < 64:
        chosen = torch.randperm(64)[: variant.draft_vocab].sort().values
        tensors["d2t"] = chosen - torch.arange(variant.draft_vocab)
        tensors["t2d"] = torch.isin(torch.arange(64), chosen)
    config = {"hidden_size": h, "num_attention_heads": variant.heads, "vocab_size": 64, "rms_norm_eps": 1e-5}
    folder.mkdir()
    stored = {name.replace("midlayer", variant.midlayer): tensor for name, tensor in tensors.items()}
    save_file(stored, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({**config, **variant.head}))
    if not variant.own_embedding:
        tensors["embed_tokens.weight"] = target.model.embed_tokens.weight.detach()
    if variant.kind == "eagle1":
        tensors["lm_head.weight"] = target.lm_head.weight.detach()
    return {name: tensor.float() if tensor.is_floating_point() else tensor for name, tensor in tensors.items()}


def norm(x: Tensor, gain: Tensor) -> Tensor:
    return x / (x.pow(2).mean(-1, keepdim=True) + 1e-5).sqrt() * gain


def attend(variant: Variant, w: dict[str, Tensor], layer: str, x: Tensor, theta: float) -> Tensor:
    """Causal attention over all rows of x [T, X], one head at a time."""
    d, t = variant.head_dim, len(x)

    def project(name: str) -> Tensor:
        key = f"{layer}.self_attn.{name}_proj"
        return x @ w[f"{key}.weight"].T + w.get(f"{key}.bias", torch.zeros(()))

    angles = torch.arange(t)[:, None] * theta ** (-torch.arange(0, d, 2) / d)
    cos, sin = angles.cos(), angles.sin()

    def rotate(row: Tensor) -> Tensor:
        a, b = row[:, : d // 2], row[:, d // 2 :]
        return torch.cat([a * cos - b * sin, b * cos + a * sin], -1)

    def scaled(row: Tensor, name: str) -> Tensor:
        return norm(row, w[f"{layer}.self_attn.{name}_norm.weight"]) if variant.qk_norm else row

    q, k, v = project("q"), project("k"), project("v")
    outs = []
    for head in range(variant.heads):
        group = head // (variant.heads // variant.kv_heads)
        qh = rotate(scaled(q[:, head * d : (head + 1) * d], "q"))
        kh, vh = rotate(scaled(k[:, group * d : (group + 1) * d], "k")), v[:, group * d : (group + 1) * d]
        scores = (qh @ kh.T / d**0.5).masked_fill(torch.ones(t, t).triu(1) > 0, -torch.inf)
        outs.append(scores.softmax(-1) @ vh)
    bias = w.get(f"{layer}.self_attn.o_proj.bias", torch.zeros(()))
    return torch.cat(outs, -1) @ w[f"{layer}.self_attn.o_proj.weight"].T + bias


def feed_forward(w: dict[str, Tensor], layer: str, x: Tensor) -> Tensor:
    y = norm(x, w[f"{layer}.post_attention_layernorm.weight"])
    gate, up = (y @ w[f"{layer}.mlp.{name}_proj.weight"].T for name in ("gate", "up"))
    return x + (torch.nn.functional.silu(gate) * up) @ w[f"{layer}.mlp.down_proj.weight"].T


def head_reference(
    variant: Variant, w: dict[str, Tensor], ids: list[int], hidden: Tensor, theta: float
) -> tuple[Tensor, Tensor]:
    """ids [T], features or hidden states before them [T, Hd]. Returns hidden [T, Hd] and log-probabilities over draft
    ids [T, Vd]."""
    embedded = w["embed_tokens.weight"][ids]
    if variant.kind == "eagle3":
        m = "midlayer"
        wide = torch.cat(
            [norm(embedded, w[f"{m}.input_layernorm.weight"]), norm(hidden, w[f"{m}.hidden_norm.weight"])], -1
        )
        residual = norm(hidden, w[f"{m}.hidden_norm.weight"]) if variant.normed_residual else hidden
        x = feed_forward(w, m, residual + attend(variant, w, m, wide, theta))
        y = x if variant.output_norm == "none" else norm(x, w["norm.weight"])
        return y if variant.output_norm == "recurrent" else x, (y @ w["lm_head.weight"].T).log_softmax(-1)
    x = torch.cat([embedded, hidden], -1) @ w["fc.weight"].T + w.get("fc.bias", torch.zeros(()))
    for i in range(variant.layers):
        layer = f"layers.{i}"
        normed = norm(x, w[f"{layer}.input_layernorm.weight"]) if i else x
        x = feed_forward(w, layer, x + attend(variant, w, layer, normed, theta))
    return x, (x @ w["lm_head.weight"].T).log_softmax(-1)


@pytest.mark.parametrize("name", VARIANTS)
@torch.no_grad()
def test_bundle_equals_the_papers(name: str, tmp_path: Path) -> None:
    torch.manual_seed(3)
    variant = VARIANTS[name]
    target = make_target(variant, tmp_path / "target")
    weights = make_head(variant, tmp_path / "head", target)
    done = export(tmp_path / "target", tmp_path / "head", tmp_path / "bundle", Settings(draft_top_k=10, certify=False))
    assert done.manifest.head is not None
    assert done.manifest.head.kind == variant.kind
    assert done.manifest.head.taps == variant.taps
    assert done.manifest.target.eos_token_ids == (1, 7)
    tied = {"lm_head.weight"} if variant.target.get("tie_word_embeddings") else set()
    # every weight keeps its name, also the norms, which are all ones here
    assert set(target.state_dict()) - tied <= set(done.manifest.target.graph.weights)
    assert ("model.embed_tokens.weight" in done.shared) == (not variant.own_embedding)

    out = target(torch.tensor([PROMPT]), output_hidden_states=True)
    features = out.hidden_states[-1][0]
    if variant.kind == "eagle3":
        taps = [out.hidden_states[tap][0] for tap in variant.taps]
        if variant.tap_norm == "each":
            taps = [norm(tap, weights[f"fc_norm.{i}.weight"]) for i, tap in enumerate(taps)]
        joined = torch.cat(taps, -1)
        if variant.tap_norm == "all":
            joined = norm(joined, weights["input_norm.weight"])
        features = joined @ weights["fc.weight"].T
    theta = float({**variant.head, **variant.head.get("transformer_layer_config", {})}.get("rope_theta", 10000.0))
    ids = [*PROMPT[1:], 9]
    hidden, log_probs = head_reference(variant, weights, ids, features, theta)
    # one step further: the token 11 after the last row's own hidden state
    _, next_log_probs = head_reference(variant, weights, [*ids, 11], torch.cat([features, hidden[-1:]]), theta)

    with EagleModel.load(tmp_path / "bundle") as model:
        logits, rows = bundle_in(model).target.prefill(PROMPT)
        np.testing.assert_allclose(logits, out.logits[0, -1], atol=1e-4)
        np.testing.assert_allclose(rows, features, atol=1e-4)
        proposal = observed(model.head, ids, rows)
        with Scratch(model.head) as scratch:
            following = scratch.feed(np.array([11]), proposal.hidden, np.array([-1]))
    for ours, reference in ((proposal, log_probs[-1]), (following, next_log_probs[-1])):
        best = reference.topk(ours.tokens.shape[1])
        np.testing.assert_allclose(ours.log_probs[0], best.values, rtol=3e-5, atol=1e-4)
        offset = weights["d2t"][best.indices] if variant.draft_vocab < 64 else 0
        assert ours.tokens[0].tolist() == (best.indices + offset).tolist()
