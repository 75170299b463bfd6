"""Granite 3: embedding, attention, residuals and logits have multipliers. Its small models with experts, such as
Granite-3.1-1B-A400M, have a mixture of them in each layer.

Granite 4 has Granite 3's multipliers. Most layers of its hybrid models, such as Granite-4.0-H-350M, have a state space
of Mamba-2 in the place of attention, whose state a row of x, B, C and dt changes; attention does not rotate then, since
states know the order. Larger ones, such as Granite-4.0-H-Tiny, have a mixture of experts beside each layer's MLP."""

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import (
    ATTENTION,
    LINEAR,
    Experts,
    Family,
    attention_layers,
    check_states,
    linear_layers,
    no_moving_rope,
    rows_of_attention,
)
from eagle_export.reading.families.stacked_experts import single_experts
from eagle_export.reading.stored_tensors import JoinedTensor, StoredTensor, grouped

BLOCK = "block_sparse_moe"
# Of Granite 4: the part of a layer with a state, where configs say what kinds layers are of, and published ones' names.
MAMBA, KINDS, TYPES = "mamba", ("layer_types", "layers_block_type"), {"mamba": LINEAR, "attention": ATTENTION}
GATE, UP, GATE_UP = (f".shared_mlp.{name}.weight" for name in ("gate_proj", "up_proj", "input_linear"))
NO_LIMITS = None, [0.0, math.inf], [0.0, {"__float__": "Infinity"}]  # of steps, as releases of transformers write them
# Settings that models are supported with, the first of each being transformers' default.
KNOWN: Mapping[str, tuple[Any, ...]] = {
    "time_step_limit": (None,),
    "mamba_conv_bias": (True,),
    "mamba_proj_bias": (False, None),
    "hidden_act": ("silu",),
    "position_embedding_type": (None, "nope", "rope"),
}
INPUTS, OUTPUTS = f"{BLOCK}.input_linear.weight", f"{BLOCK}.output_linear.weight"  # [E, 2I, H] and [E, H, I]


def opened(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a checkpoint with a tensor for each matrix of each expert. Raises ExportError for another shape."""
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if name.endswith((INPUTS, OUTPUTS)):
            experts = name.partition(f".{BLOCK}.")[0] + f".{BLOCK}.experts"
            tensors.update(single_experts(checkpoint, tensor, experts, joined=name.endswith(INPUTS)))
        else:
            tensors[name.replace(f".{BLOCK}.router.layer.", f".{BLOCK}.router.")] = tensor
    return replace(checkpoint, tensors=tensors)


def with_its_names(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a Granite 4 with transformers' names of layers' kinds, with a width of an MLP, which its config calls
    otherwise where there are no experts, without a limit of steps that limits nothing, and with gate and up of MLPs in
    one tensor. Raises ExportError for these of two shapes, and what `opened` does."""
    config = {key: value for key, value in checkpoint.config.items() if key not in KINDS}
    kinds = next((value for key in KINDS if (value := checkpoint.config.get(key)) is not None), None)
    if isinstance(kinds, list):
        config["layer_types"] = [TYPES.get(kind, kind) if isinstance(kind, str) else kind for kind in kinds]
    if config.get("time_step_limit") in NO_LIMITS:
        config.pop("time_step_limit", None)
    if not _has_experts(config) and (width := config.get("shared_intermediate_size")) is not None:
        config["intermediate_size"] = width
    tensors = dict(checkpoint.tensors)
    for name in [name for name in tensors if name.endswith(GATE)]:  # of a GGUF file
        gate, up = tensors.pop(name), tensors.pop(name.replace(GATE, UP), None)
        if up is None or up.shape != gate.shape:
            raise ExportError(f"{checkpoint.folder}: tensor {name!r} has no other one of its shape for what it gates")
        whole, shape = name.replace(GATE, GATE_UP), (2 * gate.shape[0], *gate.shape[1:])
        tensors[whole] = JoinedTensor(whole, gate.file, shape, gate.dtype, (gate, up))
    renamed = replace(checkpoint, config=config, tensors=tensors)
    return opened(renamed) if _has_experts(config) else renamed


def state_sizes(checkpoint: Checkpoint) -> tuple[int, int, int, int]:
    """Returns number and width of a state space's heads of B and C, and of those of x; as transformers has them where
    config.json does not say. Raises ExportError for what is no number."""
    groups, key_width = checkpoint.integer("mamba_n_groups", 1), checkpoint.integer("mamba_d_state", 256)
    heads, whole = checkpoint.integer("mamba_n_heads", 128), checkpoint.integer("mamba_expand", 2)
    return groups, key_width, heads, whole * checkpoint.integer("hidden_size") // heads


def reordered(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Returns the weights of state spaces whose rows are z, x, B, C and dt, or x, B and C, as z, C, B, x and dt. Raises
    ExportError for tensors of other sizes than config.json says."""
    groups, key_width, heads, width = state_sizes(checkpoint)
    x, b, c = heads * width, heads * width + groups * key_width, heads * width + 2 * groups * key_width
    ordered = (b, c), (x, b), (0, x)
    whole = (0, x), *((x + start, x + stop) for start, stop in ordered), (x + c, x + c + heads)
    parts = {"in_proj.weight": whole, "conv1d.weight": ordered, "conv1d.bias": ordered}
    found: dict[str, StoredTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        _, mamba, part = name.partition(f".{MAMBA}.")
        if mamba and part in parts:
            rows = sum(stop - start for start, stop in parts[part])
            checkpoint.require(name, (rows, *[None] * (len(tensor.shape) - 1)), stated=True)
            found[name] = grouped(tensor, 1, *parts[part])
    return found


def refuse(checkpoint: Checkpoint) -> None:
    """Raises ExportError for what no layers with a state have, settings of state spaces that no published model has,
    and what other families refuse."""
    where = checkpoint.folder / "config.json"
    if not isinstance(checkpoint.config.get("layer_types"), list):
        raise ExportError(f"{where}: layer_types is no list, so that no layer has attention, and a target needs one")
    check_states(checkpoint, state_sizes(checkpoint))
    for key, (default, *known) in KNOWN.items():
        value = checkpoint.config.get(key, default)
        if value not in (default, *known):
            raise ExportError(f"{where}: {key} is {value!r}, but only models with {default!r} are supported")
    reordered(checkpoint)
    no_moving_rope(checkpoint)


def _has_experts(config: Mapping[str, Any]) -> bool:
    return bool(config.get("num_local_experts", 8) != 0)


def _with_experts(config: Mapping[str, Any]) -> Family | None:
    return GRANITE4_MOE if _has_experts(config) else None


GRANITE = Family(
    name="Granite",
    model_type="granite",
    causal_lm="GraniteForCausalLM",
    logits=lambda config, logits: logits / float(config.logits_scaling),
)
GRANITE_MOE = replace(
    GRANITE,
    name="Granite, with experts",
    model_type="granitemoe",
    causal_lm="GraniteMoeForCausalLM",
    experts=Experts(
        block=BLOCK,
        module=BLOCK,
        count=lambda config: int(config.num_local_experts),
        width=lambda config: int(config.intermediate_size),
        renormalised=lambda config: True,
        router="router",
        stacked=True,
    ),
    opened=opened,
)
GRANITE4 = Family(
    name="Granite 4",
    model_type="granitemoehybrid",
    causal_lm="GraniteMoeHybridForCausalLM",
    norms=lambda config: 2 * int(config.num_hidden_layers) + linear_layers(config) + 1,
    rows=rows_of_attention,
    attention_layers=attention_layers,
    rotary_layers=lambda config: attention_layers(config) if config.position_embedding_type == "rope" else 0,
    space=MAMBA,
    state_sizes=state_sizes,
    reordered=reordered,
    logits=GRANITE.logits,
    refuse=refuse,
    variant=_with_experts,
    opened=with_its_names,
    since="5.24.0",
)
GRANITE4_MOE = replace(GRANITE4, name="Granite 4, with experts", experts=GRANITE_MOE.experts)
FAMILIES = (GRANITE, GRANITE_MOE, GRANITE4)
