"""OLMo normalises queries and keys over all heads at once. Norms of OLMo-2 come after attention and MLP; OLMo-3 gives
three of four layers a window, and its others another rotation; OLMoE has a mixture of experts in each layer."""

from dataclasses import replace

from eagle_export.reading.families import qwen
from eagle_export.reading.families.family import Family, by_layer_type

OLMO2 = Family(name="OLMo-2", model_type="olmo2", causal_lm="Olmo2ForCausalLM", layer_norms=4)
OLMO3 = replace(OLMO2, name="OLMo-3", model_type="olmo3", causal_lm="Olmo3ForCausalLM", windows=by_layer_type)
EXPERTS = replace(qwen.EXPERTS, width=lambda config: int(config.intermediate_size))
OLMOE = Family(name="OLMoE", model_type="olmoe", causal_lm="OlmoeForCausalLM", layer_norms=4, experts=EXPERTS)
FAMILIES = (OLMO2, OLMO3, OLMOE)
