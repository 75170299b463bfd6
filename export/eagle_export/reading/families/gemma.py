"""Gemma: gains of norms are stored as the difference from 1, and the embedding is scaled.

From Gemma-2 on there are norms before and after attention and MLP, and some layers have a window. Gemma-2 bounds scores
and logits by a tanh; Gemma-3 normalises queries and keys, and its layers with a window rotate by a table of their own.
Of checkpoints of Gemma-3 with images (model_type gemma3) the language model is read (nested.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import Config, Family, by_layer_type, no_moving_rope
from eagle_runtime.bundle.manifest import SamplingDefaults

if TYPE_CHECKING:
    from torch import Tensor


def bounded_logits(config: Config, logits: Tensor) -> Tensor:
    """Returns cap * tanh(logits / cap), if the config has a cap."""
    cap = config.final_logit_softcapping
    return logits if cap is None else (logits / float(cap)).tanh() * float(cap)


def refuse(checkpoint: Checkpoint) -> None:
    """Raises ExportError for attention in both directions, and for a rotation that depends on the text's length."""
    where, config = checkpoint.folder / "config.json", checkpoint.config
    if config.get("use_bidirectional_attention"):
        raise ExportError(f"{where}: use_bidirectional_attention is set, but a token may attend to earlier ones alone")
    no_moving_rope(checkpoint)


GEMMA = Family(name="Gemma", model_type="gemma", causal_lm="GemmaForCausalLM", norm_offset=1.0)
GEMMA2 = Family(
    name="Gemma-2",
    model_type="gemma2",
    causal_lm="Gemma2ForCausalLM",
    layer_norms=4,
    norm_offset=1.0,
    windows=by_layer_type,
    logits=bounded_logits,
)
GEMMA3 = Family(
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
FAMILIES = (GEMMA, GEMMA2, GEMMA3)
