"""Numbers of kernels of a forward pass: recorded from builds of the demo pair with TensorRT for RTX, which needs no
GPU, and carried over to models of other depths.

    python -m eagle_tools.card.kernels BUNDLE...      builds engines of bundles of one pair and renews the record

A bundle whose head's engine is of a whole tree renews `tree`, one whose head's engine is of a forward pass `head`.
"""

from __future__ import annotations

import itertools
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from eagle_tools.card.model import Kernels, Tree

if TYPE_CHECKING:
    from eagle_export.tensorrt.kernels import Kernel

CAPABILITY = "8.9"
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
    graphs have the same form; an engine without one has as many kernels as in fp16."""
    data = json.loads(RECORD.read_text(encoding="utf-8"))["precisions"]
    counts, plain = data.get(precision, data["int8"]), data["fp16"]
    head = int(counts["head"] or plain["head"])
    per_level = ((counts["tree"] or plain["tree"]) - head) / counts["levels"]
    return Kernels(Count(**counts["target"]).of(layers), head, round(head + per_level * tree.depth))


def renewed(bundle: Path, record: dict[str, Any]) -> tuple[str, dict[str, Any]]:
    """Returns a bundle's precision and its counts; those that its engines do not show are as in `record`. Raises
    ExportError, BundleError, BackendError."""
    from eagle_export.tensorrt.build import build_engines
    from eagle_runtime.bundle.manifest import read_manifest

    manifest = read_manifest(bundle)
    precision = manifest.precision["target"]
    counts = {"head": None, "tree": None, **record["precisions"].get(precision, {})}
    with tempfile.TemporaryDirectory() as folder:
        copy = Path(folder) / "bundle"
        shutil.copytree(bundle, copy, ignore=shutil.ignore_patterns("engines"))
        built = {engine.name: engine for engine in build_engines(copy, "tensorrt-rtx", [CAPABILITY]).built}
    first = {name: [kernel for kernel in engine.kernels if kernel.profile == 0] for name, engine in built.items()}
    whole = sum(kernel.is_fused_attention for kernel in first["draft"]) > 1
    counts["tree" if whole else "head"] = len(first["draft"])
    return precision, counts | {"target": asdict(count(first["target"])), "levels": manifest.tree_defaults.depth}


def main(argv: Sequence[str]) -> None:
    """Renew the record. argv: bundles."""
    from eagle_runtime.trt.library import load_library

    record = json.loads(RECORD.read_text(encoding="utf-8"))
    for name in argv:
        precision, counts = renewed(Path(name), record)
        record["precisions"][precision] = counts
    record["library"] = f"tensorrt_rtx {load_library('tensorrt-rtx').__version__}"
    RECORD.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(sys.argv[1:])
