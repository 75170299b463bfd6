"""Reads the kernels of a TensorRT engine from the verbose log of its build.

An engine cannot be inspected without a GPU, but a build with ProfilingVerbosity.DETAILED logs the kernels it compiled,
one per line:

    Layers:
    Name: _gemm_mha_v2_myl0_7, LayerType: kgen, Inputs: [ {...} ], Constants: [], Outputs: [ {...} ], TacticName: ...

The list covers one compute capability, even when the engine holds several, and all optimization profiles in turn. Build
for one capability at a time to see the kernels of each.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass

_TITLE = "Layers:\n"
_LINE = re.compile(r"Name: (.+?), LayerType: (\w+), Inputs: (.*), Constants: (.*), Outputs: (.*), TacticName: ")
_PROFILE = re.compile(r"_myl(\d+)_\d+$")
_DATATYPE = re.compile(r"Datatype: (\w+)")
_NO_KERNEL = {"shape_call", "signal", "wait"}  # shape arithmetic on the host and synchronisation of streams


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel. name: TensorRT's, made from the operations it fused. kind: LayerType, such as gemm or kgen. profile:
    index of the optimization profile it serves.

    reads, holds, writes: types of its inputs, constants and outputs, by TensorRT's names (Half, Float, Int64, ...)."""

    name: str
    kind: str
    profile: int
    reads: frozenset[str]
    holds: frozenset[str]
    writes: frozenset[str]

    @property
    def is_fused_attention(self) -> bool:
        """Whether the kernel computes scores, mask, softmax and weighted sum without storing the score matrix."""
        return "_mha_" in self.name

    @property
    def is_product(self) -> bool:
        """Whether the kernel is a matrix product outside of attention. TensorRT calls it gemm, or Fc where it fuses the
        unpacking of a weight or the operators after it."""
        return self.kind == "gemm" or "Fc" in self.name

    @property
    def stores_sums_in_fp16(self) -> bool:
        """Whether the kernel multiplies bytes and writes the sums before they are scaled, in fp16, where those beyond
        65504 become infinite."""
        return self.is_product and bool(self.reads & {"Int8", "FP8"}) and "Half" in self.writes


def read_kernels(messages: Iterable[str]) -> list[Kernel]:
    """Returns the kernels listed in the messages of one build, in order. Raises ValueError unless there is exactly one
    list, so that a log of another format is not mistaken for an engine without attention."""
    lists = [message for message in messages if message.startswith(_TITLE)]
    if len(lists) != 1:
        raise ValueError(f"the build log holds {len(lists)} lists of kernels instead of one")
    lines = [line for line in lists[0].split("\n") if ", LayerType: " in line]
    kernels = []
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            raise ValueError(f"the build log has a line of unknown format: {line[:80]}")
        name, kind, *types = match.groups()
        if kind not in _NO_KERNEL:
            profile = _PROFILE.search(name)
            if profile is None:
                raise ValueError(f"the build log has a kernel of unknown name: {name[:80]}")
            reads, holds, writes = (frozenset(_DATATYPE.findall(part)) for part in types)
            kernels.append(Kernel(name, kind, int(profile[1]), reads, holds, writes))
    return kernels
