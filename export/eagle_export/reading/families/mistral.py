"""Mistral and Mistral-Nemo: all layers may have a window, and a head's width may be independent of the model's."""

from eagle_export.reading.families.family import Family
from eagle_export.reading.families.windows import every_layer

FAMILY = Family(name="Mistral", model_type="mistral", causal_lm="MistralForCausalLM", windows=every_layer)
