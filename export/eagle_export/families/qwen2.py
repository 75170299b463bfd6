"""Qwen2 and Qwen2.5: queries, keys and values have biases; some configs give their upper layers a window."""

from eagle_export.families.family import Family
from eagle_export.families.windows import by_layer_type

FAMILY = Family(name="Qwen2, Qwen2.5", model_type="qwen2", causal_lm="Qwen2ForCausalLM", windows=by_layer_type)
