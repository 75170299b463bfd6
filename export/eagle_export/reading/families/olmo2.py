"""OLMo-2: norms come after attention and MLP, and queries and keys are normalised over all heads at once."""

from eagle_export.reading.families.family import Family

FAMILY = Family(name="OLMo-2", model_type="olmo2", causal_lm="Olmo2ForCausalLM", layer_norms=4)
