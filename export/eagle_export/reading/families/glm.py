"""GLM-4 and GLM-Z1: neighbouring numbers of a head's first half are rotated with each other, and gate and up are one
matrix. Norms of GLM-4-0414 come after attention and MLP too."""

from dataclasses import replace

from eagle_export.reading.families.family import Family

GLM = Family(name="GLM-4", model_type="glm", causal_lm="GlmForCausalLM", neighbours=True)
GLM4 = replace(GLM, name="GLM-4-0414", model_type="glm4", causal_lm="Glm4ForCausalLM", layer_norms=4)
FAMILIES = (GLM, GLM4)
