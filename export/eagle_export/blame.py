"""Which linear layers keep a bundle from following its source: each in turn is made exact, and the KL is taken again.

The bundle's own graph is run once over a prompt with the inputs x and outputs y of all its linear layers among its
outputs. A layer's error is y - x @ W, with W as it was before it was quantised. Then the graph is run once per layer
with that error taken off the layer's output. What comes before the layer stays as it was, so that its output is exact:
the logits are those of a bundle that keeps this one layer unquantised.

    y' = y + correction         correction [1, T, N], an input that is added to the graph; zero but for one layer

It takes a pass per layer over some tens of tokens, and the memory of the bundle, one weight in fp32, and the inputs and
outputs of all layers for those tokens. Shapes: T tokens, R rows of logits, V vocabulary; a layer's weight is [K, N].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.graph import Array, Linear, is_lm_head, linears
from eagle_runtime.bundle.manifest import GraphSpec, TensorSpec
from eagle_runtime.scoring import divergence, log_softmax
from eagle_runtime.session.ort.session import OrtSession
from eagle_runtime.target import causal, row_numbers
from eagle_runtime.tree import Float, additive_mask

ROWS = 16  # of logits that the KL is taken over
WORST = 3  # layers that are named, at most
LEAST = 0.02  # of the KL: what a layer must take away to make a difference
STANDS_OUT = 3.0  # times the usual error
CORRECTION = ".correction"  # behind the name of a layer's output


@dataclass(frozen=True, slots=True)
class Layer:
    """A linear layer of a traced graph. name: of its weight. x, y: names of what it reads and puts out, which they keep
    whatever a recipe makes of the layer. read: the weight [K, N] in fp32, as a recipe scaled it but not rounded."""

    name: str
    x: str
    y: str
    read: Callable[[], Array]
    is_lm_head: bool


@dataclass(frozen=True, slots=True)
class LayerError:
    """error: of a layer's output, as a share of the output's own size. kl: mean KL in nats as it is; exact: if this
    layer were exact."""

    layer: Layer
    error: float
    kl: float
    exact: float

    @property
    def says(self) -> str:
        name = self.layer.name
        name += " as LM head" if self.layer.is_lm_head and not name.startswith("lm_head") else ""
        return f"{name} (output off by {100 * self.error:.2g} %, KL from {self.kl:.2g} to {self.exact:.2g} if exact)"


def layers_of(graph: ir.Model) -> tuple[Layer, ...]:
    """All linear layers of a graph that no recipe has changed yet."""

    def reader(linear: Linear) -> Callable[[], Array]:
        return lambda: linear.reader()()  # asked for late: a recipe may scale the weight first

    return tuple(
        Layer(linear.name, str(linear.x.name), str(linear.node.outputs[0].name), reader(linear), is_lm_head(linear))
        for linear in linears(graph)
    )


def worst_layers(
    path: Path,
    spec: GraphSpec,
    layers: Sequence[Layer],
    tokens: Sequence[int],
    source: Float,
    told: Callable[[int, int], None] = lambda done, steps: None,
) -> list[LayerError]:
    """The WORST of a target's layers at most, worst first: those without whose error the KL would be the smallest, then
    those whose error stands out: beside another layer that is as wrong, making one of them exact may change nothing.
    Takes and raises what layer_errors does."""
    errors = layer_errors(path, spec, layers, tokens, source, told)
    helpful = sorted((each for each in errors if each.exact <= (1 - LEAST) * each.kl), key=lambda each: each.exact)
    usual = float(np.median([each.error for each in errors])) if errors else 0.0
    least = max(STANDS_OUT * usual, helpful[0].error / 2 if helpful else 0.0)
    others = sorted((each for each in errors if each not in helpful), key=lambda each: -each.error)
    return [*helpful, *(each for each in others if each.error > least)][:WORST]


def layer_errors(
    path: Path,
    spec: GraphSpec,
    layers: Sequence[Layer],
    tokens: Sequence[int],
    source: Float,
    told: Callable[[int, int], None] = lambda done, steps: None,
) -> list[LayerError]:
    """What every one of a target's layers does wrong, in the graph's order.

    path, spec: the graph in the bundle. tokens: a prompt and what the source said; source [R, V]: its logits of the
    last R rows. told: called with how many layers are done, and how many there are. Raises BackendError."""
    model, wider, found = correctable(path, spec, layers)
    zeros = {
        _correction(layer): np.zeros((len(source) if layer.is_lm_head else len(tokens), _width(wider, layer)), dtype)
        for layer in found
        for dtype in [wider.inputs[_correction(layer)].dtype]
    }
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
        whole, errors = kl(first), []
        for done, layer in enumerate(found):
            told(done, len(found))
            exact = first[layer.x].astype(np.float32) @ layer.read()
            wrong = first[_raw(layer)].astype(np.float32) - exact
            correction = {_correction(layer): (-wrong).astype(zeros[_correction(layer)].dtype)}
            size = float(np.linalg.norm(wrong)) / max(float(np.linalg.norm(exact)), 1e-30)
            errors.append(LayerError(layer, size, whole, kl(session.run({**feeds, **correction}, cache))))
    return errors


def correctable(path: Path, spec: GraphSpec, layers: Sequence[Layer]) -> tuple[bytes, GraphSpec, list[Layer]]:
    """The graph at `path` with a correction for every layer, as bytes, its weights still beside the file; what it reads
    and puts out; and the layers that were found in it."""
    model = ir.load(path)
    graph = model.graph
    values = {value.name: value for node in graph for value in node.outputs} | {v.name: v for v in graph.inputs}
    inputs, outputs, found = dict(spec.inputs), dict(spec.outputs), []
    for layer in layers:
        x, y = values.get(layer.x), values.get(layer.y)
        node = None if y is None else y.producer()
        if x is None or y is None or node is None or not _sized(x) or not _sized(y):
            continue
        correction = ir.Value(name=_correction(layer), shape=y.shape, type=y.type)
        total = ir.node("Add", [y, correction])
        (new,) = total.outputs
        new.shape, new.type = y.shape, y.type
        ir.convenience.replace_all_uses_with(y, new, replace_graph_outputs=True)
        total.replace_input_with(0, y)
        graph.insert_after(node, total)
        y.name, new.name = _raw(layer), layer.y
        values[layer.y] = new
        graph.inputs.append(correction)
        inputs[_correction(layer)], outputs[_raw(layer)] = _spec(correction), _spec(y)
        graph.outputs.append(y)
        if layer.x not in outputs:
            outputs[layer.x] = _spec(x)
            graph.outputs.append(x)
        found.append(layer)
    content: bytes = ir.to_proto(model).SerializeToString()
    return content, dataclasses.replace(spec, inputs=inputs, outputs=outputs), found


def _sized(value: ir.Value) -> bool:
    """Whether a value is [1, T, N] of a known N and type."""
    shape = value.shape
    return shape is not None and len(shape) == 3 and isinstance(shape[2], int) and value.dtype is not None


def _spec(value: ir.Value) -> TensorSpec:
    assert value.shape is not None and value.dtype is not None
    dims = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return TensorSpec(str(value.dtype.numpy()), dims)


def _width(spec: GraphSpec, layer: Layer) -> int:
    return int(spec.inputs[_correction(layer)].shape[2])


def _correction(layer: Layer) -> str:
    return layer.y + CORRECTION


def _raw(layer: Layer) -> str:
    return layer.y + ".raw"
