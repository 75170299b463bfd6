"""Chooses how each layer of an "auto" target is stored, within a size or for an agreement with the source.

For every layer and every grid of plan.AUTO_GRIDS the error of the layer's output on recorded inputs is computed for
some of its columns, and weighed by what errors of these columns change in the predictions (importance.py): an estimate
of the KL from the source that the layer adds. These add up, because the layers' errors are independent. Then the layer
whose next grid lowers the sum most per byte gets it, until the size is spent or the KL that is left is small enough.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import onnx_ir as ir
from rich.table import Table

from eagle_calib.calibration import is_expert
from eagle_export.base.errors import ExportError
from eagle_export.base.parted import parts
from eagle_export.graphs.weights import num_bytes
from eagle_export.recipes.blocks import Grid, fitted, rounded, stored_bits
from eagle_export.recipes.graph import Array, Linear, linears
from eagle_export.recipes.plan import AUTO, AUTO_GRIDS, Plan, apply
from eagle_export.recipes.smooth import Smooth, factors_of, few_rows, inputs_of
from eagle_export.recipes.tiles import product
from eagle_export.recipes.weight_blocks import WeightBlocks
from eagle_export.recording.self_calibration import Recorded

ROWS, COLUMNS = 512, 256  # recorded inputs, and columns of a layer, on which its errors are computed
# Of the KL that is left after layers were rounded to nearest: compensated rounding (compensation.py) leaves about half.
COMPENSATED = 0.5
# The share of tokens that rank differently is about this times the square root of the KL in nats
# (docs/dev/precision.md).
RANKS = 0.5


@dataclass(frozen=True, slots=True)
class Option:
    """One way to store a layer. bytes: of the whole layer. kl: nats per token that it adds to the target's KL."""

    grid: Grid
    bytes: int
    kl: float


@dataclass(frozen=True, slots=True)
class Sensitivity:
    """What was measured of a layer. options: by their bytes. chosen: index of the one that it gets."""

    name: str
    options: tuple[Option, ...]
    chosen: int = 0

    @property
    def choice(self) -> Option:
        """The option that the layer gets."""
        return self.options[self.chosen]


@dataclass(frozen=True, slots=True)
class Choice:
    """rows: every layer of a target in "auto". plan: the passes that are left to run. done: what those before them did.
    kl: in nats, that the target will have about; None where that is not known."""

    rows: tuple[Sensitivity, ...]
    plan: Plan
    done: dict[str, str]
    kl: float | None


def check_budget(precision: str, agreement: float | None, size: int | None) -> None:
    """Raises ExportError for a budget of another precision than "auto", an "auto" without one, and wrong figures."""
    if precision != AUTO and size is not None:
        raise ExportError(f"a size to choose layers by belongs to precision {AUTO}, not {precision}")
    if precision == AUTO and (agreement, size) == (None, None):
        raise ExportError(f"precision {AUTO} chooses layers by a size or a least agreement; give one of them")
    if agreement is not None and not 0 <= agreement <= 1:  # also false for NaN
        raise ExportError(f"the agreement is {agreement:g}, but must be between 0 and 1")
    if size is not None and size < 1:
        raise ExportError(f"the size is {size} bytes, but must be 1 or more")


def choose(
    graphs: Mapping[str, ir.Model],
    plan_of: Callable[[Mapping[str, Grid]], Plan],
    recorded: Recorded,
    agreement: float | None,
    size: int | None,
    report: Callable[[str], None],
) -> Choice:
    """Smooths the target, in place, and chooses the grids of its layers.

    graphs: as traced. plan_of: returns the passes for grids by weight name. agreement: the share of tokens for which
    the target should rank the same token first as its source, None for as many as the size allows. size: bytes of all
    weights, None for any. Raises ExportError if the size is too small for the narrowest grids, or an agreement is asked
    for where only relative errors are known."""
    if agreement is not None and not recorded.importance:
        raise ExportError(
            "how much layers change predictions can only be measured with the whole source in memory, which has no "
            "room here; give a size in the place of an agreement"
        )
    report("choosing scales")
    done, first = smoothed_first(graphs["target"], plan_of({}))
    layers = linears(graphs["target"])
    grids = {layer.name: grids_of(layer) for layer in layers}

    def left(chosen_grids: Mapping[str, Grid]) -> Plan:
        return plan_after(first, plan_of(chosen_grids))

    room = None if size is None else room_for(graphs, left, size)
    losses, most = [], rows_of_all(recorded)
    for number, layer in enumerate(layers):
        report(f"measuring layers ({number} of {len(layers)})")
        losses.append(layer_losses(layer, grids[layer.name], recorded, most))
    rows = chosen(_on_one_scale(layers, grids, losses), room, agreement)
    kl = COMPENSATED * sum(each.choice.kl for each in rows) if recorded.importance else None
    return Choice(tuple(rows), left({each.name: each.choice.grid for each in rows}), done, kl)


def room_for(graphs: Mapping[str, ir.Model], plan_of: Callable[[Mapping[str, Grid]], Plan], size: int) -> int:
    """Returns how many of `size` bytes are left when all weights are in the narrowest grids. graphs: as they are before
    the passes that plan_of returns for grids by weight name. Raises ExportError if they take more."""
    narrow = plan_of({layer.name: grids_of(layer)[0] for layer in linears(graphs["target"])})
    least = 0
    for name, graph in graphs.items():
        trial = graph.clone()
        apply(narrow.passes[name], trial)  # weights are computed when they are written
        least += num_bytes(trial)
    if least > size:
        raise ExportError(
            f"all layers in four bits take {least / 1e6:.1f} MB and {size / 1e6:.1f} MB are allowed; "
            "allow more, or export a smaller model"
        )
    return size - least


def smoothed_first(target: ir.Model, plan: Plan) -> tuple[dict[str, str], int]:
    """Runs a target's passes up to its smoothing, in place. Returns what they did, and how many they are."""
    passes = plan.passes["target"]
    count = 1 + next((index for index, step in enumerate(passes) if isinstance(step, Smooth)), -1)
    return apply(passes[:count], target), count


def plan_after(first: int, plan: Plan) -> Plan:
    """Returns the passes that are left of a plan whose first ones ran over the target."""
    return replace(plan, passes={**plan.passes, "target": plan.passes["target"][first:]})


def foreseen(target: ir.Model, plan: Plan, recorded: Recorded) -> Choice:
    """Smooths a target of another precision, in place. Returns the passes that are left, and the KL that it will have
    about after them, from errors of its weights alone, if these were measured. For the two models of
    docs/dev/precision.md it was up to a fifth too high."""
    done, first = smoothed_first(target, plan)
    left = plan_after(first, plan)
    steps = [step for step in left.passes["target"] if isinstance(step, WeightBlocks)]
    layers = [layer for layer in linears(target) if any(step.wanted(layer) for step in steps)]
    if not layers or not all(layer.name in recorded.importance for layer in layers):
        return Choice((), left, done, None)
    total, most = 0.0, rows_of_all(recorded)
    for layer in layers:
        step = next(step for step in steps if step.wanted(layer))
        grid = fitted(step.other(layer) or step.grid, layer.shape[0], whole=layer.rotated)
        if not grid.sixteenths:  # as in the source
            total += sum(layer_losses(layer, [grid], recorded, most).values or ())
    return Choice((), left, done, COMPENSATED * total)


def rows_of_all(recorded: Recorded) -> int:
    """How many rows a layer read which reads all: the first that is no expert's."""
    return recorded.inputs[next(name for name in recorded.inputs if not is_expert(name))].rows


def grids_of(layer: Linear) -> list[Grid]:
    """The grids that a layer may have, by their bytes. A table that is also the embedding needs whole blocks."""
    k = layer.shape[0]
    fits = dict.fromkeys(fitted(grid, k, whole=layer.rotated) for grid in AUTO_GRIDS)
    # A grid that takes the bytes of another, or more, and has larger blocks or fewer bits is of no use.
    by_bits = {stored_bits(grid, k): grid for grid in fits}
    return [by_bits[bits] for bits in sorted(by_bits)]


@dataclass(frozen=True, slots=True)
class Losses:
    """Of a layer, by grid. values: KL in nats if `known`, else the output's relative error; None for an expert without
    recorded rows. narrow_error: the relative error in the first grid."""

    values: tuple[float, ...] | None
    known: bool
    narrow_error: float


def layer_losses(layer: Linear, grids: Sequence[Grid], recorded: Recorded, most: int) -> Losses:
    """Measures some columns of a layer, those that matter most, in each grid. most: rows that a layer read which reads
    all; an expert's error counts by its share of them."""
    if few_rows(layer, recorded.inputs):
        return Losses(None, False, 0.0)
    x, _ = inputs_of(layer, recorded.inputs)
    x = x[:: max(1, len(x) // ROWS)]
    importance = recorded.importance.get(layer.name)
    read = recorded.inputs[layer.name].rows / most if is_expert(layer.name) else 1.0
    order = np.arange(layer.shape[1]) if importance is None else np.argsort(-importance, kind="stable")
    columns = np.sort(order[:: max(1, len(order) // COLUMNS)] if importance is None else order[:COLUMNS])
    weight = _columns(layer, columns)
    errors = [np.square(product(x, rounded(weight, grid).values() - weight)).mean(0) for grid in grids]
    exact = max(float(np.square(product(x, weight)).mean(0).sum()), 1e-30)
    relative = [read * float(each.sum()) / exact for each in errors]
    if importance is None:
        return Losses(tuple(relative), False, relative[0])
    factors = factors_of(layer)
    norms = np.square(weight if factors is None else weight / factors[:, None]).sum(0)
    share = importance[columns] * (float(importance.sum()) / max(float(importance[columns].sum()), 1e-30))
    share /= np.maximum(norms, 1e-30)
    return Losses(tuple(float((each * share).sum()) for each in errors), True, relative[0])


def _columns(layer: Linear, columns: Array) -> Array:
    """Returns some columns of a layer's weight, [K, n]. columns: their numbers, ascending."""
    read = layer.columns()
    pieces = [(piece, columns[(columns >= piece.start) & (columns < piece.stop)]) for piece in parts(layer.shape, 1)]
    return np.concatenate([read(piece)[:, wanted - piece.start] for piece, wanted in pieces if len(wanted)], 1)


def _on_one_scale(
    layers: Sequence[Linear], grids: Mapping[str, Sequence[Grid]], losses: Sequence[Losses]
) -> list[Sensitivity]:
    """Returns the options of all layers. A relative error counts as much as it does in the layers whose importance is
    known, in the middle: those of experts and of a source that is not in the memory are not."""
    known = [each.values[0] / each.narrow_error for each in losses if each.known and each.values and each.narrow_error]
    scale = float(np.median(known)) if known else 1.0
    rows = []
    for layer, each in zip(layers, losses, strict=True):
        (k, n), own = layer.shape, grids[layer.name]
        values = (0.0,) * len(own) if each.values is None else each.values
        sizes = [stored_bits(grid, k) * n // 8 for grid in own]
        options = (
            Option(*one) for one in zip(own, sizes, (v * (1 if each.known else scale) for v in values), strict=True)
        )
        rows.append(Sensitivity(layer.name, tuple(options)))
    return rows


def chosen(rows: Sequence[Sensitivity], room: int | None, agreement: float | None) -> list[Sensitivity]:
    """Returns the layers with the options that they get. room: bytes that may be spent beyond the first options;
    agreement: the share of tokens that should rank the same first. With both, layers are widened until one of them is
    reached."""
    allowed = 0.0 if agreement is None else ((1 - agreement) / RANKS) ** 2 / COMPENSATED
    left = sum(each.options[0].kl for each in rows)
    now, stopped = [0] * len(rows), set[int]()
    steps = sorted(
        (-gain / size, rows[row].name, row, option, size, gain)
        for row in range(len(rows))
        for option, size, gain in _steps(rows[row].options)
    )
    for _, _, row, option, size, gain in steps:  # a layer's own are in their order: each gains less per byte
        if left <= allowed:
            break
        if row in stopped or (room is not None and size > room):
            stopped.add(row)
            continue
        room = None if room is None else room - size
        left -= gain
        now[row] = option
    return [replace(each, chosen=option) for each, option in zip(rows, now, strict=True)]


def _steps(options: Sequence[Option]) -> list[tuple[int, int, float]]:
    """Returns index, added bytes and lowered KL of the options that lower the KL most per byte, from the first one on:
    the lower convex hull."""
    steps, at = list[tuple[int, int, float]](), 0
    while True:
        here = options[at]
        later = [
            ((here.kl - one.kl) / (one.bytes - here.bytes), index)
            for index, one in enumerate(options)
            if index > at and one.kl < here.kl
        ]
        if not later:
            return steps
        _, best = max(later)
        steps.append((best, options[best].bytes - here.bytes, here.kl - options[best].kl))
        at = best


def table(rows: Sequence[Sensitivity]) -> Table:
    """Returns what the choice was made from, the layers that cost most first."""
    result = Table("layer", "stored in", "kB", "KL, nearest levels", "in the first grid", title="layers")
    for each in sorted(rows, key=lambda each: -each.options[0].kl):
        grid, first = each.choice.grid, each.options[0]
        stored = f"int{grid.bits} in blocks of {grid.size}"
        result.add_row(each.name, stored, f"{each.choice.bytes / 1e3:.0f}", f"{each.choice.kl:.5f}", f"{first.kl:.5f}")
    return result
