"""Granite 3: embedding, attention, residuals and logits have multipliers. Its small models with experts, such as
Granite-3.1-1B-A400M, have a mixture of them in each layer."""

from collections.abc import Iterator
from dataclasses import replace

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import Experts, Family
from eagle_export.reading.stored_tensors import ExpertTensor, StoredTensor

BLOCK = "block_sparse_moe"
INPUTS, OUTPUTS = f"{BLOCK}.input_linear.weight", f"{BLOCK}.output_linear.weight"  # [E, 2I, H] and [E, H, I]


def opened(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a checkpoint with a tensor for each matrix of each expert. Raises ExportError for another shape."""
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if name.endswith((INPUTS, OUTPUTS)):
            tensors.update(_experts(checkpoint, name, tensor))
        else:
            tensors[name.replace(f".{BLOCK}.router.layer.", f".{BLOCK}.router.")] = tensor
    return replace(checkpoint, tensors=tensors)


def _experts(checkpoint: Checkpoint, name: str, tensor: StoredTensor) -> Iterator[tuple[str, StoredTensor]]:
    if len(tensor.shape) != 3 or tensor.shape[1] % 2:
        raise ExportError(
            f"{checkpoint.folder}: tensor {name!r} has shape {list(tensor.shape)}, which no experts of Granite have; "
            "the checkpoint is of a variant that is not supported"
        )
    count, rows, columns = tensor.shape
    parts = {"down_proj": (0, rows, 1)}
    if name.endswith(INPUTS):
        parts = {"gate_proj": (0, rows // 2, 1), "up_proj": (rows // 2, rows, 1)}
    layer = name.partition(f".{BLOCK}.")[0]
    for number in range(count):
        for matrix, part in parts.items():
            own, shape = f"{layer}.{BLOCK}.experts.{number}.{matrix}.weight", (part[1] - part[0], columns)
            yield own, ExpertTensor(own, tensor.file, shape, tensor.dtype, tensor, number, part)


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
FAMILIES = (GRANITE, GRANITE_MOE)
