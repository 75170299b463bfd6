"""Arcee's AFM: an MLP without a gate, whose activation is a squared ReLU."""

from eagle_export.reading.families.family import Family

ARCEE = Family(name="AFM", model_type="arcee", causal_lm="ArceeForCausalLM")
FAMILIES = (ARCEE,)
