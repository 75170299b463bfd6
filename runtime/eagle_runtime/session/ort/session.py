"""ONNX Runtime: loading graphs, and running them on the CPU over preallocated buffers. The only file that imports
onnxruntime."""

from __future__ import annotations

import contextlib
import functools
import io
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from eagle_runtime.bundle.manifest import GraphSpec, TensorSpec, pieces_of
from eagle_runtime.cache import HeadMajorCache, KVCache, aligned_empty
from eagle_runtime.errors import BackendError
from eagle_runtime.session.ort import onnx_bytes
from eagle_runtime.session.protocol import Array
from eagle_runtime.session.row_padding import RowPadding, fill_up

# From 1.32 on it sends usage data unless told not to, and keeps a number of the machine in the user's cache folder.
os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
try:
    import onnxruntime as ort
except ImportError:
    raise BackendError("onnxruntime is not installed; pip install 'eagle-edge[cpu]'") from None

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
ASSIGNMENT = "session.record_ep_graph_assignment_info"
# Each session has threads of its own, which would go on spinning for some 50 ms after a pass and take cores from the
# other graph's: a verification behind a draft took 1.4 times as long.
STOP_SPINNING = "session.force_spinning_stop"
# Products of unsigned by signed bytes as products of unsigned bytes, whose sums have 32 bits on every processor.
EXACT_BYTES = "session.x64quantprecision"
DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64"}

Providers = Sequence[tuple[str, Mapping[str, str]]]
WAYS_OUT = "choose a smaller --context, export the bundle in int4, or close the process that holds the memory"
CPU: Providers = (("CPUExecutionProvider", {}),)
S = TypeVar("S", bound="BoundSession")


def open_graph(
    path: Path,
    providers: Providers = CPU,
    threads: int | None = None,
    model: bytes | None = None,
    config: Mapping[str, str] | None = None,
) -> Any:
    """An InferenceSession on these providers and no others. threads: of one pass; None leaves the choice to ONNX
    Runtime (physical cores). model: what to run in place of the file at `path`: a graph whose weights, if it has any
    outside, are beside that file. config: further entries of the session's configuration. Raises BackendError."""
    options = ort.SessionOptions()
    options.log_severity_level = 4  # what it says of a failure stands in the exception too
    options.add_session_config_entry(STOP_SPINNING, "1")
    if threads is not None:
        options.intra_op_num_threads = threads
    if model is not None:
        options.add_session_config_entry(WEIGHTS_FOLDER, str(path.parent))
    if len(providers) > 1:
        options.add_session_config_entry(ASSIGNMENT, "1")
    for name, value in (config or {}).items():
        options.add_session_config_entry(name, value)
    try:
        # With its fallback on, it would print to stdout and go on with the CPU alone.
        return ort.InferenceSession(model or str(path), options, providers=list(providers), enable_fallback=False)
    except Exception as error:  # onnxruntime raises a dozen kinds without a common base
        raise engine_error(f"load {path}", error) from None


@functools.cache
def byte_products_saturate() -> bool:
    """Returns whether products of unsigned by signed bytes go wrong on this processor: those of x86 processors without
    VNNI add pairs of them in 16 bits. Found out by one product of the largest numbers there are."""
    matrices = {"a": (onnx_bytes.UINT8, 2), "b": (onnx_bytes.INT8, 2)}
    node = onnx_bytes.node("MatMulInteger", ["a", "b"], "y")
    product = onnx_bytes.model([node], matrices, {"y": (onnx_bytes.INT32, 2)})
    feeds = {"a": np.full((4, 64), 255, np.uint8), "b": np.full((64, 16), 127, np.int8)}
    (sums,) = open_graph(Path("byte_product"), threads=1, model=product).run(None, feeds)
    return bool(np.any(sums != 255 * 127 * 64))


def run_graph(session: Any, binding: Any) -> None:
    """One pass over what is bound. Raises BackendError."""
    try:
        session.run_with_iobinding(binding)
    except Exception as error:
        raise engine_error("run a pass", error) from None


def engine_error(what: str, error: Exception) -> BackendError:
    """`what` failed: what ONNX Runtime says of it, with ways out where memory is lacking."""
    text = str(error).strip()
    if not re.search(r"out of memory|allocate memory|bad allocation|bad_alloc", text, re.IGNORECASE):
        return BackendError(f"onnxruntime cannot {what}: {(text.splitlines() or [type(error).__name__])[0][:300]}")
    asked = re.search(r"requested buffer of size (\d+)", text)
    size = f" ({int(asked[1]) / 1e6:.1f} MB more were asked for)" if asked else ""
    return BackendError(f"onnxruntime cannot {what}: the memory is full{size}; {WAYS_OUT}")


def operators(session: Any) -> list[tuple[str, str]]:
    """(provider, operator) of every node of a graph that was opened with several providers."""
    return [
        (part.ep_name, node.op_type)
        for part in session.get_provider_graph_assignment_info()
        for node in part.get_nodes()
    ]


def available_providers() -> list[str]:
    """What this onnxruntime was built with."""
    return list(ort.get_available_providers())


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """Within the block ONNX Runtime's process-wide logger tells errors only."""
    ort.set_default_logger_severity(3)
    try:
        yield
    finally:
        ort.set_default_logger_severity(2)  # what it starts with; it cannot be asked


def preload_libraries() -> list[str]:
    """Load the CUDA libraries that pip installed; what onnxruntime complains of, line by line."""
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        ort.preload_dlls()
    return said.getvalue().splitlines()


class BoundSession:
    """A graph whose inputs and outputs are bound by address. Small outputs land in host buffers that grow to the
    largest pass seen and are then reused."""

    def __init__(self, session: Any, path: Path, spec: GraphSpec) -> None:
        """session: an InferenceSession of the graph that `spec` describes; path: where it is from, for errors."""
        if _specs(session.get_inputs()) != spec.inputs or _specs(session.get_outputs()) != spec.outputs:
            raise BackendError(
                f"{path}: the manifest lists other inputs or outputs than the graph; export the bundle again"
            )
        self.path = path
        self.version = f"onnxruntime {ort.__version__}"
        self._session = session
        self._binding = session.io_binding()
        self._past_names, self._new_names = spec.past, spec.present
        self.inputs: Mapping[str, TensorSpec] = {n: s for n, s in spec.inputs.items() if n not in self._past_names}
        self.outputs: Mapping[str, TensorSpec] = {n: s for n, s in spec.outputs.items() if n not in self._new_names}
        self._layers = len(self._past_names) // 2
        self._row = spec.outputs[self._new_names[0]]
        self._buffers: dict[str, Array] = {}
        self._fed: dict[str, tuple[Array, dict[str, int]]] = {}  # what inputs are bound to, and the sizes that it fixes
        self._results: dict[str, Array] = {}  # what outputs are bound to

    def close(self) -> None:
        del self._binding, self._session
        self._buffers.clear()
        self._fed.clear()
        self._results.clear()

    def __enter__(self: S) -> S:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _feed(self, name: str, value: Array, sizes: dict[str, int]) -> None:
        """Copy a host array to where an input is bound, which stays bound while passes feed the same shape; notes the
        value of every symbolic dimension it fixes."""
        fed, fixed = self._fed.get(name, (None, {}))
        if fed is None or fed.shape != value.shape:
            spec = self.inputs[name]
            shape = (1,) * (len(spec.shape) - value.ndim) + value.shape
            dims = list(zip(spec.shape, shape, strict=True))
            assert all(dim == size for dim, size in dims if not isinstance(dim, str)), name
            self._fed.pop(name, None)  # until it is bound: an interrupt may come in between
            fed = self._buffer(name, spec, value.shape)
            fixed = {dim: size for dim, size in dims if isinstance(dim, str)}
            self._binding.bind_input(name, "cpu", 0, fed.dtype.type, shape, fed.ctypes.data)
            self._fed[name] = fed, fixed
        for dim, size in fixed.items():
            assert sizes.setdefault(dim, size) == size, f"{name}: {dim} is {size} and {sizes[dim]}"
        np.copyto(fed, value, "no")

    def _buffer(self, name: str, spec: TensorSpec, shape: tuple[int, ...]) -> Array:
        """Host memory of that shape: the same as before where that suffices."""
        count = math.prod(shape)
        if name not in self._buffers or self._buffers[name].size < count:
            self._buffers[name] = aligned_empty((count,), spec.dtype)
        return self._buffers[name][:count].reshape(shape)

    @property
    def _row_shape(self) -> tuple[int, int]:
        """Key/value heads, and the width of one."""
        return int(self._row.shape[2]), int(self._row.shape[3])

    def _bind_cache(
        self,
        device: str,
        heads: Sequence[int],
        length: int,
        rows: int,
        row_bytes: int,
        dtype: npt.DTypeLike,
    ) -> None:
        """heads: addresses of the keys of layer 0, its values, the keys of layer 1, ... on `device`. `past` is bound
        to the first `length` rows there and the new rows right behind, so that a pass appends without copying."""
        kind = np.dtype(dtype).type
        past_shape = (1, length, *self._row_shape)
        new_shape = (1, rows, *self._row_shape)
        for past, new, head in zip(self._past_names, self._new_names, heads, strict=True):
            self._binding.bind_input(past, device, 0, kind, past_shape, head)
            self._binding.bind_output(new, device, 0, kind, new_shape, head + length * row_bytes)

    def _bind_output(self, name: str, sizes: Mapping[str, int]) -> Array:
        """Bind an output to a host buffer, which is returned without the axis of the batch. What is bound stays bound
        while passes ask for the same shape."""
        spec = self.outputs[name]
        shape = tuple([sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape])
        bound = self._results.get(name)
        if bound is None or bound.shape != shape[1:]:
            self._results.pop(name, None)  # as in _feed
            bound = self._buffer(name, spec, shape[1:])
            self._binding.bind_output(name, "cpu", 0, bound.dtype.type, shape, bound.ctypes.data)
            self._results[name] = bound
        return bound


class OrtSession(BoundSession):
    """A graph on ONNX Runtime's CPU provider, with its cache in the host's memory.

    padding: rows that forward passes are given, so that kernels treat all rows alike (see exact_rows)."""

    def __init__(self, path: Path, spec: GraphSpec, threads: int | None = None, model: bytes | None = None) -> None:
        """threads, model: as in open_graph."""
        bytes_multiplied = any(weight.dtype == "int8" for weight in spec.weights.values())
        config = {EXACT_BYTES: "1"} if bytes_multiplied and byte_products_saturate() else {}
        super().__init__(open_graph(path, CPU, threads, model, config), path, spec)
        self.padding = RowPadding()
        self._pieces = pieces_of(spec)
        self._past: tuple[int, ...] = ()  # what the halves of a cache head-major are bound to
        self._new: tuple[int, ...] = ()

    def new_cache(self, capacity: int) -> KVCache | HeadMajorCache:
        if self._pieces is None:
            return KVCache(self._layers, capacity, *self._row_shape, self._row.dtype)
        return HeadMajorCache(self._layers, capacity, *self._row_shape, self._pieces, self._row.dtype)

    def run(self, feeds: Mapping[str, Any], cache: KVCache | HeadMajorCache) -> dict[str, Array]:
        count, wanted = len(feeds["input_ids"]), len(feeds["logit_rows"])
        assert count <= cache.room, "the caller checks capacity before a pass"
        rows, logit_rows = self.padding.rows(count), self.padding.rows(wanted)
        if (rows, logit_rows) != (count, wanted):
            numbers = feeds["logit_rows"]
            feeds = fill_up(feeds, rows - count)
            feeds["logit_rows"] = np.concatenate([numbers, np.repeat(numbers[-1:], logit_rows - wanted)])
        sizes: dict[str, int] = {}
        for name in self.inputs:
            self._feed(name, feeds[name], sizes)
        if isinstance(cache, HeadMajorCache):
            self._bind_head_major(cache, rows)
        else:
            self._bind_cache("cpu", cache.heads, cache.length, rows, cache.rows.strides[1], cache.rows.dtype)
        results = {name: self._bind_output(name, sizes) for name in self.outputs}
        run_graph(self._session, self._binding)
        if (rows, logit_rows) != (count, wanted):
            kept = {"T": count, "R": wanted}
            results = {name: value[: kept[str(self.outputs[name].shape[1])]] for name, value in results.items()}
        return results

    @property
    def exact(self) -> bool:
        """Whether the graph was made for rows whose bits do not depend on which others share the forward pass."""
        return self._pieces is not None

    def _bind_head_major(self, cache: HeadMajorCache, rows: int) -> None:
        """What is bound stays bound while a cache is laid out in the same way, and while passes have as many rows."""
        cache.expect(rows)
        keys, values, new = cache.keys, cache.values, cache.written
        kind = new.dtype.type
        if (past := (keys.ctypes.data, values.ctypes.data, cache.columns)) != self._past:
            self._past = ()  # as in _feed
            for layer, names in enumerate(zip(self._past_names[0::2], self._past_names[1::2], strict=True)):
                for name, half in zip(names, (keys[layer], values[layer]), strict=True):
                    self._binding.bind_input(name, "cpu", 0, kind, half.shape, half.ctypes.data)
            self._past = past
        if (fresh := (new.ctypes.data, rows)) != self._new:
            self._new = ()
            shape = (1, *new.shape[1:])
            for half, name in enumerate(self._new_names):
                self._binding.bind_output(name, "cpu", 0, kind, shape, new.ctypes.data + half * new.strides[0])
            self._new = fresh

    def joined(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)


def _specs(values: list[Any]) -> dict[str, TensorSpec]:
    return {value.name: TensorSpec(DTYPES.get(value.type, value.type), tuple(value.shape)) for value in values}
