"""Chooses which layers of an "auto" target are in eight bits, within a size or for an agreement with the source.

The target is first written with all layers in four bits, rounded to nearest. Then each layer in turn is made exact
(worst_layers.py) and the KL from the source's own logits is measured again: what it falls by is the layer's share of
the loss. Shares add up closely enough, because the layers' errors are independent. Layers are then widened in the order
of their share per byte, until the size is spent or the KL that is left is small enough.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from rich.table import Table

from eagle_calib.folder import claimed
from eagle_export.base.destination import check_space
from eagle_export.base.errors import ExportError
from eagle_export.checking.worst_layers import Layer, layer_errors, layers_of
from eagle_export.graphs.pair import Pair, build_graphs
from eagle_export.graphs.weights import graph_spec, num_bytes, save
from eagle_export.recipes.blocks import fitted, stored_bits
from eagle_export.recipes.plan import AUTO, INT4, INT8, TABLES, Plan, apply
from eagle_export.recipes.weight_blocks import WeightBlocks
from eagle_export.recording.self_calibration import Probe, Recorded
from eagle_runtime import BackendError
from eagle_runtime.bundle.manifest import GraphSpec

# Of the KL that is left after a layer was rounded to nearest: compensated rounding (blocks.py) leaves about half.
COMPENSATED = 0.5
# The share of tokens that rank differently is about this times the square root of the KL in nats
# (docs/dev/precision.md).
RANKS = 0.5


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """share: KL in nats that the layer in four bits adds to the target's. extra: bytes that eight bits add. wide:
    whether it was chosen to be in eight bits."""

    name: str
    share: float
    extra: int
    wide: bool = False


@dataclass(frozen=True, slots=True)
class Budget:
    """What an "auto" export must keep to. size: bytes of all weights, None for any. agreement: the share of tokens for
    which it should rank the same token first as its source, None for as many as the size allows."""

    size: int | None
    agreement: float | None


def checked_budget(precision: str, agreement: float | None, size: int | None) -> Budget:
    """Returns the budget of an export. Raises ExportError for one of another precision than "auto", an "auto" without
    one, and impossible figures."""
    if precision != AUTO and size is not None:
        raise ExportError(f"a size to choose layers by belongs to precision {AUTO}, not {precision}")
    if precision == AUTO and (agreement, size) == (None, None):
        raise ExportError(f"precision {AUTO} chooses layers by a size or a least agreement; give one of them")
    if agreement is not None and not 0 < agreement < 1:
        raise ExportError(f"the agreement is {agreement:g}, but must be between 0 and 1")
    if size is not None and size < 1:
        raise ExportError(f"the size is {size} bytes, but must be 1 or more")
    return Budget(size, agreement)


def choose(
    pair: Pair, narrow: Plan, top_k: int, recorded: Recorded, budget: Budget, place: Path, report: Callable[[str], None]
) -> list[Sensitivity]:
    """Writes a trial next to `place`, measures it and removes it. Returns every layer of the target, those that are to
    be wide marked.

    narrow: the plan with all layers in four bits. top_k: as for build_graphs. Raises ExportError if the size is too
    small for four bits, or the trial does not run here."""
    report("tracing")
    graphs = build_graphs(pair, narrow.traced, top_k)
    layers = layers_of(graphs["target"])
    trial = {
        name: tuple(replace(step, observed=None) if isinstance(step, WeightBlocks) else step for step in passes)
        for name, passes in narrow.passes.items()
    }
    decisions = {name: apply(trial[name], graph) for name, graph in graphs.items()}
    least = sum(num_bytes(graph) for graph in graphs.values())
    room = None if budget.size is None else budget.size - least
    if room is not None and room < 0:
        raise ExportError(
            f"all layers in four bits take {least / 1e6:.1f} MB and {(budget.size or 0) / 1e6:.1f} MB are allowed; "
            "allow more, or export a smaller model"
        )
    check_space(place.parent, least)
    with claimed(place.with_name(f"{place.name}-trial")) as work:
        path = work / "new" / "model.onnx"
        path.parent.mkdir()
        report("writing a trial")
        save(graphs["target"], path)
        spec = graph_spec(path.name, graphs["target"], decisions["target"])
        del graphs

        def count(done: int, steps: int) -> None:
            report(f"measuring layers ({done} of {steps})")

        try:
            rows = sensitivities(path, spec, layers, recorded.probes, count)
        except BackendError as error:
            raise ExportError(f"layers cannot be measured here ({error}); choose int4 or int8") from None
    return chosen(rows, room, budget.agreement)


def sensitivities(
    path: Path, spec: GraphSpec, layers: Sequence[Layer], probes: Sequence[Probe], report: Callable[[int, int], None]
) -> list[Sensitivity]:
    """Returns the sensitivity of every layer of the graph at `path`, which has all layers in four bits, in the graph's
    order. Takes and raises what layer_errors does."""
    runs = [layer_errors(path, spec, layers, probe.tokens, probe.logits, report) for probe in probes]
    return [
        Sensitivity(
            each[0].layer.name, float(np.mean([one.kl - one.exact for one in each])), extra_bytes(each[0].layer)
        )
        for each in zip(*runs, strict=True)
    ]


def extra_bytes(layer: Layer) -> int:
    """Bytes that a layer takes more in eight bits than in four, steps and zero levels included."""
    k, n = layer.shape
    narrow = TABLES if layer.is_lm_head else INT4
    return (stored_bits(fitted(INT8, k), k) - stored_bits(fitted(narrow, k), k)) * n // 8


def chosen(rows: Sequence[Sensitivity], room: int | None, agreement: float | None) -> list[Sensitivity]:
    """Returns the layers with those marked that are to be wide. room: bytes that may be spent; agreement: the share of
    tokens that should rank the same first. With both, layers are widened until one of them is reached."""
    wide: set[str] = set()
    left = COMPENSATED * sum(max(each.share, 0.0) for each in rows)
    allowed = 0.0 if agreement is None else ((1 - agreement) / RANKS) ** 2
    for each in sorted(rows, key=lambda each: (-each.share / each.extra, each.name)):
        if left <= allowed or each.share <= 0:
            break
        if room is not None and each.extra > room:
            continue
        room = None if room is None else room - each.extra
        left -= COMPENSATED * each.share
        wide.add(each.name)
    return [Sensitivity(each.name, each.share, each.extra, each.name in wide) for each in rows]


def table(rows: Sequence[Sensitivity]) -> Table:
    """Returns what the choice was made from, most sensitive per byte first."""
    result = Table("layer", "KL of four bits", "kB of eight bits", "KL per MB", "stored in", title="sensitivity")
    for each in sorted(rows, key=lambda each: -each.share / each.extra):
        result.add_row(
            each.name,
            f"{each.share:.5f}",
            f"{each.extra / 1e3:.0f}",
            f"{1e6 * each.share / each.extra:.4f}",
            "int8" if each.wide else "int4",
        )
    return result
