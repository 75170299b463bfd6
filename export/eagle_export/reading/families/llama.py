"""Llama 2, 3, 3.1 and 3.2, and what others saved with Llama's code, such as SmolLM2 and TinyLlama."""

from eagle_export.reading.families.family import Family
from eagle_runtime.bundle.manifest import SamplingDefaults

# Of the generation_config.json of Llama 2, 3, 3.1 and 3.2.
SAMPLING = SamplingDefaults(temperature=0.6, top_p=0.9)
LLAMA = Family(name="Llama", model_type="llama", causal_lm="LlamaForCausalLM", as_llama=True, sampling=SAMPLING)
FAMILIES = (LLAMA,)
