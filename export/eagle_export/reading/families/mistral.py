"""Mistral and Mistral-Nemo: all layers may have a window, and a head's width may be independent of the model's.
Mixtral: the same with a mixture of experts in each layer."""

from eagle_export.reading.families.family import Experts, Family, one_window

MISTRAL = Family(name="Mistral", model_type="mistral", causal_lm="MistralForCausalLM", windows=one_window)
EXPERTS = Experts(
    block="block_sparse_moe",
    gate="w1",
    up="w3",
    down="w2",
    count=lambda config: int(config.num_local_experts),
    width=lambda config: int(config.intermediate_size),
    renormalised=lambda config: True,
)
MIXTRAL = Family(
    name="Mixtral", model_type="mixtral", causal_lm="MixtralForCausalLM", windows=one_window, experts=EXPERTS
)
FAMILIES = (MISTRAL, MIXTRAL)
