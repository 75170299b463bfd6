"""Seed-OSS: queries, keys and values have biases."""

from eagle_export.reading.families.family import Family

SEED_OSS = Family(name="Seed-OSS", model_type="seed_oss", causal_lm="SeedOssForCausalLM", as_llama=True)
FAMILIES = (SEED_OSS,)
