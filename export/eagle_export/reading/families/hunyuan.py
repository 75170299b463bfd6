"""Hunyuan, dense: queries and keys are rotated before they are normalised. Its configs call their rotation dynamic, but
give it a fixed factor, alpha."""

from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import Family, no_moving_rope


def refuse(checkpoint: Checkpoint) -> None:
    """Accepts a rotation with alpha, and else what other families do."""
    rope = checkpoint.config.get("rope_scaling") or checkpoint.config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or not rope.get("alpha"):
        no_moving_rope(checkpoint)


HUNYUAN = Family(
    name="Hunyuan",
    model_type="hunyuan_v1_dense",
    causal_lm="HunYuanDenseV1ForCausalLM",
    layer_norms=4,
    since="5.24.0",  # 5.0.0 rotates by another factor
    refuse=refuse,
)
FAMILIES = (HUNYUAN,)
