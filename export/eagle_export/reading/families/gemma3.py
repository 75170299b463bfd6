"""Gemma-3, text alone: as Gemma-2, with norms of queries and keys; layers with a window rotate by a table of their own.

Checkpoints with images (model_type gemma3) nest the text model's config and tensors and are not read.
"""

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import Family, no_moving_rope
from eagle_export.reading.families.gemma2 import bounded_logits
from eagle_export.reading.families.windows import by_layer_type
from eagle_runtime.bundle.manifest import SamplingDefaults


def refuse(checkpoint: Checkpoint) -> None:
    """Raises ExportError for attention in both directions, and for a rotation that depends on the text's length."""
    where, config = checkpoint.folder / "config.json", checkpoint.config
    if config.get("use_bidirectional_attention"):
        raise ExportError(f"{where}: use_bidirectional_attention is set, but a token may attend to earlier ones alone")
    tables = config.get("rope_parameters")
    if not isinstance(tables, dict) or not any(isinstance(each, dict) for each in tables.values()):
        tables = {"of both kinds": tables}
    for each in tables.values():
        no_moving_rope(Checkpoint(checkpoint.folder, {**config, "rope_parameters": each}, {}))


FAMILY = Family(
    name="Gemma-3 (text)",
    model_type="gemma3_text",
    causal_lm="Gemma3ForCausalLM",
    layer_norms=6,
    norm_offset=1.0,
    windows=by_layer_type,
    logits=bounded_logits,
    refuse=refuse,
    sampling=SamplingDefaults(temperature=1.0, top_k=64, top_p=0.95),  # of its generation_config.json, all sizes
)
