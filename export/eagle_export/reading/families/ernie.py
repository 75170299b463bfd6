"""ERNIE 4.5: neighbouring numbers of a head are rotated with each other. The larger models have a mixture of experts
in all but the first layers, with an MLP that reads every row besides; corrected probabilities choose experts, whose own
are their weights."""

from __future__ import annotations

from dataclasses import replace
from typing import TYPE_CHECKING

from eagle_export.reading.families.family import Config, Experts, Family, row_sums

if TYPE_CHECKING:
    from torch import Tensor

ERNIE45 = Family(name="ERNIE 4.5", model_type="ernie4_5", causal_lm="Ernie4_5ForCausalLM", neighbours=True)


def chosen(config: Config, scores: Tensor, correction: Tensor) -> tuple[Tensor, Tensor]:
    """As Experts.chosen says."""
    probabilities = scores.softmax(-1)
    which = (probabilities + correction).topk(int(config.num_experts_per_tok))[1]
    best = probabilities.gather(-1, which)
    return best / row_sums(best).clamp(min=float(config.moe_norm_min)), which


ERNIE45_MOE = replace(
    ERNIE45,
    name="ERNIE 4.5, with experts",
    model_type="ernie4_5_moe",
    causal_lm="Ernie4_5_MoeForCausalLM",
    experts=Experts(
        count=lambda config: int(config.num_experts),
        width=lambda config: int(config.moe_intermediate_size),
        renormalised=lambda config: True,
        chosen=chosen,
        correction="gate.moe_statics.e_score_correction_bias",
        shared="shared_experts",
    ),
)
FAMILIES = (ERNIE45, ERNIE45_MOE)
