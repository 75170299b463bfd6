"""Gemma-2: norms before and after attention and MLP, whose gains are stored as the difference from 1; every other layer
has a window; scores and logits are bounded by a tanh."""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_export.reading.families.family import Config, Family
from eagle_export.reading.families.windows import by_layer_type

if TYPE_CHECKING:
    from torch import Tensor


def bounded_logits(config: Config, logits: Tensor) -> Tensor:
    """Returns cap * tanh(logits / cap), if the config has a cap."""
    cap = config.final_logit_softcapping
    return logits if cap is None else (logits / float(cap)).tanh() * float(cap)


FAMILY = Family(
    name="Gemma-2",
    model_type="gemma2",
    causal_lm="Gemma2ForCausalLM",
    layer_norms=4,
    norm_offset=1.0,
    windows=by_layer_type,
    logits=bounded_logits,
)
