"""Mistral and Mistral-Nemo: all layers may have a window, and a head's width may be independent of the model's.
Ministral: some layers have a window. Ministral-3: queries grow with their position in texts that are longer than those
of the first training. Mixtral: as Mistral, with a mixture of experts in each layer."""

from eagle_export.reading.families.family import Experts, Family, by_layer_type, one_window

MISTRAL = Family(
    name="Mistral", model_type="mistral", causal_lm="MistralForCausalLM", as_llama=True, windows=one_window
)
MINISTRAL = Family(name="Ministral", model_type="ministral", causal_lm="MinistralForCausalLM", windows=by_layer_type)
MINISTRAL3 = Family(
    name="Ministral-3",
    model_type="ministral3",
    causal_lm="Ministral3ForCausalLM",
    windows=one_window,
    since="5.24.0",  # 5.0.0 lets queries grow with their place in the cache, which is another in a tree
)
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
FAMILIES = (MISTRAL, MINISTRAL, MINISTRAL3, MIXTRAL)
