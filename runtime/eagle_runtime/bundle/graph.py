"""One graph of a bundle as the manifest describes it, and the forms in which it keeps keys and values.

Row by row     keys and values [1, P, kv_heads, head_dim]
Head-major     keys [kv_heads, C, head_dim], values [kv_heads, pieces, C, head_dim / pieces]
int8           keys [kv_heads, head_dim, C], values [kv_heads, 1, C, head_dim], scales of both [kv_heads, 1, C]
Rows of bytes  the native form of int8: keys [kv_heads, C, head_dim + 4], values [kv_heads, 1, C, head_dim + 4], uint8,
               signed bytes and a scale in fp32. New rows leave as words [1, T, kv_heads, head_dim / 4 + 1] in
               fp32, which hold the same bytes
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

OPERATORS = "13"  # version of the native operators that exports are made for (eagle_edge_kernels.VERSION)
IN_FP32 = ("2", "3", "4")  # of operators for which a head-major past is in fp32, as in the portable form
# Of graphs in which ONNX Runtime computes sines and cosines of rotations: ARM64 rounds some otherwise than x86-64.
ROTATED_OUTSIDE = (*IN_FP32, "5", "6", "7", "8")
OLDER_OPERATORS = (*ROTATED_OUTSIDE, "9", "10", "11", "12")  # all of which are in OPERATORS, with the same bits
SCALE = 4  # bytes of one
FLOATS = ("float32", "float16")  # in which keys and values may be kept, where they are not bytes
CACHE_PARTS = ("key", "value")
STATE_PARTS = ("rows", "state")
AFTER = "W+"  # before a number in the name of a dimension: W rows of a text after so many that its state has
INT8_ROWS = (*CACHE_PARTS, "key_scale", "value_scale")

Shape = tuple[int | str, ...]


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One graph input, output or weight. shape: numbers, or names of symbolic dimensions (T, P, L, R)."""

    dtype: str
    shape: Shape


@dataclass(frozen=True, slots=True)
class NativeSpec:
    """Another form of a graph, with the same inputs, outputs and weights, for the operators of eagle-edge-kernels. From
    version 5 of these on it keeps a head-major past in fp16, and an int8 one as rows of bytes (GraphSpec.native_form).

    file: its ONNX file. operators: version of the operators that it is made for. used: names of those in it, and with
    their domain ("ai.onnx.Tanh") of those of ONNX Runtime whose results depend on the processor."""

    file: str
    operators: str
    used: tuple[str, ...]

    @property
    def same_everywhere(self) -> bool:
        """Whether all processors compute the same bits."""
        return self.operators not in ROTATED_OUTSIDE and not any("." in name for name in self.used)


@dataclass(frozen=True, slots=True)
class AlikeLayers:
    """Layers whose keys and values have one shape. count: of them. past, new: names of the inputs and outputs with
    their rows: keys of the first, its values, keys of the next, ... kept: what the inputs are. row_shape, dtype: heads
    and the width of one, and the type, of new rows."""

    count: int
    past: tuple[str, ...]
    new: tuple[str, ...]
    kept: tuple[TensorSpec, ...]
    row_shape: tuple[int, int]
    dtype: str


@dataclass(frozen=True, slots=True)
class StateLayers:
    """Layers that have a state and no keys (core.state_cache). past, new: of each the names of the inputs and outputs
    with rows and state. held: rows that a pass reads of those that the state has. row: numbers of one; shape: of a
    state."""

    past: tuple[tuple[str, str], ...]
    new: tuple[tuple[str, str], ...]
    held: int
    row: int
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class GraphSpec:
    """One ONNX file. weights: every initializer with its stored type. recipe: tensor of the source model -> what was
    done to it, for each that is not stored or used in computation as it was. native: another form of it, if any."""

    file: str
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    weights: dict[str, TensorSpec]
    recipe: dict[str, str]
    native: NativeSpec | None = None

    @property
    def past(self) -> tuple[str, ...]:
        """Names of the inputs that hold the cache: keys of layer 0, values of layer 0, keys of layer 1, ..."""
        return tuple(name for name in past_names(len(self.inputs), INT8_ROWS) if name in self.inputs)

    @property
    def present(self) -> tuple[str, ...]:
        """Names of the outputs that hold the new key/value rows, in the order of `past`."""
        return tuple(name for name in present_names(len(self.outputs), INT8_ROWS) if name in self.outputs)

    @property
    def kv_row_bytes(self) -> int:
        """Bytes that the keys, or the values, of one token take in layer 0."""
        past = [self.inputs[name] for name in self.past if name.startswith("past_key_values.0.")]
        return sum(row_size(one) * np.dtype(one.dtype).itemsize for one in past) // 2

    @property
    def kv_token_bytes(self) -> int:
        """Bytes that the keys and values of one token take in all layers."""
        return sum(row_size(one) * np.dtype(one.dtype).itemsize for one in map(self.inputs.__getitem__, self.past))

    @property
    def alike(self) -> list[AlikeLayers]:
        """The layers that have keys and values, by the shape of these."""
        shapes: dict[Shape, list[str]] = {}
        for name in self.present:
            if name.endswith(".key"):
                shapes.setdefault(self.outputs[name].shape, []).append(name.removeprefix("present.").partition(".")[0])
        return [self._layers_of(numbers) for numbers in shapes.values()]

    def _layers_of(self, numbers: Sequence[str]) -> AlikeLayers:
        past, new = (
            tuple(name for number in numbers for name in names if name.startswith(f"{part}.{number}."))
            for part, names in (("past_key_values", self.past), ("present", self.present))
        )
        kept, row = tuple(self.inputs[name] for name in past), self.outputs[new[0]]
        return AlikeLayers(len(numbers), past, new, kept, (int(row.shape[2]), int(row.shape[3])), row.dtype)

    @property
    def states(self) -> StateLayers | None:
        """The layers that have a state and no keys; None if there are none."""
        names = _names_of_states(self)
        if not names:
            return None
        rows, state = (self.inputs[name].shape for name in names[0][0])
        past, new = (tuple(pair[side] for pair in names) for side in (0, 1))
        return StateLayers(past, new, int(str(rows[1]).removeprefix(AFTER)), int(rows[2]), tuple(map(int, state)))

    def native_form(self) -> GraphSpec:
        """The description of `native`; the graph's own where there is none."""
        if self.native is None:
            return self
        form = replace(self, file=self.native.file)
        if is_int8(self):
            return _with_rows_of_bytes(form)
        half = pieces_of(self) is not None and self.native.operators not in IN_FP32
        past = {name: replace(self.inputs[name], dtype="float16") for name in self.past if half}
        return replace(form, inputs=self.inputs | past)


def _with_rows_of_bytes(graph: GraphSpec) -> GraphSpec:
    """graph: with an int8 past."""
    inputs, outputs = dict(graph.inputs), dict(graph.outputs)
    for past, new in zip(graph.past, graph.present, strict=True):
        old, row = inputs.pop(past), outputs.pop(new)
        heads, width = row.shape[2], int(row.shape[3])
        if not past.endswith("_scale"):
            shape: Shape = (heads, "C", width + SCALE)
            inputs[past] = TensorSpec("uint8", shape if len(old.shape) == 3 else (heads, 1, *shape[1:]))
            outputs[new] = TensorSpec("float32", (1, "T", heads, width // SCALE + 1))
    return replace(graph, inputs=inputs, outputs=outputs)


def row_size(past: TensorSpec) -> int:
    """Returns how many numbers one token takes in an input of the past."""
    return math.prod(size for size in past.shape if isinstance(size, int))


def past_names(num_layers: int, rows: Sequence[str] = CACHE_PARTS) -> list[str]:
    """Returns the names of a graph's cache inputs: keys of layer 0, values of layer 0, keys of layer 1, ... An int8
    cache has scales too (INT8_ROWS)."""
    return [f"past_key_values.{layer}.{row}" for layer in range(num_layers) for row in rows]


def present_names(num_layers: int, rows: Sequence[str] = CACHE_PARTS) -> list[str]:
    """Returns the names of the outputs that hold new key/value rows, in the order of `past_names`."""
    return [f"present.{layer}.{row}" for layer in range(num_layers) for row in rows]


def state_names(number: int) -> tuple[tuple[str, str], tuple[str, str]]:
    """Returns the names of the inputs with the rows and the state of a layer that has a state and no keys, and of the
    outputs with its new ones. number: of such a layer."""
    past, new = (tuple(f"{side}.{number}.{part}" for part in STATE_PARTS) for side in ("past_states", "present_states"))
    return (past[0], past[1]), (new[0], new[1])


def _names_of_states(graph: GraphSpec) -> list[tuple[tuple[str, str], tuple[str, str]]]:
    """Of each layer that has a state and no keys, as state_names."""
    count = sum(name.startswith("past_states.") and name.endswith(f".{STATE_PARTS[0]}") for name in graph.inputs)
    return [state_names(number) for number in range(count)]


def ahead_inputs(heads: int, grounded: bool) -> list[str]:
    """Returns the names of the inputs of Medusa's (or, grounded, Hydra's) heads: eagle_export.graphs.ahead_graph."""
    return ["features", *(f"paths.{depth}" for depth in range(heads) if grounded)]


def ahead_outputs(heads: int, grounded: bool) -> list[str]:
    """Returns the names of their outputs."""
    ends = [f".{depth}" for depth in range(heads)] if grounded else [""]
    return [f"{name}{end}" for name in ("log_probs", "token_ids") for end in ends]


def ahead_shapes(heads: int, grounded: bool, width: int, top_k: int) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Returns the shapes that their inputs and outputs must have."""
    names, made = ahead_inputs(heads, grounded), ahead_outputs(heads, grounded)
    inputs: list[Shape] = [(1, 1, width), *((1, f"T{depth}", depth + 1) for depth in range(len(names) - 1))]
    outputs: list[Shape] = [(1, f"T{depth}", top_k) for depth in range(heads)] if grounded else [(1, heads, top_k)]
    return dict(zip(names, inputs, strict=True)), dict(zip(made, 2 * outputs, strict=True))


def cache_shapes(graph: GraphSpec, layers: Sequence[tuple[int, int]]) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Returns the shapes that the cache inputs must have, and that of the mask where it depends on them; and the shapes
    of the outputs with new rows. layers: of each key/value heads, and the width of one."""
    names = INT8_ROWS if is_int8(graph) else CACHE_PARTS
    past: list[Shape] = []
    new: list[Shape] = []
    for layer, (heads, width) in enumerate(layers):
        pieces = pieces_of(graph, layer)
        row: Shape = (1, "T", heads, width)
        if is_int8(graph):
            past += [(heads, width, "C"), (heads, 1, "C", width), (heads, 1, "C"), (heads, 1, "C")]
        elif pieces is not None and width % pieces == 0:
            past += [(heads, "C", width), (heads, pieces, "C", width // pieces)]
        else:
            past += [(1, "P", heads, width)] * 2
        new += [row, row, (1, "T", heads, 1), (1, "T", heads, 1)][: len(names)]
    inputs = dict(zip(past_names(len(layers), names), past, strict=True))
    if past and "P" not in past[0]:
        inputs["tree_mask"] = (1, 1, "T", "T")
    return inputs, dict(zip(present_names(len(layers), names), new, strict=True))


def state_shapes(graph: GraphSpec) -> tuple[dict[str, Shape], dict[str, Shape]]:
    """Returns the shapes that inputs and outputs of states must have: in all layers those of the first."""
    first = [graph.inputs.get(name) for name in state_names(0)[0]]
    rows, state = (() if one is None else one.shape for one in first)
    held = str(rows[1]).removeprefix(AFTER) if len(rows) == 3 else ""
    sizes = [*rows[2:], *state]
    if not held.isdecimal() or not 0 < int(held) < 64 or not all(isinstance(one, int) and one > 0 for one in sizes):
        rows, state = (1, f"{AFTER}3", 1), (1, 1, 1)
    past: dict[str, Shape] = {}
    new: dict[str, Shape] = {}
    for (rows_in, state_in), (rows_out, state_out) in _names_of_states(graph):
        past |= {rows_in: (1, *rows[1:]), state_in: state}
        new |= {rows_out: (1, "T", *rows[2:]), state_out: state}
    return past, new


def cache_types(graph: GraphSpec, name: str) -> tuple[str, ...]:
    """Returns the types that an input or output of `cache_shapes` may have."""
    if name.endswith("_scale") or "_states." in name:
        return ("float32",)
    return ("int8",) if is_int8(graph) and name != "tree_mask" else FLOATS


def is_int8(graph: GraphSpec) -> bool:
    """Returns whether a graph's past are bytes with scales (keys [kv_heads, head_dim, C], values [kv_heads, 1, C,
    head_dim], scales of both [kv_heads, 1, C])."""
    return "past_key_values.0.key_scale" in graph.inputs


def pieces_of(graph: GraphSpec, layer: int = 0) -> int | None:
    """Returns into how many pieces the values of a layer's heads are cut, if a graph's past is head-major (keys
    [kv_heads, C, head_dim], values [kv_heads, pieces, C, head_dim / pieces]); None if it is row by row."""
    values = graph.inputs.get(f"past_key_values.{layer}.value")
    pieces = values.shape[1] if values is not None and len(values.shape) == 4 else None
    return pieces if isinstance(pieces, int) and pieces > 0 else None
