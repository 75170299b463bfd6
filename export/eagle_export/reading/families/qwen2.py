"""Qwen2 and Qwen2.5: queries, keys and values have biases; some configs give their upper layers a window."""

from eagle_export.reading.families.family import Family
from eagle_export.reading.families.windows import by_layer_type
from eagle_runtime.bundle.manifest import SamplingDefaults

FAMILY = Family(
    name="Qwen2, Qwen2.5",
    model_type="qwen2",
    causal_lm="Qwen2ForCausalLM",
    windows=by_layer_type,
    # Of the generation_config.json of Qwen2 and Qwen2.5 Instruct from 7B on.
    sampling=SamplingDefaults(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05),
)
