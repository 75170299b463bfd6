"""Qwen, and MiMo-7B, which runs Qwen2's code.

Queries, keys and values of Qwen2 and Qwen2.5 have biases; some configs give their upper layers a window. Qwen3
normalises each head of the queries and keys, and a head's width is independent of the model's; Qwen3-MoE, such as
Qwen3-30B-A3B, has a mixture of experts in all or some of its layers.
"""

from eagle_export.reading.families.family import Experts, Family, by_layer_type, one_window
from eagle_runtime.bundle.manifest import SamplingDefaults

QWEN2 = Family(
    name="Qwen2, Qwen2.5",
    model_type="qwen2",
    causal_lm="Qwen2ForCausalLM",
    as_llama=True,
    windows=by_layer_type,
    # Of the generation_config.json of Qwen2 and Qwen2.5 Instruct from 7B on.
    sampling=SamplingDefaults(temperature=0.7, top_k=20, top_p=0.8, repetition_penalty=1.05),
)
# Its own class is derived from Qwen2ForCausalLM (XiaomiMiMo/MiMo, modeling_mimo.py), with a multi-token-prediction
# layer that the target itself does not run. Code of a checkpoint is never run.
MIMO = Family(name="MiMo-7B", model_type="mimo", causal_lm="Qwen2ForCausalLM", as_llama=True, windows=by_layer_type)

QWEN3_SAMPLING = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95)  # of its generation_config.json, all sizes
QWEN3 = Family(
    name="Qwen3",
    model_type="qwen3",
    causal_lm="Qwen3ForCausalLM",
    as_llama=True,
    layer_norms=4,
    windows=by_layer_type,
    sampling=QWEN3_SAMPLING,
)
EXPERTS = Experts(
    count=lambda config: int(config.num_experts),
    width=lambda config: int(config.moe_intermediate_size),
    renormalised=lambda config: bool(config.norm_topk_prob),
)
QWEN3_MOE = Family(
    name="Qwen3-MoE",
    model_type="qwen3_moe",
    causal_lm="Qwen3MoeForCausalLM",
    layer_norms=4,
    windows=one_window,
    experts=EXPERTS,
    sampling=QWEN3_SAMPLING,
)
FAMILIES = (QWEN2, MIMO, QWEN3, QWEN3_MOE)
