"""ERNIE 4.5, dense: neighbouring numbers of a head are rotated with each other."""

from eagle_export.reading.families.family import Family

ERNIE45 = Family(name="ERNIE 4.5", model_type="ernie4_5", causal_lm="Ernie4_5ForCausalLM", neighbours=True)
FAMILIES = (ERNIE45,)
