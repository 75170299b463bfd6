"""SmoothQuant (arXiv 2211.10438) and AWQ (arXiv 2306.00978): makes the channels of a linear layer's input equally
large before it is quantised.

    x @ W = (x / s) @ (s * W)        s [K], one factor per input channel

The division costs nothing if x is computed by a product with a weight, which can absorb it: a norm's weight, the
columns of v_proj for the input of o_proj, or those of up_proj for the input of down_proj. The factors are powers of a
channel's largest input over its largest weight (SmoothQuant) or of its mean square input (AWQ). Family and exponent are
searched, group by group, for the smallest error that the quantisation which follows makes on recorded inputs.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from eagle_calib.calibration import Observed, is_expert
from eagle_export.base.beside import layer_of, meanwhile
from eagle_export.base.errors import ExportError
from eagle_export.base.parted import Array
from eagle_export.recipes.graph import KEPT, Linear, Pass, is_lm_head, linears, made_by, made_of, rescale, size_of
from eagle_export.recipes.tiles import product, side_by_side
from eagle_runtime.machine.host import cores, threads_allowed

EXPONENTS = np.linspace(0.0, 1.0, 6, dtype=np.float32)
ROWS, COLUMNS = 256, 256  # recorded inputs, and the most output columns of a layer, that the search uses
SMALLEST, LARGEST = np.float32(1e-3), np.float32(1e3)  # bounds of a factor
FACTORS = "input factors"  # key in a node's meta
LEAST = 10**7  # numbers of the layers for which a copy of the process searches a half
FOUND = "factors.npz"  # in the copy's folder

# Inputs [n, K] divided by s and a weight [K, N] times s -> the output [n, N] as the quantised layer computes it.
Simulate = Callable[[Array, Array], Array]


@dataclass(frozen=True, slots=True)
class Group:
    """Layers that read one input, and the weight before it that can absorb the division. axis: the axis of that weight;
    repeats: query heads per value head, whose channels must share a factor; width: channels of a head. bias: added to
    what that weight computes; None for none."""

    layers: tuple[Linear, ...]
    before: ir.Value
    axis: int
    repeats: int = 1
    width: int = 1
    bias: ir.Value | None = None


@dataclass(frozen=True, slots=True)
class Smooth(Pass[Group]):
    """Scales every group of layers for which that lowers the error of the quantisation that follows, and notes the
    factors at the layers (`factors_of`). observed: weight name -> inputs of its layer. simulate: that quantisation.
    Raises ExportError for a layer that is missing in `observed`."""

    observed: Mapping[str, Observed]
    simulate: Simulate
    name = "smoothing"

    def pattern(self, model: ir.Model) -> list[Group]:
        return [
            group
            for group in groups(model)
            if FACTORS not in group.layers[0].node.meta and not few_rows(group.layers[0], self.observed)
        ]

    def rewrite(self, model: ir.Model, matches: list[Group]) -> dict[str, str]:
        mine, others = _halves(matches)

        def work(folder: Path) -> None:
            found = enumerate(self._smooth(others))
            arrays = {str(number): each for number, each in found if each is not None}
            np.savez(folder / FOUND, allow_pickle=False, **arrays)

        if not others:
            self._smooth(mine)
        else:
            known = None
            with meanwhile(work, halved=True) as copy:
                self._smooth(mine)
                if (folder := copy.result()) is not None:
                    with np.load(folder / FOUND, allow_pickle=False) as arrays:
                        known = [arrays.get(str(number)) for number in range(len(others))]
            self._smooth(others, known)
        layers = [layer for group in (*mine, *others) for layer in group.layers]
        return {layer.name: "as it was" if factors_of(layer) is None else "smoothed" for layer in layers}

    def _smooth(self, matches: Sequence[Group], known: Sequence[Array | None] | None = None) -> list[Array | None]:
        """Scales groups. Returns their factors. known: these, if they were searched elsewhere."""
        found = []
        for number, group in enumerate(matches):
            factors = best_factors(group, self.observed, self.simulate) if known is None else known[number]
            found.append(factors)
            if factors is not None:
                shared = factors.reshape(-1, group.repeats, group.width)[:, 0].ravel()
                rescale(group.before, 1 / shared, group.axis)
                if group.bias is not None:
                    rescale(group.bias, 1 / shared, 0)
            for layer in group.layers:
                layer.node.meta[FACTORS] = factors
                if factors is not None:
                    rescale(layer.weight, factors, 0)
        return found


def _halves(matches: list[Group]) -> tuple[list[Group], list[Group]]:
    """Returns the groups of the first decoder layers and those of the others, which a copy of the process searches: a
    group reads weights that others of its layer scale. No others where the search is short, or for one process."""
    order = [layer_of(each.layers[0].name) for each in matches]
    layers = list(dict.fromkeys(order))
    numbers = sum(math.prod(layer.shape) for each in matches for layer in each.layers)
    if sys.platform != "linux" or numbers < LEAST or (threads_allowed() or cores()) < 2:
        return matches, []
    first = set(layers[: -(-len(layers) // 2)])
    parts: tuple[list[Group], list[Group]] = [], []
    for each, layer in zip(matches, order, strict=True):
        parts[layer not in first].append(each)
    return parts


def factors_of(linear: Linear) -> Array | None:
    """The factors [K] that divide a layer's input since it was smoothed; None if there are none."""
    factors: Array | None = linear.node.meta.get(FACTORS)
    return factors


def check_observed(linear: Linear, observed: Mapping[str, Observed]) -> None:
    """Raises ExportError if the calibration has no inputs of a layer."""
    name = linear.name.removesuffix(KEPT)
    if name not in observed:
        raise ExportError(f"the calibration lacks layer {name!r}; run eagle-calib on a bundle of this very pair")


def few_rows(linear: Linear, observed: Mapping[str, Observed]) -> bool:
    """Whether a layer is an expert's that saw too few rows to be recorded (eagle_calib.calibration.LEAST_ROWS)."""
    name = linear.name.removesuffix(KEPT)
    return is_expert(name) and name not in observed


def inputs_of(linear: Linear, observed: Mapping[str, Observed], most: int | None = None) -> tuple[Array, Array]:
    """Returns the recorded inputs [n, K] of a layer, the first `most` or all, smoothed if it is, and the largest
    magnitude per channel [K]. Raises ExportError if the calibration has none, or of another width."""
    check_observed(linear, observed)
    (k, _) = linear.shape
    name = linear.name.removesuffix(KEPT)
    seen = observed[name]
    if len(seen.channel_absmax) != k:
        raise ExportError(
            f"the calibration of layer {name!r} is {len(seen.channel_absmax)} wide, the layer {k}; run eagle-calib on "
            "a bundle of this very pair"
        )
    factors, sample = factors_of(linear), seen.sample[:most].astype(np.float32)
    if factors is None:
        return sample, seen.channel_absmax
    sample /= factors
    return sample, seen.channel_absmax / factors


def groups(model: ir.Model) -> list[Group]:
    """Layers whose input can be scaled at no cost, grouped by that input."""
    by_input: dict[ir.Value, list[Linear]] = {}
    weights = {linear.node: linear for linear in linears(model)}
    for linear in weights.values():
        by_input.setdefault(linear.x, []).append(linear)
    scalable = []
    for x, layers in by_input.items():
        if x.is_graph_output() or len(x.uses()) != len(layers) or any(is_lm_head(layer) for layer in layers):
            continue
        if group := _group(x, tuple(layers), weights):
            scalable.append(group)
    return scalable


def _group(x: ir.Value, layers: tuple[Linear, ...], weights: Mapping[ir.Node, Linear]) -> Group | None:
    node = x.producer()
    if node is None:
        return None
    if node.op_type == "RMSNormalization":  # q, k, v; gate, up
        norm = node.inputs[1]
        assert norm is not None
        return Group(layers, norm, 0) if len(norm.uses()) == 1 else None
    if node.op_type == "Mul":  # down: the columns of up absorb the division
        made = [value.producer() for value in node.inputs if value is not None]
        up = [weights[one] for one in made if one is not None and one in weights]
        return Group(layers, up[0].weight, 1) if len(up) == 1 and len(up[0].weight.uses()) == 1 else None
    attention = made_by(made_of(made_of(x, "Reshape"), "Transpose"), "Attention")
    return None if attention is None else _output_group(attention, layers, weights)


def _output_group(attention: ir.Node, layers: tuple[Linear, ...], weights: Mapping[ir.Node, Linear]) -> Group | None:
    """The group of o_proj: the columns of v_proj absorb the division, one value head for all its query heads."""
    queries, values = attention.inputs[0], attention.inputs[2]
    concat = made_by(made_of(values, "Transpose"), "Concat")
    rows = None if concat is None else made_of(concat.inputs[1], "Reshape")
    projection, bias = (None, None) if rows is None else _without_bias(rows.producer())
    linear = None if projection is None else weights.get(projection)
    if linear is None:
        return None
    return Group(layers, linear.weight, 1, size_of(queries, 1) // size_of(values, 1), size_of(queries, 3), bias)


def _without_bias(node: ir.Node | None) -> tuple[ir.Node | None, ir.Value | None]:
    """Returns the node that computes what a bias is added to, and the bias; the node itself and None without one."""
    if node is None or node.op_type != "Add":
        return node, None
    first, second = node.inputs
    if first is None or second is None or not second.is_initializer() or len(second.uses()) != 1:
        return None, None
    return first.producer(), second


def best_factors(group: Group, observed: Mapping[str, Observed], simulate: Simulate) -> Array | None:
    """Returns factors [K] of the exponent with the smallest squared error on recorded inputs; None if 1 is as good."""
    x, absmax = inputs_of(group.layers[0], observed, ROWS)
    whole = [layer.reader()() for layer in group.layers]
    largest = np.max([np.maximum(weight.max(1), -weight.min(1)) for weight in whole], axis=0)
    weight = np.concatenate([each[:, :: -(-each.shape[1] // COLUMNS)] for each in whole], 1)
    del whole
    wanted = product(x, weight)

    def error(factors: Array) -> float:
        out = simulate(x / factors, weight * factors[:, None])
        out -= wanted
        return float(np.square(out, out=out).sum())

    tried = [np.ones(x.shape[1], np.float32)]
    for sizes in (channel_sizes(absmax, largest[:, None]), _positive(np.sqrt(np.square(x).mean(0)))):
        heads = sizes.reshape(-1, group.repeats, group.width)
        size = np.repeat(heads.max(1, keepdims=True), group.repeats, axis=1).ravel()
        tried += [_centred(size**exponent) for exponent in EXPONENTS[1:]]
    errors = side_by_side(error, tried)
    best = min(range(len(tried)), key=errors.__getitem__)
    return tried[best] if best else None


def channel_sizes(absmax: Array, weight: Array) -> Array:
    """Returns [K], of which s is a power: the largest input of a channel over its largest weight, of weight [K, all N].
    With exponent 1/2 both become equal."""
    ratio: Array = _positive(absmax) / _positive(np.abs(weight).max(1))
    return ratio


def _positive(sizes: Array) -> Array:
    least = np.float32(1e-5) * max(float(sizes.max()), 1e-20)
    positive: Array = np.maximum(sizes, least).astype(np.float32)
    return positive


def _centred(factors: Array) -> Array:
    """Scales factors so that the geometric mean of the largest and the smallest is 1, and bounds them."""
    middle = np.sqrt(factors.max()) * np.sqrt(factors.min())
    bounded: Array = np.clip(factors / middle, SMALLEST, LARGEST).astype(np.float32)
    return bounded
