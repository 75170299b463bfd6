"""Experts of checkpoints that hold one kind of matrix of all experts of a layer in one tensor: gate over up [E, 2I, X],
and down [E, X, I]."""

from __future__ import annotations

from collections.abc import Iterator

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.stored_tensors import ExpertTensor, StoredTensor

GATE_UP, DOWN = ".experts.gate_up_proj", ".experts.down_proj"  # as transformers calls them


def unstacked(checkpoint: Checkpoint) -> dict[str, StoredTensor]:
    """Returns a checkpoint's tensors, with one for each matrix of each expert in the place of those that transformers
    has. Raises ExportError for experts of another shape."""
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        if name.endswith((GATE_UP, DOWN)):
            joined = name.endswith(GATE_UP)
            tensors.update(single_experts(checkpoint, tensor, name.rpartition(".")[0], joined=joined))
        else:
            tensors[name] = tensor
    return tensors


def single_experts(
    checkpoint: Checkpoint, tensor: StoredTensor, experts: str, *, joined: bool
) -> Iterator[tuple[str, StoredTensor]]:
    """Yields name and tensor of each matrix of each expert. experts: what their names begin with. joined: whether a
    matrix is gate over up. Raises ExportError for another shape."""
    if len(tensor.shape) != 3 or (joined and tensor.shape[1] % 2):
        raise ExportError(
            f"{checkpoint.folder}: tensor {tensor.name!r} has shape {list(tensor.shape)}, which no experts of this "
            "family have; the checkpoint is of a variant that is not supported"
        )
    count, rows, columns = tensor.shape
    parts = {"down_proj": (0, rows, 1)}
    if joined:
        parts = {"gate_proj": (0, rows // 2, 1), "up_proj": (rows // 2, rows, 1)}
    for number in range(count):
        for matrix, part in parts.items():
            name, shape = f"{experts}.{number}.{matrix}.weight", (part[1] - part[0], columns)
            yield name, ExpertTensor(name, tensor.file, shape, tensor.dtype, tensor, number, part)
