"""Llama 2, 3, 3.1 and 3.2, and what others saved with Llama's code, such as SmolLM2 and TinyLlama."""

from eagle_export.families.family import Family

FAMILY = Family(name="Llama", model_type="llama", causal_lm="LlamaForCausalLM")
