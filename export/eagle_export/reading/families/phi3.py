"""Phi-3, Phi-3.5-mini and Phi-4-mini: one matrix for queries, keys and values, and one for gate and up; some rotate a
part of each head; longrope.

Longrope (arXiv 2402.13753) has one table for texts up to original_max_position_embeddings and one for longer ones. A
longer text would need keys that are cached already to be rotated again, so the graph holds the first table, and its
context ends there.
"""

from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import Config, Family, no_moving_rope, one_window

LONGROPE = ("longrope", "su", "yarn")  # names that Phi-3 configs have had for it


def context(config: Config) -> int:
    """Returns the longest text for which the first table holds."""
    rope = config.rope_parameters
    length = int(config.max_position_embeddings)
    return min(length, int(rope["original_max_position_embeddings"])) if rope["rope_type"] == "longrope" else length


def refuse(checkpoint: Checkpoint) -> None:
    """Accepts longrope, and else what other families do."""
    rope = checkpoint.config.get("rope_scaling") or checkpoint.config.get("rope_parameters") or {}
    if not isinstance(rope, dict) or rope.get("rope_type", rope.get("type")) not in LONGROPE:
        no_moving_rope(checkpoint)


PHI3 = Family(
    name="Phi-3, Phi-4-mini",
    model_type="phi3",
    causal_lm="Phi3ForCausalLM",
    windows=one_window,
    context=context,
    refuse=refuse,
)
FAMILIES = (PHI3,)
