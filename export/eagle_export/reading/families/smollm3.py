"""SmolLM3: every fourth layer does not rotate its queries and keys."""

from eagle_export.reading.families.family import Family, by_layer_type
from eagle_runtime.bundle.manifest import SamplingDefaults

SMOLLM3 = Family(
    name="SmolLM3",
    model_type="smollm3",
    causal_lm="SmolLM3ForCausalLM",
    windows=by_layer_type,
    rotary_layers=lambda config: sum(map(bool, config.no_rope_layers)),  # which holds 1 for each layer that rotates
    sampling=SamplingDefaults(temperature=0.6, top_p=0.95),  # of its generation_config.json
)
FAMILIES = (SMOLLM3,)
