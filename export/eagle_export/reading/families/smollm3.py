"""SmolLM3: every fourth layer does not rotate its queries and keys."""

from eagle_export.reading.families.family import Config, Family, by_layer_type
from eagle_runtime.bundle.manifest import SamplingDefaults


def rotary_layers(config: Config) -> int:
    """Returns the number of layers that rotate; config.no_rope_layers holds 1 for each of them."""
    return sum(map(bool, config.no_rope_layers))


SMOLLM3 = Family(
    name="SmolLM3",
    model_type="smollm3",
    causal_lm="SmolLM3ForCausalLM",
    windows=by_layer_type,
    rotary_layers=rotary_layers,
    sampling=SamplingDefaults(temperature=0.6, top_p=0.95),  # of its generation_config.json
)
FAMILIES = (SMOLLM3,)
