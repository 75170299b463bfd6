"""Granite 3: embedding, attention, residuals and logits have multipliers. Its small models with experts, such as
Granite-3.1-1B-A400M, have a mixture of them in each layer. Granite 4 without experts and Mamba layers, such as
Granite-4.0-micro, is Granite 3 under other names."""

from dataclasses import replace

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import Experts, Family, no_moving_rope
from eagle_export.reading.families.stacked_experts import single_experts
from eagle_export.reading.stored_tensors import RowsTensor, StoredTensor

BLOCK = "block_sparse_moe"
SHARED, KINDS = "shared_mlp", ("layer_types", "layers_block_type")  # of Granite 4, and names of its layers' kinds
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


def plain(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a Granite 4 with the names and the config of Granite 3; one that is none as it is."""
    if _beyond_granite(checkpoint) is not None:
        return checkpoint
    config = {key: value for key, value in checkpoint.config.items() if key not in KINDS}
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        layer, linear, part = name.partition(f".{SHARED}.")
        if linear and part == "input_linear.weight" and len(tensor.shape) == 2:  # gate over up
            rows, columns = tensor.shape[0] // 2, tensor.shape[1]
            for start, own in ((0, f"{layer}.mlp.gate_proj.weight"), (rows, f"{layer}.mlp.up_proj.weight")):
                tensors[own] = RowsTensor(own, tensor.file, (rows, columns), tensor.dtype, tensor, start)
        else:
            tensors[f"{layer}.mlp.down_proj.weight" if linear and part == "output_linear.weight" else name] = tensor
    config |= {"layer_types": ["full_attention"] * len(_kinds(checkpoint))}
    if (width := config.get("shared_intermediate_size")) is not None:
        config["intermediate_size"] = width
    return replace(checkpoint, config=config, tensors=tensors)


def refuse(checkpoint: Checkpoint) -> None:
    """Raises ExportError for what Granite 3 does not have, and what other families refuse."""
    if (reason := _beyond_granite(checkpoint)) is not None:
        raise ExportError(
            f"{checkpoint.folder / 'config.json'}: the model has {reason}; of Granite 4 only models of dense "
            "layers with rotated attention are supported, such as granite-4.0-micro"
        )
    no_moving_rope(checkpoint)


def _kinds(checkpoint: Checkpoint) -> list[object]:
    stated = next((value for key in KINDS if (value := checkpoint.config.get(key)) is not None), None)
    return stated if isinstance(stated, list) else ["mamba"]


def _beyond_granite(checkpoint: Checkpoint) -> str | None:
    """What a Granite 4 has that Granite 3 does not; None if nothing."""
    if any(each not in ("attention", "full_attention") for each in _kinds(checkpoint)):
        return "layers without attention"
    if checkpoint.config.get("num_local_experts", 8):
        return "experts"
    return "no rotation" if checkpoint.config.get("position_embedding_type") != "rope" else None


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
GRANITE4 = replace(GRANITE, name="Granite 4", model_type="granitemoehybrid", refuse=refuse, opened=plain)
FAMILIES = (GRANITE, GRANITE_MOE, GRANITE4)
