"""Granite 3: embedding, attention, residuals and logits have multipliers."""

from eagle_export.reading.families.family import Family

GRANITE = Family(
    name="Granite",
    model_type="granite",
    causal_lm="GraniteForCausalLM",
    logits=lambda config, logits: logits / float(config.logits_scaling),
)
FAMILIES = (GRANITE,)
