"""Granite 3: embedding, attention, residuals and logits have multipliers."""

from torch import Tensor

from eagle_export.families.family import Config, Family


def scaled_logits(config: Config, logits: Tensor) -> Tensor:
    """Returns logits / config.logits_scaling."""
    return logits / float(config.logits_scaling)


FAMILY = Family(name="Granite", model_type="granite", causal_lm="GraniteForCausalLM", logits=scaled_logits)
