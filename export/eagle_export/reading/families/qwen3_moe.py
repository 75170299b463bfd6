"""Qwen3 with a mixture of experts in all or some of its layers, such as Qwen3-30B-A3B."""

from eagle_export.reading.families.experts import Experts
from eagle_export.reading.families.family import Family
from eagle_export.reading.families.qwen3 import SAMPLING
from eagle_export.reading.families.windows import every_layer

EXPERTS = Experts(
    block="mlp",
    gate="gate_proj",
    up="up_proj",
    down="down_proj",
    count=lambda config: int(config.num_experts),
    width=lambda config: int(config.moe_intermediate_size),
    renormalised=lambda config: bool(config.norm_topk_prob),
)
FAMILY = Family(
    name="Qwen3-MoE",
    model_type="qwen3_moe",
    causal_lm="Qwen3MoeForCausalLM",
    layer_norms=4,
    windows=every_layer,
    experts=EXPERTS,
    sampling=SAMPLING,
)
