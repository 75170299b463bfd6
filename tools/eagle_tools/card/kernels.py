"""Numbers of kernels of a forward pass: recorded from builds of the demo pair with TensorRT for RTX, which needs no
GPU, and carried over to models of other depths.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING

from eagle_tools.card.model import Kernels, Tree

if TYPE_CHECKING:
    from eagle_export.tensorrt.kernels import Kernel

RECORD = Path(__file__).with_name("kernels.json")


@dataclass(frozen=True, slots=True)
class Count:
    """Kernels of one engine. layer: of each decoder layer; rest: of everything else."""

    layer: int
    rest: int

    def of(self, layers: int) -> int:
        """Returns the kernels of a graph of so many layers."""
        return self.rest + self.layer * layers


def count(kernels: Sequence[Kernel]) -> Count:
    """Returns the count of one profile's kernels. A layer reaches from one attention to the next; a graph of a single
    layer counts as the rest."""
    at = [index for index, kernel in enumerate(kernels) if kernel.is_fused_attention]
    layer = int(median(after - before for before, after in itertools.pairwise(at))) if len(at) > 1 else 0
    return Count(layer, len(kernels) - layer * len(at))


def recorded(precision: str, layers: int, tree: Tree) -> Kernels:
    """Returns the kernels of a pair whose target has `layers` layers. A precision without a record takes int8's, whose
    graphs have the same form; where the head's one call has none, a level takes as many kernels as in fp16."""
    data = json.loads(RECORD.read_text(encoding="utf-8"))["precisions"]
    counts, plain = data.get(precision, data["int8"]), data["fp16"]
    target, head = Count(**counts["target"]).of(layers), int(counts["head"])
    whole = counts if counts["tree"] else plain
    per_level = (whole["tree"] - whole["head"]) / whole["levels"]
    return Kernels(target, head, round(head + per_level * tree.depth))
