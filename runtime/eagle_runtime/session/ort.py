"""ONNX Runtime on the CPU: IOBinding over preallocated buffers. The only file that imports onnxruntime."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np

from eagle_runtime.cache import KVCache, aligned_empty
from eagle_runtime.errors import BackendError
from eagle_runtime.manifest import GraphSpec, TensorSpec
from eagle_runtime.session import Array

try:
    import onnxruntime as ort
except ImportError:
    raise BackendError("onnxruntime is not installed; pip install 'eagle-edge[cpu]'") from None

WEIGHTS_FOLDER = "session.model_external_initializers_file_folder_path"
DTYPES = {"tensor(float)": "float32", "tensor(float16)": "float16", "tensor(int64)": "int64"}


class OrtSession:
    """A graph on ONNX Runtime's CPU provider.

    Key/value rows are bound by address: `past` to the head of the cache, the new rows to its tail, so that a pass
    appends without copying. Other outputs land in buffers that grow to the largest pass seen and are then reused."""

    def __init__(self, path: Path, spec: GraphSpec, threads: int | None = None, model: bytes | None = None) -> None:
        """threads: of one pass; None leaves the choice to ONNX Runtime (physical cores). model: what to run in place
        of the file at `path`: a graph whose weights are those beside that file."""
        options = ort.SessionOptions()
        options.log_severity_level = 3
        if threads is not None:
            options.intra_op_num_threads = threads
        if model is not None:
            options.add_session_config_entry(WEIGHTS_FOLDER, str(path.parent))
        source = str(path) if model is None else model
        try:
            self._session = ort.InferenceSession(source, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # onnxruntime raises a dozen kinds without a common base
            raise BackendError(f"onnxruntime cannot load {path}: {_first_line(error)}") from None
        if _specs(self._session.get_inputs()) != spec.inputs or _specs(self._session.get_outputs()) != spec.outputs:
            raise BackendError(
                f"{path}: the manifest lists other inputs or outputs than the graph; export the bundle again"
            )
        self._binding = self._session.io_binding()
        self._past = {name: s for name, s in spec.inputs.items() if name.startswith("past_key_values.")}
        self._new = {name: s for name, s in spec.outputs.items() if name.startswith("present.")}
        self.inputs: Mapping[str, TensorSpec] = {n: s for n, s in spec.inputs.items() if n not in self._past}
        self.outputs: Mapping[str, TensorSpec] = {n: s for n, s in spec.outputs.items() if n not in self._new}
        self._buffers: dict[str, Array] = {}

    def new_cache(self, capacity: int) -> KVCache:
        spec = self._past["past_key_values.0.key"]
        kv_heads, head_dim = int(spec.shape[2]), int(spec.shape[3])
        return KVCache(len(self._past) // 2, capacity, kv_heads, head_dim, spec.dtype)

    def run(self, feeds: Mapping[str, Any], cache: KVCache) -> dict[str, Array]:
        rows = len(feeds["input_ids"])
        assert rows <= cache.room, "the caller checks capacity before a pass"
        sizes = self._bind_feeds(feeds)
        self._bind_cache(cache, rows)
        results = self._bind_outputs(sizes)
        self._session.run_with_iobinding(self._binding)
        return results

    def joined(self, parts: Sequence[Array]) -> Array:
        return np.concatenate(parts)

    def close(self) -> None:
        del self._binding, self._session
        self._buffers.clear()

    def __enter__(self) -> OrtSession:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _bind_feeds(self, feeds: Mapping[str, Array]) -> dict[str, int]:
        """Bind the small inputs; returns the value of every symbolic dimension they fix."""
        sizes: dict[str, int] = {}
        for name, spec in self.inputs.items():
            value = feeds[name]
            assert value.flags.c_contiguous and value.dtype == spec.dtype, name
            shape = (1,) * (len(spec.shape) - value.ndim) + value.shape
            for dim, size in zip(spec.shape, shape, strict=True):
                if isinstance(dim, str):
                    assert sizes.setdefault(dim, size) == size, f"{name}: {dim} is {size} and {sizes[dim]}"
                else:
                    assert dim == size, name
            self._bind_input(name, value, shape, value.ctypes.data)
        return sizes

    def _bind_cache(self, cache: KVCache, rows: int) -> None:
        row_bytes = cache.rows.strides[1]
        past_shape = (1, cache.length, *cache.rows.shape[2:])
        new_shape = (1, rows, *cache.rows.shape[2:])
        for layer in range(cache.layers):
            for half, part in enumerate(("key", "value")):
                buffer = cache.rows[2 * layer + half]
                head = buffer.ctypes.data
                self._bind_input(f"past_key_values.{layer}.{part}", buffer, past_shape, head)
                self._bind_output(f"present.{layer}.{part}", buffer, new_shape, head + cache.length * row_bytes)

    def _bind_outputs(self, sizes: Mapping[str, int]) -> dict[str, Array]:
        results = {}
        for name, spec in self.outputs.items():
            shape = tuple(sizes[dim] if isinstance(dim, str) else dim for dim in spec.shape)
            count = int(np.prod(shape, dtype=np.int64))
            if name not in self._buffers or self._buffers[name].size < count:
                self._buffers[name] = aligned_empty((count,), spec.dtype)
            results[name] = self._buffers[name][:count].reshape(shape[1:])  # without the axis of the batch
            self._bind_output(name, results[name], shape, results[name].ctypes.data)
        return results

    def _bind_input(self, name: str, like: Array, shape: tuple[int, ...], address: int) -> None:
        self._binding.bind_input(name, "cpu", 0, like.dtype.type, shape, address)

    def _bind_output(self, name: str, like: Array, shape: tuple[int, ...], address: int) -> None:
        self._binding.bind_output(name, "cpu", 0, like.dtype.type, shape, address)


def _specs(values: list[Any]) -> dict[str, TensorSpec]:
    return {value.name: TensorSpec(DTYPES.get(value.type, value.type), tuple(value.shape)) for value in values}


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0][:300]
