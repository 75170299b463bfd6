"""MiMo-7B, which runs Qwen2's code: its own class is derived from Qwen2ForCausalLM (XiaomiMiMo/MiMo,
modeling_mimo.py), with a multi-token-prediction layer that the target itself does not run.

Code of a checkpoint is never run."""

from eagle_export.reading.families.family import Family
from eagle_export.reading.families.windows import by_layer_type

FAMILY = Family(name="MiMo-7B", model_type="mimo", causal_lm="Qwen2ForCausalLM", windows=by_layer_type)
