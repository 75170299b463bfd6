"""Sessions of ONNX Runtime: inputs and outputs bound by address (BoundSession), and the one for the CPU
(OrtSession)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np

from eagle_runtime.base.errors import BackendError
from eagle_runtime.base.tree import hiding
from eagle_runtime.bundle.graph import OPERATORS, AlikeLayers, row_size
from eagle_runtime.bundle.manifest import GraphSpec, TensorSpec, pieces_of
from eagle_runtime.core.cache import HeadMajorCache, KVCache, NewRows, aligned_empty
from eagle_runtime.core.mixed_cache import MixedCache, Part
from eagle_runtime.core.row_padding import RowPadding, pad_rows
from eagle_runtime.core.session import Array, Session
from eagle_runtime.core.state_cache import StateCache
from eagle_runtime.machine.huge_pages import huge_pages
from eagle_runtime.ort.library import CPU, VERSION, byte_products_saturate, open_graph, run_graph
from eagle_runtime.ort.operators import Operators
from eagle_runtime.ort.texts import MOST_SHAPES, MOST_TEXTS

# Compute products of unsigned by signed bytes as products of unsigned bytes, with sums of 32 bits on every processor.
EXACT_BYTES = "session.x64quantprecision"
DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16"}
DTYPES |= {"tensor(int64)": "int64", "tensor(int8)": "int8", "tensor(uint8)": "uint8"}
MOST_BOUND = 64  # rows of passes that are bound apart: those of all trees that costs size
IN_CACHE = 2  # where native operators write new rows (ort.texts)
AnyCache = Part | MixedCache


@dataclass(slots=True)
class Bound:
    """What a binding of ONNX Runtime holds. inputs: each with the sizes of the symbolic dimensions that its shape
    determines. past, new: of each part of a head-major cache, see there."""

    binding: Any
    inputs: dict[str, tuple[Array, dict[str, int]]] = field(default_factory=dict)
    outputs: dict[str, Array] = field(default_factory=dict)
    past: dict[int, tuple[int, ...]] = field(default_factory=dict)
    new: dict[int, tuple[int, ...]] = field(default_factory=dict)


class BoundSession(Session):
    """A graph whose inputs and outputs are bound by address. Small ones are in host buffers, which grow to the largest
    forward pass and are then reused.

    On a CPU a graph reads the buffer of an input that is bound, so that it is bound once. For a graph on another device
    ONNX Runtime copies an input on the host within bind_input (core/session/IOBinding.cc), so that it is bound in every
    forward pass, after it is filled. Outputs are copied to their host buffers at the end of each forward pass."""

    def __init__(self, session: Any, path: Path, spec: GraphSpec, device: str = "cpu") -> None:
        """session: an InferenceSession on `device` of the graph that `spec` describes; path: its file, for messages."""
        check_graph(session, path, spec)
        self.path = path
        self.version = VERSION
        self._session = session
        self._bound = Bound(session.io_binding())
        self._reads_host = device == "cpu"
        self._alike, self._states = spec.alike, spec.states
        of_states = () if self._states is None else chain(*self._states.past, *self._states.new)
        kept = {*spec.past, *spec.present, *of_states}
        self.inputs: Mapping[str, TensorSpec] = {n: s for n, s in spec.inputs.items() if n not in kept}
        self.outputs: Mapping[str, TensorSpec] = {n: s for n, s in spec.outputs.items() if n not in kept}
        self._rows_input = next(name for name, one in self.inputs.items() if one.shape[:2] == (1, "T"))
        self._buffers: dict[str, Array] = {}

    def close(self) -> None:
        del self._bound, self._session
        self._buffers.clear()

    def _feed(self, name: str, value: Array, sizes: dict[str, int]) -> None:
        """Copy a host array to the buffer of an input, and bind that, unless it is bound with this shape and read where
        it is. Adds the symbolic dimensions of the input to `sizes`."""
        bound = self._bound
        buffer, fixed = bound.inputs.get(name, (None, {}))
        if buffer is not None and buffer.shape == value.shape:
            np.copyto(buffer, value, "no")
        else:
            spec = self.inputs[name]
            shape = (1,) * (len(spec.shape) - value.ndim) + value.shape
            dims = list(zip(spec.shape, shape, strict=True))
            assert all(dim == size for dim, size in dims if not isinstance(dim, str)), name
            bound.inputs.pop(name, None)  # an interrupt may come before it is bound
            buffer = self._buffer(name, spec, value.shape)
            fixed = {dim: size for dim, size in reversed(dims) if isinstance(dim, str)}
            np.copyto(buffer, value, "no")
            bound.binding.bind_input(name, "cpu", 0, buffer.dtype.type, shape, buffer.ctypes.data)
            if self._reads_host:
                bound.inputs[name] = buffer, fixed
        for dim, size in fixed.items():
            assert sizes.setdefault(dim, size) == size, f"{name}: {dim} is {size} and {sizes[dim]}"

    def _buffer(self, name: str, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        """Returns host memory of that shape, reusing the tensor's earlier buffer if it is large enough."""
        count = math.prod(shape)
        if name not in self._buffers or self._buffers[name].size < count:
            self._moved()
            self._buffers[name] = aligned_empty((count,), spec.dtype)
        return self._buffers[name][:count].reshape(shape)

    def _moved(self) -> None:
        """A buffer is about to be replaced by a larger one."""

    def _bind_cache(self, device: str, layers: AlikeLayers, addresses: Sequence[int], length: int, rows: int) -> None:
        """Bind the first `length` rows of the cache of some layers as the past, and the `rows` rows after them as the
        place of the new ones, so that a forward pass appends without a copy. addresses: of their keys and values on
        `device`."""
        kind, (heads, width) = np.dtype(layers.dtype), layers.row_shape
        past_shape, new_shape, size = (1, length, heads, width), (1, rows, heads, width), heads * width * kind.itemsize
        for past, new, address in zip(layers.past, layers.new, addresses, strict=True):
            self._bound.binding.bind_input(past, device, 0, kind.type, past_shape, address)
            self._bound.binding.bind_output(new, device, 0, kind.type, new_shape, address + length * size)

    def _bind_output(self, name: str, sizes: Mapping[str, int]) -> Array:
        """Bind an output to a host buffer, which stays bound while its shape stays the same. Returns the buffer,
        without the batch axis."""
        spec = self.outputs[name]
        shape = tuple([sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape])
        bound = self._bound
        buffer = bound.outputs.get(name)
        if buffer is None or buffer.shape != shape[1:]:
            bound.outputs.pop(name, None)  # as in _feed
            buffer = self._buffer(name, spec, shape[1:])
            bound.binding.bind_output(name, "cpu", 0, buffer.dtype.type, shape, buffer.ctypes.data)
            bound.outputs[name] = buffer
        return buffer


def open_on_cpu(
    path: Path,
    spec: GraphSpec,
    threads: int | None = None,
    model: bytes | None = None,
    operators: Path | None = None,
) -> Any:
    """Returns an InferenceSession of the graph that `spec` describes on the CPU provider. threads, model, operators: as
    in open_graph."""
    multiplies_bytes = any(weight.dtype == "int8" for weight in spec.weights.values())
    config = {EXACT_BYTES: "1"} if multiplies_bytes and byte_products_saturate() else {}
    with huge_pages():
        return open_graph(path, CPU, threads, model, config, operators)


class OrtSession(BoundSession):
    """A graph on ONNX Runtime's CPU provider, with its cache in host memory.

    padding: how forward passes are padded so that kernels compute all rows alike (see exact_rows). exact: whether the
    graph was exported so that a row's bits do not depend on the other rows of the forward pass. native: whether it is
    computed by the native operators. joins, most_texts: see Session; opening.joined_heads says whether a head's
    session joins."""

    most_texts = MOST_TEXTS

    def __init__(
        self,
        path: Path,
        spec: GraphSpec,
        threads: int | None = None,
        model: bytes | None = None,
        operators: Operators | None = None,
    ) -> None:
        """threads, model: as in open_graph. operators: the graph at `path` is the native form of the one that `spec`
        describes, and uses these."""
        library = None if operators is None else operators.library
        super().__init__(open_on_cpu(path, spec, threads, model, library), path, spec)
        self.native = operators is not None
        if operators is not None:
            self.version = f"{VERSION}, operators {OPERATORS} with {operators.instructions}"
        self.padding = RowPadding()
        self.exact = pieces_of(spec) is not None
        self._new_rows: list[NewRows | None] = [None for _ in self._alike]  # of all caches
        # of the numbers of rows that trees have: to bind a cache of many layers anew takes as long as a layer
        self._by_rows: dict[int, Bound] = {}
        self._announce = None if operators is None else operators.announce_texts
        self.joins = self.exact and self.native and len(self._alike) + (self._states is not None) <= MOST_SHAPES
        self.may_join = self._announce is not None  # whether the operators learn which texts a pass has

    def close(self) -> None:
        self._by_rows.clear()  # each holds the engine, which has the weights mapped
        super().close()

    def new_cache(self, capacity: int) -> AnyCache:
        parts = [self._new_part(number, capacity) for number in range(len(self._alike))]
        if (states := self._states) is not None:
            parts.append(StateCache(len(states.past), capacity, states.held, states.row, states.shape))
        return parts[0] if len(parts) == 1 else MixedCache(parts)

    def _new_part(self, number: int, capacity: int) -> Part:
        """A cache of the layers of one shape. number: of the shape."""
        layers = self._alike[number]
        if not self.exact:
            return KVCache(layers.count, capacity, *layers.row_shape, layers.dtype)
        keys, values = layers.kept[:2]
        heads, pieces = int(keys.shape[0]), int(values.shape[1])
        sizes = layers.count, capacity, heads, row_size(keys) // heads, pieces
        cache = HeadMajorCache(*sizes, keys.dtype, native=self.native, new_rows=self._new_rows[number])
        self._new_rows[number] = cache.new_rows
        return cache

    def run(self, feeds: Mapping[str, Any], cache: AnyCache) -> dict[str, Array]:
        count, wanted = len(feeds[self._rows_input]), len(feeds["logit_rows"])
        assert count <= cache.room, "the caller checks the capacity before a forward pass"
        rows, logit_rows = self.padding.rows(count), self.padding.rows(wanted)
        padded = (rows, logit_rows) != (count, wanted)
        if padded:
            numbers = feeds["logit_rows"]
            feeds = pad_rows(feeds, rows - count)
            feeds["logit_rows"] = np.concatenate([numbers, np.repeat(numbers[-1:], logit_rows - wanted)])
        cache.make_room(rows)
        results = self._computed(feeds, cache, rows)
        if padded:
            kept = {"T": count, "R": wanted}
            results = {name: value[: kept[str(self.outputs[name].shape[1])]] for name, value in results.items()}
        return results

    def _computed(self, feeds: Mapping[str, Any], cache: AnyCache, rows: int) -> dict[str, Array]:
        """The outputs of a forward pass over `rows` rows."""
        number = rows if rows <= MOST_BOUND else 0
        if number not in self._by_rows:
            self._by_rows[number] = Bound(self._session.io_binding())
        self._bound = self._by_rows[number]
        sizes: dict[str, int] = {}
        for name in self.inputs:
            self._feed(name, feeds[name], sizes)
        for number, part in enumerate(cache.each()):
            if isinstance(part, HeadMajorCache):
                self._bind_head_major(number, part, rows)
            elif isinstance(part, StateCache):
                self._bind_states(part, rows)
            else:
                self._bind_cache("cpu", self._alike[number], part.addresses, part.length, rows)
        results = {name: self._bind_output(name, sizes) for name in self.outputs}
        if self._announce is None:
            run_graph(self._session, self._bound.binding)
        else:
            self._announce.write_rows(IN_CACHE if cache.in_place else 0)
            try:
                run_graph(self._session, self._bound.binding)
            finally:
                self._announce.write_rows(0)
        cache.computed()
        return results

    def _moved(self) -> None:
        self._by_rows.clear()  # which hold its address; the pass that is being bound keeps its own

    def _bind_head_major(self, number: int, cache: HeadMajorCache, rows: int) -> None:
        """Bind the cache of the layers of one shape, and the place of `rows` new rows, unless the same are bound
        already. number: of the shape."""
        cache.expect(rows)
        arrays, count, bound, layers = cache.arrays, len(cache.arrays), self._bound, self._alike[number]
        if (past := cache.past) != bound.past.get(number):
            bound.past.pop(number, None)  # as in _feed
            for index, (name, spec) in enumerate(zip(layers.past, layers.kept, strict=True)):
                array = arrays[index % count][index // count]
                shape = [cache.columns if isinstance(size, str) else size for size in spec.shape]
                bound.binding.bind_input(name, "cpu", 0, array.dtype.type, shape, array.ctypes.data)
            bound.past[number] = past
        if cache.in_place:  # operators write them to the cache alone
            return
        new = cache.written
        if (place := cache.new) != bound.new.get(number):
            bound.new.pop(number, None)
            for index, name in enumerate(layers.new):
                array = new[index % count][index // count]
                bound.binding.bind_output(name, "cpu", 0, array.dtype.type, (1, *array.shape), array.ctypes.data)
            bound.new[number] = place

    def _bind_states(self, cache: StateCache, rows: int) -> None:
        """Bind the states, the rows after them, and the places of `rows` new rows and of new states."""
        assert self._states is not None
        bind_input, bind_output = self._bound.binding.bind_input, self._bound.binding.bind_output
        row, shape, single = self._states.row, self._states.shape, np.float32
        for past, new, (place, old, coming) in zip(self._states.past, self._states.new, cache.places, strict=True):
            bind_input(past[0], "cpu", 0, single, (1, cache.count, row), place)
            bind_input(past[1], "cpu", 0, single, shape, old)
            bind_output(new[0], "cpu", 0, single, (1, rows, row), place + 4 * row * cache.count)
            bind_output(new[1], "cpu", 0, single, shape, coming)

    def run_together(self, passes: Sequence[tuple[Mapping[str, Any], Any]]) -> list[dict[str, Array]]:
        assert self._announce is not None and self.padding.rows(1) == 1, "the caller looks at `joins`"
        feeds = [feed for feed, _ in passes]
        caches = [cache for _, cache in passes]
        rows = np.array([len(feed[self._rows_input]) for feed in feeds])
        wanted = np.array([len(feed["logit_rows"]) for feed in feeds])
        ends, wanted_ends = np.cumsum(rows).tolist(), np.cumsum(wanted).tolist()
        for cache, count in zip(caches, rows.tolist(), strict=True):
            assert count <= cache.room, "the caller checks the capacity before a forward pass"
            cache.make_room(count)
        for part in caches[0].each():
            if isinstance(part, (KVCache, StateCache)):
                part.make_room(ends[-1])  # all new rows are written after its own
        merged = {name: np.concatenate([feed[name] for feed in feeds]) for name in feeds[0] if name != "tree_mask"}
        merged["logit_rows"] += np.repeat(np.array([0, *ends[:-1]]), wanted)
        merged["tree_mask"] = texts_mask([feed["tree_mask"] for feed in feeds], ends)
        self._announce(caches)
        try:
            results = self._computed(merged, caches[0], ends[-1])
        finally:
            self._announce([])
        for parts in zip(*(cache.each() for cache in caches), strict=True):
            if isinstance(parts[0], (KVCache, StateCache)):
                _give_rows(parts, [0, *ends])
        for cache in caches[1:]:
            cache.computed()
        bounds = {"T": [0, *ends], "R": [0, *wanted_ends]}
        kinds = {name: bounds[str(self.outputs[name].shape[1])] for name in results}
        return [
            {name: results[name][of[number] : of[number + 1]] for name, of in kinds.items()}
            for number in range(len(feeds))
        ]


def _give_rows(caches: Sequence[KVCache | StateCache], starts: Sequence[int]) -> None:
    """Copy the new rows of a pass over several texts, which follow the first cache's committed ones, to the others.
    starts: of each text's rows among them, and the end."""
    new = caches[0].rows[:, caches[0].count :]
    for cache, start, end in zip(caches[1:], starts[1:-1], starts[2:], strict=True):
        cache.rows[:, cache.count : cache.count + end - start] = new[:, start:end]


def texts_mask(masks: Sequence[Array], ends: Sequence[int]) -> Array:
    """Additive masks [T, T] of the rows of several texts -> [sum of T, sum of T + 1] of all, whose last column numbers
    each row's text; no row sees one of another text. ends: the last row of each, and one more."""
    out = np.full((ends[-1], ends[-1] + 1), hiding(masks[0].dtype), masks[0].dtype)
    for number, (mask, end) in enumerate(zip(masks, ends, strict=True)):
        first = end - len(mask)
        out[first:end, first:end] = mask
        out[first:end, -1] = number
    return out


def check_graph(session: Any, path: Path, spec: GraphSpec) -> None:
    """Raises BackendError unless an InferenceSession has the inputs and outputs that a manifest lists."""

    def specs_of(values: list[Any]) -> dict[str, TensorSpec]:
        return {value.name: TensorSpec(DTYPES.get(value.type, value.type), tuple(value.shape)) for value in values}

    if specs_of(session.get_inputs()) != spec.inputs or specs_of(session.get_outputs()) != spec.outputs:
        raise BackendError(
            f"{path}: the manifest lists other inputs or outputs than the graph; export the bundle again"
        )
