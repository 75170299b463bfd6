"""Tiny random Qwen3.5 as published: with a part that reads images, and with a multi-token-prediction layer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import (
    Qwen3_5Config,
    Qwen3_5ForConditionalGeneration,
    Qwen3_5MoeConfig,
    Qwen3_5MoeForConditionalGeneration,
)
from transformers.models.qwen3_5 import modeling_qwen3_5 as code

from mtp_writers import read_folder, write_folder

# Keys of text_config in config.json of Qwen/Qwen3.5-0.8B, -2B, -4B and -9B, whose values are these but for sizes.
PUBLISHED = {
    "attention_bias": False, "attention_dropout": 0.0, "attn_output_gate": True, "dtype": "float32",
    "eos_token_id": 1, "full_attention_interval": 4, "head_dim": 16, "hidden_act": "silu", "hidden_size": 32,
    "initializer_range": 0.15, "intermediate_size": 48, "layer_types": ["linear_attention"] * 3 + ["full_attention"],
    "linear_conv_kernel_dim": 4, "linear_key_head_dim": 16, "linear_num_key_heads": 2, "linear_num_value_heads": 4,
    "linear_value_head_dim": 8, "mamba_ssm_dtype": "float32", "max_position_embeddings": 256, "mlp_only_layers": [],
    "model_type": "qwen3_5_text", "mtp_num_hidden_layers": 1, "mtp_use_dedicated_embeddings": False,
    "num_attention_heads": 4, "num_hidden_layers": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-6,
    "rope_parameters": {
        "mrope_interleaved": True, "mrope_section": [11, 11, 10], "rope_type": "default", "rope_theta": 10000000,
        "partial_rotary_factor": 0.25,
    },
    "tie_word_embeddings": True, "use_cache": True, "vocab_size": 64,
}  # fmt: skip
SEEN = {
    "model_type": "qwen3_5", "depth": 1, "hidden_size": 16, "intermediate_size": 16, "num_heads": 2, "patch_size": 4,
    "out_hidden_size": 32, "num_position_embeddings": 4,
}  # fmt: skip


class PredictionLayer(nn.Module):
    """What vllm/model_executor/models/qwen3_5_mtp.py says in equations, with transformers' decoder layer."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        config._attn_implementation = "eager"
        norms = (code.Qwen3_5RMSNorm(config.hidden_size, config.rms_norm_eps) for _ in range(3))
        self.norm, self.pre_fc_norm_hidden, self.pre_fc_norm_embedding = norms
        self.fc = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layers = nn.ModuleList([code.Qwen3_5DecoderLayer(config, config.layer_types.index("full_attention"))])
        self.rotary = code.Qwen3_5TextRotaryEmbedding(config)

    @torch.no_grad()
    def forward(self, embeddings: torch.Tensor, previous: torch.Tensor) -> torch.Tensor:
        """embeddings [1, T, H] of the tokens after those whose hidden states [1, T, H] are `previous`."""
        count = embeddings.shape[1]
        x = self.fc(torch.cat([self.pre_fc_norm_embedding(embeddings), self.pre_fc_norm_hidden(previous)], -1))
        mask = torch.full((1, 1, count, count), -torch.inf).triu(1)
        tables = self.rotary(x, torch.arange(count)[None])
        x = self.layers[0](x, position_embeddings=tables, attention_mask=mask)
        out: torch.Tensor = self.norm(x[0] if isinstance(x, tuple) else x)
        return out


def qwen35() -> Any:
    config = Qwen3_5Config(text_config=PUBLISHED, vision_config=SEEN, tie_word_embeddings=True)
    return _random(Qwen3_5ForConditionalGeneration(config))


def qwen35_moe() -> Any:
    """With experts, whose config has no width of another MLP."""
    widths = {"moe_intermediate_size": 24, "shared_expert_intermediate_size": 40, "num_experts": 4}
    text = {**PUBLISHED, **widths, "num_experts_per_tok": 2, "model_type": "qwen3_5_moe_text"}
    del text["intermediate_size"], text["mlp_only_layers"]
    seen = {**SEEN, "model_type": "qwen3_5_moe"}
    return _random(Qwen3_5MoeForConditionalGeneration(Qwen3_5MoeConfig(text_config=text, vision_config=seen)))


def with_layer(folder: Path) -> PredictionLayer:
    """Adds a layer to a checkpoint of the model in `folder`, and returns it."""
    layer: PredictionLayer = _random(PredictionLayer(Qwen3_5Config(text_config=PUBLISHED).text_config))
    tensors, config = read_folder(folder)
    write_folder(folder, tensors | {f"mtp.{name}": each for name, each in layer.state_dict().items()}, config)
    return layer


def _random(module: Any) -> Any:
    torch.manual_seed(7)
    for name, parameter in module.named_parameters():
        if name.endswith("norm.weight"):
            nn.init.normal_(parameter, parameter.mean().item(), 0.3)
        elif parameter.ndim > 1:
            nn.init.normal_(parameter, 0, 0.15)
    return module.eval()
