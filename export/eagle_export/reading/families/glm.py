"""GLM-4 and GLM-Z1: neighbouring numbers of a head's first half are rotated with each other, and gate and up are one
matrix. Norms of GLM-4-0414 come after attention and MLP too. GLM-4.5-Air has a mixture of experts in all but the first
layers, with an MLP that reads every row besides; corrected sigmoids choose experts, whose own are their weights."""

from __future__ import annotations

from dataclasses import replace
from functools import partial

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import Experts, Family, by_sigmoids, no_moving_rope

GLM = Family(name="GLM-4", model_type="glm", causal_lm="GlmForCausalLM", neighbours=True)
GLM4 = replace(GLM, name="GLM-4-0414", model_type="glm4", causal_lm="Glm4ForCausalLM", layer_norms=4)


def refuse(checkpoint: Checkpoint) -> None:
    """Raises ExportError for experts in groups and norms of queries and keys, as GLM-4.5 has them."""
    where, config = checkpoint.folder / "config.json", checkpoint.config
    if config.get("n_group", 1) != 1:
        raise ExportError(f"{where}: n_group is {config['n_group']!r}, but experts are chosen from one group alone")
    if config.get("use_qk_norm"):
        raise ExportError(
            f"{where}: use_qk_norm is set, which is not supported of this family; GLM-4.5-Air goes without"
        )
    no_moving_rope(checkpoint)


GLM4_MOE = Family(
    name="GLM-4.5-Air",
    model_type="glm4_moe",
    causal_lm="Glm4MoeForCausalLM",
    experts=Experts(
        count=lambda config: int(config.n_routed_experts),
        width=lambda config: int(config.moe_intermediate_size),
        renormalised=lambda config: bool(config.norm_topk_prob),
        chosen=partial(by_sigmoids, least=1e-20),
        correction="gate.e_score_correction_bias",
        shared="shared_experts",
    ),
    refuse=refuse,
)
FAMILIES = (GLM, GLM4, GLM4_MOE)
