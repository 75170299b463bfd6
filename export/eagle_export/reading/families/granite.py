"""Granite 3: embedding, attention, residuals and logits have multipliers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_export.reading.families.family import Config, Family

if TYPE_CHECKING:
    from torch import Tensor


def scaled_logits(config: Config, logits: Tensor) -> Tensor:
    """Returns logits / config.logits_scaling."""
    return logits / float(config.logits_scaling)


GRANITE = Family(name="Granite", model_type="granite", causal_lm="GraniteForCausalLM", logits=scaled_logits)
FAMILIES = (GRANITE,)
