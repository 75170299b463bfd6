"""Which linear layers make a bundle differ from its source: each in turn is made exact, and the KL is measured again.

The bundle's own graph is run once over a prompt, with the input x and the output y of each linear layer among its
outputs. A layer's error is y - x @ W, where W is its weight before quantisation. Then the graph is run once per layer
with that error subtracted from the layer's output. Everything before the layer is unchanged, so its output is then
exact, and the logits are those of a bundle that keeps this one layer unquantised.

    y' = y + correction         correction [1, T, N], an input that is added to the graph; zero but for one layer

This takes one forward pass over some tens of tokens per layer. It needs memory for the bundle, one weight in fp32, and
the inputs and outputs of all layers for those tokens.

Shapes: T tokens, R rows of logits, V vocabulary; a layer's weight is [K, N].
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from eagle_calib.scoring import divergence, log_softmax
from eagle_export.graphs.weights import tensor_spec
from eagle_export.recipes.graph import Array, Linear, insert_after, is_lm_head, linears
from eagle_runtime.base.tree import Float, additive_mask
from eagle_runtime.bundle.manifest import GraphSpec
from eagle_runtime.core.target import causal, row_numbers
from eagle_runtime.ort.session import OrtSession

ROWS = 16  # rows of logits over which the KL is averaged
WORST = 3  # the most layers that are named
LEAST_GAIN = 0.02  # share of the KL that a layer must remove, made exact, to count as one that matters
LARGE_ERROR = 3.0  # times the median error of all layers
CORRECTION = ".correction"  # suffix to the name of a layer's output


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of a traced graph. name: its weight's. x, y: names of its input and output, which
    no recipe changes. read: returns the weight [K, N] in fp32, as a recipe scaled it but before it was rounded."""

    name: str
    x: str
    y: str
    read: Callable[[], Array]
    is_lm_head: bool


@dataclass(frozen=True, slots=True)
class LayerError:
    """error: norm of the error of a layer's output over the norm of the exact output. kl: mean KL of the bundle in
    nats; exact: the same if this layer were exact."""

    layer: Layer
    error: float
    kl: float
    exact: float

    @property
    def summary(self) -> str:
        """The layer and its figures, for an error message."""
        name = self.layer.name
        name += " as LM head" if self.layer.is_lm_head and not name.startswith("lm_head") else ""
        return f"{name} (output off by {100 * self.error:.2g} %, KL from {self.kl:.2g} to {self.exact:.2g} if exact)"


def layers_of(graph: ir.Model) -> tuple[Layer, ...]:
    """All linear layers of a graph that no recipe has changed yet."""

    def reader(linear: Linear) -> Callable[[], Array]:
        return lambda: linear.reader()()  # evaluated late, after a recipe may have scaled the weight

    return tuple(
        Layer(linear.name, str(linear.x.name), str(linear.node.outputs[0].name), reader(linear), is_lm_head(linear))
        for linear in linears(graph)
    )


def worst_layers(errors: Sequence[LayerError]) -> list[LayerError]:
    """At most WORST of a target's layers, worst first: those that lower the KL most when made exact, then those with a
    large error, because where two layers are equally wrong, making one of them exact may change nothing."""
    helpful = sorted((each for each in errors if each.exact <= (1 - LEAST_GAIN) * each.kl), key=lambda each: each.exact)
    median = float(np.median([each.error for each in errors])) if errors else 0.0
    least = max(LARGE_ERROR * median, helpful[0].error / 2 if helpful else 0.0)
    others = sorted((each for each in errors if each not in helpful), key=lambda each: -each.error)
    return [*helpful, *(each for each in others if each.error > least)][:WORST]


def progress(done: int, steps: int, seconds: float) -> str:
    """What is being done, with the time that is left, which no export announces: most reach their limits. seconds: that
    the layers took which are done."""
    left = f", {math.ceil(seconds / done * (steps - done) / 60)} min left" if done else ""
    return f"looking for the worst layers ({done} of {steps}{left})"


def layer_errors(
    path: Path,
    spec: GraphSpec,
    layers: Sequence[Layer],
    tokens: Sequence[int],
    source: Float,
    report: Callable[[int, int], None] = lambda done, steps: None,
) -> list[LayerError]:
    """The error of every linear layer of a target, in the graph's order.

    path, spec: the graph in the bundle. tokens: a prompt and the source's continuation; source [R, V]: the source's
    logits of the last R rows. report: called with the numbers of done and of all layers. Raises BackendError."""
    model, wider, corrected = correctable(path, spec, layers)
    zeros = {}
    for layer in corrected:
        rows, correction = len(source) if layer.is_lm_head else len(tokens), wider.inputs[_correction(layer)]
        zeros[_correction(layer)] = np.zeros((rows, int(correction.shape[2])), correction.dtype)
    wanted = log_softmax(source)
    ids = np.array(tokens, np.int64)
    feeds: dict[str, Array] = {
        "input_ids": ids,
        "position_ids": row_numbers(len(ids)),
        "tree_mask": additive_mask(causal(len(ids)), wider.inputs["tree_mask"].dtype),
        "logit_rows": row_numbers(len(ids))[-len(source) :],
        **zeros,
    }
    with OrtSession(path, wider, model=model) as session:
        cache = session.new_cache(len(ids))

        def kl(out: Mapping[str, Array]) -> float:
            return float(divergence(wanted, log_softmax(out["logits"].astype(np.float32))).mean())

        first = {name: value.copy() for name, value in session.run(feeds, cache).items()}
        unchanged, errors = kl(first), []
        for done, layer in enumerate(corrected):
            report(done, len(corrected))
            exact = first[layer.x].astype(np.float32) @ layer.read()
            wrong = first[_raw(layer)].astype(np.float32) - exact
            corrected_by = {_correction(layer): (-wrong).astype(zeros[_correction(layer)].dtype)}
            size = float(np.linalg.norm(wrong)) / max(float(np.linalg.norm(exact)), 1e-30)
            errors.append(LayerError(layer, size, unchanged, kl(session.run({**feeds, **corrected_by}, cache))))
    return errors


def correctable(path: Path, spec: GraphSpec, layers: Sequence[Layer]) -> tuple[bytes, GraphSpec, list[Layer]]:
    """Returns the graph at `path` with a correction input for every layer, as bytes that refer to the weights next to
    the file; its inputs and outputs; and the layers that are in it."""
    model = ir.load(path)
    graph = model.graph
    values = {value.name: value for node in graph for value in node.outputs} | {v.name: v for v in graph.inputs}
    inputs, outputs, corrected = dict(spec.inputs), dict(spec.outputs), []
    for layer in layers:
        x, y = values.get(layer.x), values.get(layer.y)
        if x is None or y is None or y.producer() is None or not _sized(x) or not _sized(y):
            continue
        correction = ir.Value(name=_correction(layer), shape=y.shape, type=y.type)
        new = insert_after(y, "Add", correction)
        y.name, new.name = _raw(layer), layer.y
        values[layer.y] = new
        graph.inputs.append(correction)
        inputs[_correction(layer)], outputs[_raw(layer)] = tensor_spec(correction), tensor_spec(y)
        graph.outputs.append(y)
        if layer.x not in outputs:
            outputs[layer.x] = tensor_spec(x)
            graph.outputs.append(x)
        corrected.append(layer)
    content: bytes = ir.to_proto(model).SerializeToString()
    return content, dataclasses.replace(spec, inputs=inputs, outputs=outputs), corrected


def _sized(value: ir.Value) -> bool:
    """Whether a value has the shape [1, T, N] or [1, R, N] with a known N, and a known type. The rows of an expert are
    known only when it runs, so experts are left out."""
    shape = value.shape
    if shape is None or len(shape) != 3 or not isinstance(shape[2], int) or value.dtype is None:
        return False
    return isinstance(shape[1], ir.SymbolicDim) and shape[1].value in ("T", "R")


def _correction(layer: Layer) -> str:
    return layer.y + CORRECTION


def _raw(layer: Layer) -> str:
    return layer.y + ".raw"
