"""Qwen3-Next, such as Qwen3-Coder-Next: what Qwen3.5 with experts computes, with other tensors.

Each layer has a mixture of experts, whose matrices are stored one by one. Rows of a delta net that Qwen3.5 has in four
tensors are in two, in a group for each head of keys: of queries, keys, values and gates of the output, and of how much
of the state changes and how much stays.
"""

from __future__ import annotations

from dataclasses import replace

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import delta_sizes
from eagle_export.reading.families.qwen import QWEN35_MOE
from eagle_export.reading.families.qwen import opened as with_single_experts
from eagle_export.reading.families.qwen import refuse as refuse_layers
from eagle_export.reading.stored_tensors import grouped

QKVZ, BA = ".linear_attn.in_proj_qkvz.weight", ".linear_attn.in_proj_ba.weight"
ALL_HAVE_EXPERTS = {"norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": []}


def opened(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a checkpoint with Qwen3.5's tensors. Raises ExportError for tensors of other sizes than config.json
    says."""
    keys, width, values, value_width = delta_sizes(checkpoint)
    shared = max(1, values // keys)  # heads of values that share one of keys
    tensors = {}
    for name, tensor in checkpoint.tensors.items():
        if name.endswith(QKVZ):
            checkpoint.require(name, (2 * (keys * width + keys * shared * value_width), None), stated=True)
            value, gate = 2 * width, 2 * width + shared * value_width
            parts = {
                "in_proj_qkv": ((0, width), (width, value), (value, gate)),
                "in_proj_z": ((gate, gate + shared * value_width),),
            }
        elif name.endswith(BA):
            checkpoint.require(name, (2 * keys * shared, None), stated=True)
            parts = {"in_proj_b": ((0, shared),), "in_proj_a": ((shared, 2 * shared),)}
        else:
            tensors[name] = tensor
            continue
        for own, rows in parts.items():
            tensors[f"{name.removesuffix('.weight').rpartition('.')[0]}.{own}.weight"] = grouped(tensor, keys, *rows)
    return with_single_experts(replace(checkpoint, tensors=tensors))


def refuse(checkpoint: Checkpoint) -> None:
    """Raises ExportError for layers without experts, and weights that do not add up to 1, which no published model
    has."""
    refuse_layers(checkpoint)
    for key, known in ALL_HAVE_EXPERTS.items():
        if checkpoint.config.get(key) not in (None, known):
            where, value = checkpoint.folder / "config.json", checkpoint.config[key]
            raise ExportError(f"{where}: {key} is {value!r}, but only models with {known!r} are supported")


QWEN3_NEXT = replace(QWEN35_MOE, name="Qwen3-Next", model_type="qwen3_next", refuse=refuse, opened=opened)
FAMILIES = (QWEN3_NEXT,)
