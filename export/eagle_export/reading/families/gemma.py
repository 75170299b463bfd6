"""Gemma, the first: gains of norms are stored as the difference from 1, and the embedding is scaled."""

from eagle_export.reading.families.family import Family

FAMILY = Family(name="Gemma", model_type="gemma", causal_lm="GemmaForCausalLM", norm_offset=1.0)
