"""What disk, memory and time an export needs, by its shapes alone: told, or refused, before any work.

The time is an estimate from small pieces of the same work, timed on this machine (pace.py).
"""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from eagle_calib.folder import KEPT, work_folder
from eagle_calib.replay import GOLDEN_TEXTS, GOLDEN_TOKENS
from eagle_export.base.beside import fit_twice
from eagle_export.base.destination import check_space, folder_bytes
from eagle_export.base.errors import ExportError
from eagle_export.base.memory import MEMORY_MARGIN
from eagle_export.base.parted import PART
from eagle_export.graphs.pair import Pair
from eagle_export.inspection.sizes import GraphShapes, graph_bytes, pair_shapes
from eagle_export.recipes.input_products import FEW, GROUP, goes_through_rows
from eagle_export.recipes.plan import BY_VALUES, RECIPES
from eagle_export.recording.layered import layer_numbers
from eagle_export.recording.recording import Way
from eagle_export.recording.self_calibration import KEPT as ROWS
from eagle_export.writing.pace import measure
from eagle_runtime.machine.host import cores, free_memory, threads_allowed

# Rough values that were set by hand, not fitted to measurements: memory is an estimate (docs/dev/large_models.md).
PROGRAM = 800 * 10**6  # bytes of memory before any weight is read: libraries, and the traced graphs
COPIES = 6  # fp32 copies of a part that rounding works with
PASSES = 2.0  # products [K, K] x [K, N] that compensated rounding computes, or as many with few rows (input_products)
SAME_INPUT = ("k_proj", "v_proj", "gate_proj", "w1", "in_proj_z", "in_proj_a", "in_proj_b")  # as q, up, w3, in_proj_qkv
SMALL = 10**7  # numbers of a target that is exported in seconds on any machine
NOTABLE = 60.0  # seconds; needs of a shorter export are not printed


@dataclass(frozen=True, slots=True)
class Requirement:
    """disk, memory: bytes. seconds: about how long the export takes once its graphs are traced."""

    disk: int
    memory: int
    seconds: float

    def check(self, bundle: Path) -> None:
        """Raises ExportError if the disk, but for what a stopped export wrote, or the memory is too small."""
        check_space(bundle.parent, self.disk - kept_bytes(bundle))
        free = free_memory()
        if free is not None and self.memory > free:
            raise ExportError(
                f"exporting takes {self.memory / 1e9:.1f} GB of memory and {free / 1e9:.1f} GB are free; end other "
                "programs, or export on a larger machine"
            )

    def line(self, bundle: Path) -> str:
        """The requirement, and what is there."""
        free, space = free_memory(), shutil.disk_usage(bundle.parent).free
        memory = "" if free is None else f" ({free / 1e9:.1f} free)"
        finished, minutes = kept_bytes(bundle), max(1, round(self.seconds / 60))
        rest = f"; {finished / 1e9:.1f} GB are there from before" if finished else ""
        duration = f"{minutes} min" if minutes < 100 else f"{minutes / 60:.0f} h"
        return (
            f"takes about {duration}, {self.disk / 1e9:.1f} GB of disk "
            f"({space / 1e9:.1f} free) and {self.memory / 1e9:.1f} GB of memory{memory}{rest}"
        )


def requirement_of(
    pair: Pair,
    backend: str,
    precisions: Mapping[str, str],
    way: Way | None,
    place: Path,
    *,
    calibrated: bool,
    certify: bool,
) -> Requirement:
    """What an export needs. precisions: of graph "target" and, if there is a head, "draft". way: how inputs are
    recorded, None for not at all. place: where it is written. calibrated: whether a calibration was given. certify:
    whether the bundle is compared with its source."""
    head = pair.head
    official, config = (None, None) if head is None else (head.checkpoint, head.config)
    shapes = pair_shapes(pair.family, pair.target, official, config)
    precisions = {name: "int8" if each in BY_VALUES else each for name, each in precisions.items()}
    recipe = RECIPES[backend][precisions["target"]]
    traced, quantised = (4 if recipe.traced == "fp32" else 2), recipe.target(None) != ()
    stored = sum(graph_bytes(each, backend, precisions[name], name).stored for name, each in shapes.items())
    numbers, experts = pair.target.numbers, pair.family.experts
    active = pair.target.active(None if experts is None else experts.counts(pair.target.config))
    sources = 2 * numbers
    sizes = [layer.shape for each in shapes.values() for layer in each.layers] + [
        (h, v) for each in shapes.values() for v, h in [each.table[1]]
    ]
    layers = [(*each.shape, each.count) for each in shapes["target"].layers]
    compensated = quantised and (way is not None or calibrated)
    bits = 4 if "int4" in precisions["target"] else 8
    largest = max(k * n for k, n, _ in layers) * bits // 8
    processes = 2 if quantised and fit_twice(largest, threads_allowed() or cores()) else 1
    working = sum(sorted(_working(k, n, traced, quantised, compensated) for k, n in sizes)[-processes:])
    flops = sum(2.0 * PASSES * k * min(k, FEW * ROWS) * n * count for k, n, count in layers)
    seconds = 0.0
    if numbers > SMALL:
        pace = measure(place.parent, bits)
        seconds += (sources + 2 * stored) / pace.disk
        if quantised:
            seconds += flops / pace.flops + numbers * pace.compensating if compensated else numbers * pace.rounding
        if way is not None:
            seconds += 2.0 * active * ROWS / pace.flops * (2 if way == "whole" else 1)
        if certify:
            seconds += 4 * active * GOLDEN_TOKENS * len(GOLDEN_TEXTS) / pace.bandwidth
    if way == "whole":
        working = max(working, int(MEMORY_MARGIN * 4 * numbers))
    if way == "layers":
        working = max(working, 4 * layer_numbers(pair.target) + 16 * ROWS * int(pair.config.hidden_size))
    if way is not None:
        stored += _spilled(shapes["target"])
    return Requirement(stored, PROGRAM + working, seconds)


def kept_bytes(bundle: Path) -> int:
    """Bytes of what an export to this place that was stopped has finished."""
    return folder_bytes(work_folder(bundle) / KEPT)


def _working(k: int, n: int, traced: int, quantised: bool, compensated: bool) -> int:
    """Bytes that writing a weight [K, N] takes: what is written, levels before they are packed, parts in fp32, and what
    is computed of the inputs (input_products.py)."""
    part = min(k * n, max(PART, 64 * k))
    if not quantised:
        return traced * k * n + 8 * part
    inputs = 4 * k * (ROWS + 3 * (ROWS + GROUP if goes_through_rows(k, ROWS) else k))
    return 2 * k * n + 4 * COPIES * part + (inputs if compensated else 0)


def _spilled(shapes: GraphShapes) -> int:
    """Bytes of a target's recorded inputs: one of layers that read the same, and of experts those of a row's."""
    numbers = float(shapes.table[1][1] if shapes.tied else 0)
    for each in shapes.layers:
        if each.name.split(".")[-2] not in SAME_INPUT:
            numbers += each.shape[0] * each.count * (shapes.chosen if ".experts." in each.name else 1)
    return int(4 * ROWS * numbers)
