"""Qwen3: each head of the queries and keys is normalised, and a head's width is independent of the model's."""

from eagle_export.reading.families.family import Family
from eagle_export.reading.families.windows import by_layer_type
from eagle_runtime.bundle.manifest import SamplingDefaults

# Of its generation_config.json, all sizes.
SAMPLING = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)
FAMILY = Family(
    name="Qwen3",
    model_type="qwen3",
    causal_lm="Qwen3ForCausalLM",
    layer_norms=4,
    windows=by_layer_type,
    sampling=SAMPLING,
)
