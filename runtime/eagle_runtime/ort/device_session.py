"""ONNX Runtime with the cache, features, hidden states and logits in device memory. A forward pass copies to the host
only the head's proposals, or the candidates of the target's logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_runtime.base.errors import BackendError
from eagle_runtime.bundle.manifest import GraphSpec, TensorSpec
from eagle_runtime.core.row_padding import pad_rows
from eagle_runtime.ort.buffers import OrtCache, OrtMemory, OrtRows
from eagle_runtime.ort.library import run_graph
from eagle_runtime.ort.logits import COUNT, LogitMemory
from eagle_runtime.ort.session import BoundSession

KEYS = 4  # memory-efficient attention with a mask needs a multiple of so many keys
VECTOR = 16  # bytes that CUDA kernels read at once, from addresses that are multiples of it
ON_DEVICE = ("features", "hidden")  # inputs and outputs that stay on the device


class OrtDeviceSession(BoundSession):
    """A graph on a device. Features are fed as OrtRows or host arrays and returned as OrtRows, the target's logits as
    DeviceLogits. The inputs `watched_ids` and `inverse_temperature` are needed where another token than that of the
    highest logit may be drawn.

    A forward pass of several rows is padded (row_padding) until past and new rows are a multiple of KEYS. The key/value
    rows of padding are never committed. A single row is not padded: its attention is small either way, and 4-bit
    weights have a kernel of their own for one row."""

    def __init__(self, session: Any, path: Path, spec: GraphSpec, memory: OrtMemory) -> None:
        """session: an InferenceSession of the graph, on the device of `memory`; path: its file, for messages."""
        super().__init__(session, path, spec, memory.device)
        self._memory = memory
        self._caches: list[OrtCache] = []
        (self._layers,) = self._alike  # cuda.check_graphs has refused others
        self._graph_inputs = tuple(self.inputs)
        self._logits: LogitMemory | None = None
        check_rows(path, spec)
        if "logits" in self.outputs:
            self._logits = LogitMemory(memory, int(self.outputs["logits"].shape[2]))
            asked = {
                "watched_ids": TensorSpec("int64", ("R", COUNT)),
                "inverse_temperature": TensorSpec("float32", (1,)),
            }
            self.inputs = {**self.inputs, **asked}

    def new_cache(self, capacity: int) -> OrtCache:
        cache = OrtCache(self._memory, self._layers.count, capacity, *self._layers.row_shape, self._layers.dtype)
        self._caches.append(cache)
        return cache

    def run(self, feeds: Mapping[str, Any], cache: OrtCache) -> dict[str, Any]:
        count = len(feeds["input_ids"])
        assert count <= cache.room, "the caller checks the capacity before a forward pass"
        padded = pad_rows(feeds, -(cache.length + count) % KEYS if count > 1 else 0)
        sizes: dict[str, int] = {}
        for name in self._graph_inputs:  # input_ids come first, which determine T
            if isinstance(padded[name], OrtRows):
                self._bind_rows(name, padded[name], sizes["T"])
            else:
                self._feed(name, padded[name], sizes)
        device, total = self._memory.device, sizes["T"]
        kept = next(name for name in self.outputs if name in ON_DEVICE)
        self._bound.binding.bind_output(kept, device)  # into new memory in every forward pass
        self._bind_cache(device, self._layers, cache.addresses, cache.length, total)
        on_host = [name for name in self.outputs if name not in (kept, "logits")]
        results: dict[str, Any] = {name: self._bind_output(name, sizes) for name in on_host}
        if self._logits is None:
            run_graph(self._session, self._bound.binding)
        else:
            block = self._logits.reserve(sizes["R"])
            self._bound.binding.bind_output("logits", device, 0, np.float32, (1, *block.shape), block.address)
            run_graph(self._session, self._bound.binding)
            inverse_temperature = feeds.get("inverse_temperature", np.ones(1, np.float32))
            results["logits"] = self._logits.read(block, feeds.get("watched_ids"), inverse_temperature)
        value = self._bound.binding.get_outputs()[0]  # outputs come in the order in which they were bound first
        spec = self.outputs[kept]
        wanted = count if spec.shape[1] == "T" else sizes["R"]  # R counts no padding rows
        spare = sizes[str(spec.shape[1])] - wanted
        results[kept] = OrtRows(self._memory, value, wanted, int(spec.shape[2]), spec.dtype, 0, spare)
        return results

    def joined(self, parts: Sequence[OrtRows]) -> OrtRows:
        return OrtRows.joined(parts)

    def close(self) -> None:
        for cache in self._caches:
            cache.close()
        if self._logits is not None:
            self._logits.close()
        super().close()

    def _bind_rows(self, name: str, rows: OrtRows, total: int) -> None:
        spec = self.inputs[name]
        shape = (1, total, int(spec.shape[2]))
        self._bound.inputs.pop(name, None)
        self._bound.binding.bind_input(name, self._memory.device, 0, np.dtype(spec.dtype).type, shape, rows.address)


def check_rows(path: Path, spec: GraphSpec) -> None:
    """Raises BackendError unless every row of keys, values and features starts where kernels can read it."""
    for name, tensor in {**spec.inputs, **spec.outputs}.items():
        if name in (*ON_DEVICE, *spec.past):
            numbers = int(np.prod([dim for dim in tensor.shape if isinstance(dim, int)]))
            size = numbers * np.dtype(tensor.dtype).itemsize
            if size % VECTOR:
                raise BackendError(
                    f"{path}: a row of {name} takes {size} bytes, and GPUs need a multiple of {VECTOR}; "
                    "run this bundle on backend cpu"
                )
