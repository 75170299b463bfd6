"""gpt-oss: a mixture of experts with biases and bounded activations in each layer; every other layer has a window; and
each head of the attention has a sink, a score without a key that takes a share of the weights.

Published weights of the experts are in MXFP4 (blocks of 32 numbers of four bits, with a power of two each), and read as
the numbers that they stand for, all of which bf16 has.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from eagle_export.base.errors import ExportError
from eagle_export.reading.checkpoint import Checkpoint
from eagle_export.reading.families.family import Config, Experts, Family, by_layer_type
from eagle_export.reading.stored_tensors import ExpertTensor, StoredTensor
from eagle_runtime.bundle.manifest import SamplingDefaults

if TYPE_CHECKING:
    from torch import Tensor  # imported where tensors are read: configs are read without it

STACKED = re.compile(r"(.*\.mlp\.experts)\.(gate_up|down)_proj(_bias|_blocks)?")
BLOCKS, SCALES = "_blocks", "_scales"
BLOCK = 32  # numbers of MXFP4 with a scale in common
# The sixteen numbers of E2M1 (Open Compute Project, Microscaling Formats 1.0).
NUMBERS = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
BIAS = 127  # of the exponent that a scale holds


@dataclass(frozen=True, slots=True)
class PackedExpert(StoredTensor):
    """The matrix of one expert in MXFP4. blocks [E, columns, inputs / 32, 16], two numbers per byte, the first one in
    its lower half; scales [E, columns, inputs / 32], exponents of two. start, step: of the columns that are its own."""

    blocks: StoredTensor
    scales: StoredTensor
    number: int
    start: int
    step: int

    @property
    def stored_as(self) -> str:
        return "MXFP4"

    @property
    def num_bytes(self) -> int:
        return (self.blocks.num_bytes + self.scales.num_bytes) // (self.blocks.shape[0] * self.step)

    def read(self) -> Tensor:
        """Reads the matrix [columns, inputs] in bf16."""
        import torch

        packed, scales = (
            each.rows(self.number, self.number + 1)[0, self.start :: self.step] for each in (self.blocks, self.scales)
        )
        exponents = scales.to(torch.int32) - BIAS
        levels = torch.stack([packed & 15, packed >> 4], -1).flatten(-2)  # [columns, inputs / 32, 32]
        numbers = torch.tensor(NUMBERS)[levels.to(torch.int32)]
        return torch.ldexp(numbers, exponents[..., None]).flatten(-2).to(torch.bfloat16)


def opened(checkpoint: Checkpoint) -> Checkpoint:
    """Returns a checkpoint with a tensor for each matrix and bias of each expert. Raises ExportError for weights that
    are quantised in another way than MXFP4, and for shapes that do not fit each other."""
    config, packing = dict(checkpoint.config), checkpoint.config.get("quantization_config")
    if isinstance(packing, Mapping) and packing.get("quant_method") == "mxfp4":
        del config["quantization_config"]
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in checkpoint.tensors.items():
        found = STACKED.fullmatch(name)
        if found is not None:
            tensors.update(_experts(checkpoint, tensor, *found.groups("")))
        elif not name.endswith(SCALES):
            tensors[name] = tensor
    return replace(checkpoint, config=config, tensors=tensors)


def _experts(
    checkpoint: Checkpoint, tensor: StoredTensor, layer: str, part: str, kind: str
) -> Iterator[tuple[str, StoredTensor]]:
    """The tensors of each expert that a tensor holds. part: gate_up or down. kind: "", "_bias" or BLOCKS."""
    shape, packed = tensor.shape, kind == BLOCKS
    scales = checkpoint.tensors.get(tensor.name.removesuffix(BLOCKS) + SCALES)
    sound = len(shape) == {BLOCKS: 4, "_bias": 2}.get(kind, 3)
    if packed:
        sound = sound and shape[3] * 2 == BLOCK and scales is not None and scales.shape == shape[:3]
    matrices = ("gate_proj", "up_proj") if part == "gate_up" else ("down_proj",)
    columns = 0 if not sound else shape[1] if packed else shape[-1]
    if not sound or columns % len(matrices):
        raise ExportError(
            f"{checkpoint.folder}: tensor {tensor.name!r} has shape {list(shape)}, which no experts of gpt-oss "
            "have; the checkpoint is of a variant that is not supported"
        )
    own, step = columns // len(matrices), len(matrices)
    inputs = () if kind == "_bias" else (shape[2] * BLOCK,) if packed else (shape[1],)
    for number in range(shape[0]):
        for start, matrix in enumerate(matrices):
            name, whole = f"{layer}.{number}.{matrix}.{'bias' if kind == '_bias' else 'weight'}", (own, *inputs)
            if packed:
                assert scales is not None
                yield name, PackedExpert(name, tensor.file, whole, "BF16", tensor, scales, number, start, step)
            else:
                rows = start, columns, step
                yield name, ExpertTensor(name, tensor.file, whole, tensor.dtype, tensor, number, rows, turned=not kind)


def bounded_swiglu(config: Config, gate: Tensor, up: Tensor) -> Tensor:
    """Returns (up + 1) * gate * sigmoid(alpha * gate), both bounded before: gate from above, up on either side."""
    limit, alpha = float(getattr(config, "swiglu_limit", 7.0)), float(getattr(config, "swiglu_alpha", 1.702))
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + 1.0) * (gate * (gate * alpha).sigmoid())


GPT_OSS = Family(
    name="gpt-oss",
    model_type="gpt_oss",
    causal_lm="GptOssForCausalLM",
    windows=by_layer_type,
    experts=Experts(
        count=lambda config: int(config.num_local_experts),
        width=lambda config: int(config.intermediate_size),
        renormalised=lambda config: True,
        router="router",
        stacked=True,
        biased=True,
        gated=bounded_swiglu,
        tells_shares=True,
    ),
    opened=opened,
    # OpenAI's page on the models recommends temperature and top_p of 1.
    sampling=SamplingDefaults(temperature=1.0, top_p=1.0),
)
FAMILIES = (GPT_OSS,)
