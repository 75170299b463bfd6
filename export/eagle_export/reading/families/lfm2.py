"""LFM2 (350M to 2.6B): most layers mix a token with the few before it by a short convolution, and have no attention.
The larger models (8B-A1B, 24B-A2B) have a mixture of experts in all but the first layers.

Where attention caches keys and values, a convolution caches what it reads of a token, H numbers: the first half in the
place of keys, the second in that of values, each in heads as wide as attention's. So a cache holds and moves the rows
of all layers alike.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import (
    Config,
    Experts,
    Family,
    Rows,
    by_sigmoids,
    no_moving_rope,
    only_types,
)

CONVOLUTION, ATTENTION = "conv", "full_attention"
MLP = "feed_forward"  # of a layer
LAYER_NORMS, HEAD_NORMS = 2, 2  # of a layer; of queries and keys


def attention_layers(config: Config) -> int:
    """How many layers have attention."""
    return sum(kind == ATTENTION for kind in config.layer_types)


def rows(config: Config) -> Rows:
    """Of each layer: key/value heads and their width, or those among which a convolution's input is divided."""
    width = int(config.hidden_size) // int(config.num_attention_heads)
    shapes = {ATTENTION: (int(config.num_key_value_heads), width)}
    shapes[CONVOLUTION] = (int(config.hidden_size) // (2 * width), width)
    return tuple(shapes[kind] for kind in config.layer_types)


def norms(config: Config) -> int:
    """RMS norms of the whole model."""
    return LAYER_NORMS * int(config.num_hidden_layers) + HEAD_NORMS * attention_layers(config) + 1


def refuse(checkpoint: Checkpoint) -> None:
    """Raises ExportError for layers of other kinds, and a number of heads that does not divide half the width."""
    where = checkpoint.folder / "config.json"
    only_types(checkpoint, CONVOLUTION, ATTENTION)
    hidden, heads = checkpoint.integer("hidden_size"), checkpoint.integer("num_attention_heads")
    if heads % 2 or hidden % heads:
        raise ExportError(f"{where}: hidden_size {hidden} is not that of an even number of heads, but of {heads}")
    if checkpoint.config.get("use_expert_bias") is False:
        raise ExportError(f"{where}: use_expert_bias is false, but experts are chosen by corrected shares alone")
    no_moving_rope(checkpoint)


LFM2 = Family(
    name="LFM2",
    model_type="lfm2",
    causal_lm="Lfm2ForCausalLM",
    epsilon="norm_eps",
    norms=norms,
    rows=rows,
    attention_layers=attention_layers,
    rotary_layers=attention_layers,
    convolution="conv",
    mlp_norm="ffn_norm",
    last_norm="embedding_norm",
    refuse=refuse,
    since="5.24.0",
)
LFM2_MOE = replace(
    LFM2,
    name="LFM2, with experts",
    model_type="lfm2_moe",
    causal_lm="Lfm2MoeForCausalLM",
    experts=Experts(
        block=MLP,
        module=MLP,
        gate="w1",
        up="w3",
        down="w2",
        count=lambda config: int(config.num_experts),
        width=lambda config: int(config.moe_intermediate_size),
        renormalised=lambda config: bool(config.norm_topk_prob),
        chosen=partial(by_sigmoids, least=1e-6),
        correction="expert_bias",
    ),
)
FAMILIES = (LFM2, LFM2_MOE)
