"""OLMoE: a mixture of experts in each layer; queries and keys are normalised over all heads at once."""

from dataclasses import replace

from eagle_export.reading.families import qwen3_moe
from eagle_export.reading.families.family import Family

EXPERTS = replace(qwen3_moe.EXPERTS, width=lambda config: int(config.intermediate_size))
FAMILY = Family(name="OLMoE", model_type="olmoe", causal_lm="OlmoeForCausalLM", layer_norms=4, experts=EXPERTS)
