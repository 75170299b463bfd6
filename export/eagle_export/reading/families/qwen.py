"""Qwen, and MiMo-7B, which runs Qwen2's code.

Queries, keys and values of Qwen2 and Qwen2.5 have biases; some configs give their upper layers a window. Qwen3
normalises each head of the queries and keys, and a head's width is independent of the model's; Qwen3-MoE, such as
Qwen3-30B-A3B, has a mixture of experts in all or some of its layers. Three of four layers of Qwen3.5 have a gated delta
net in the place of attention, whose state a row of q, k, v and two gates changes; attention is gated in the others. Its
larger models, such as Qwen3.5-35B-A3B, have a mixture of experts in each layer, with a gated MLP that reads every row.
"""

from dataclasses import replace

from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import (
    Config,
    Experts,
    Family,
    attention_layers,
    by_layer_type,
    check_states,
    delta_sizes,
    no_moving_rope,
    one_window,
    rows_of_attention,
)
from eagle_export.reading.families.stacked_experts import unstacked
from eagle_export.reading.stored_tensors import StoredTensor, grouped, queries_and_gates
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
PARTIAL_ROTATION = 0.25  # of a head of Qwen3.5 where its config does not say, as transformers has it


def norms(config: Config) -> int:
    """RMS norms of the whole model: of a layer two, and one in a delta net, or two of heads; and the last."""
    return 3 * int(config.num_hidden_layers) + attention_layers(config) + 1


def refuse(checkpoint: Checkpoint) -> None:
    """Raises ExportError for what no layers with a state have, and what other families refuse."""
    check_states(checkpoint, delta_sizes(checkpoint))
    no_moving_rope(checkpoint)


def queries_first(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Returns the weights of all queries and their gates, where checkpoints have both of each head together."""
    heads = checkpoint.integer("num_attention_heads")
    return {
        name: grouped(tensor, *queries_and_gates(tensor, heads))
        for name, tensor in checkpoint.tensors.items()
        if name.endswith((".self_attn.q_proj.weight", ".self_attn.q_proj.bias"))
    }


QWEN35 = Family(
    name="Qwen3.5",
    model_type="qwen3_5_text",
    causal_lm="Qwen3_5ForCausalLM",
    norms=norms,
    norm_offset=1.0,
    rows=rows_of_attention,
    attention_layers=attention_layers,
    delta="linear_attn",
    reordered=queries_first,
    rotary_layers=attention_layers,
    refuse=refuse,
    since="5.24.0",
)


def opened(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a checkpoint with a tensor for each matrix of each expert, and with a width of an MLP, which configs of
    models without one outside the mixture leave out. Raises ExportError for experts of another shape."""
    width = checkpoint.integer("shared_expert_intermediate_size", 512)
    return replace(checkpoint, config={"intermediate_size": width, **checkpoint.config}, tensors=unstacked(checkpoint))


QWEN35_MOE = replace(
    QWEN35,
    name="Qwen3.5, with experts",
    model_type="qwen3_5_moe_text",
    causal_lm="Qwen3_5MoeForCausalLM",
    experts=replace(
        EXPERTS,
        renormalised=lambda config: True,
        stacked=True,
        shared="shared_expert",
        shared_gate="shared_expert_gate",
    ),
    opened=opened,
)
FAMILIES = (QWEN2, MIMO, QWEN3, QWEN3_MOE, QWEN35, QWEN35_MOE)
