"""Mixtral: Mistral with a mixture of experts in each layer."""

from eagle_export.reading.families.experts import Experts
from eagle_export.reading.families.family import Family
from eagle_export.reading.families.windows import every_layer

EXPERTS = Experts(
    block="block_sparse_moe",
    gate="w1",
    up="w3",
    down="w2",
    count=lambda config: int(config.num_local_experts),
    width=lambda config: int(config.intermediate_size),
    renormalised=lambda config: True,
)
FAMILY = Family(
    name="Mixtral", model_type="mixtral", causal_lm="MixtralForCausalLM", windows=every_layer, experts=EXPERTS
)
