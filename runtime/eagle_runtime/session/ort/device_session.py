"""ONNX Runtime with cache, features and hidden states in a device's memory: logits of the target, and the head's few
likeliest tokens, are all that a pass brings to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from eagle_runtime.bundle.manifest import GraphSpec
from eagle_runtime.errors import BackendError
from eagle_runtime.session.ort.memory import OrtCache, OrtMemory, OrtRows
from eagle_runtime.session.ort.session import BoundSession, run_graph
from eagle_runtime.session.row_padding import fill_up

KEYS = 4  # memory-efficient attention with a mask takes a whole multiple of so many keys
VECTOR = 16  # bytes that CUDA kernels read at once, from addresses that are a multiple of it
ROWS = ("features", "hidden")  # inputs and outputs that stay on the device


class OrtDeviceSession(BoundSession):
    """A graph on a device. Features come in as OrtRows or as host arrays, and go out as OrtRows.

    A pass of several rows is filled up until past and new rows are a multiple of KEYS. Filling rows see themselves
    and the past, no other row sees them, and what they write behind the cache is never committed. A single row goes as
    it is: its attention is small either way, and products with 4-bit weights have a kernel of their own for it."""

    def __init__(self, session: Any, path: Path, spec: GraphSpec, memory: OrtMemory) -> None:
        """session: an InferenceSession of the graph, on the device whose memory is given; path: for errors."""
        super().__init__(session, path, spec)
        self._memory = memory
        self._caches: list[OrtCache] = []
        check_rows(path, spec)

    def new_cache(self, capacity: int) -> OrtCache:
        cache = OrtCache(self._memory, self._layers, capacity, *self._row_shape, self._row.dtype)
        self._caches.append(cache)
        return cache

    def run(self, feeds: Mapping[str, Any], cache: OrtCache) -> dict[str, Any]:
        count = len(feeds["input_ids"])
        assert count <= cache.room, "the caller checks capacity before a pass"
        filled = fill_up(feeds, -(cache.length + count) % KEYS if count > 1 else 0)
        sizes: dict[str, int] = {}
        for name in self.inputs:  # input_ids come first: they fix T
            if isinstance(filled[name], OrtRows):
                self._bind_rows(name, filled[name], sizes["T"])
            else:
                self._feed(name, filled[name], sizes)
        device, total = self._memory.device, sizes["T"]
        kept = next(name for name in self.outputs if name in ROWS)
        self._binding.bind_output(kept, device)  # memory of its own in every pass
        self._bind_cache(device, cache.heads, cache.length, total, cache.row_bytes, self._row.dtype)
        results: dict[str, Any] = {name: self._bind_output(name, sizes) for name in self.outputs if name != kept}
        run_graph(self._session, self._binding)
        value = self._binding.get_outputs()[0]  # in the order in which they were bound first
        spec = self.outputs[kept]
        wanted = count if spec.shape[1] == "T" else sizes["R"]  # filling rows are none of those whose logits are
        spare = sizes[str(spec.shape[1])] - wanted
        results[kept] = OrtRows(self._memory, value, wanted, int(spec.shape[2]), spec.dtype, 0, spare)
        return results

    def joined(self, parts: Sequence[OrtRows]) -> OrtRows:
        return OrtRows.joined(parts)

    def close(self) -> None:
        for cache in self._caches:
            cache.close()
        super().close()

    def _bind_rows(self, name: str, rows: OrtRows, total: int) -> None:
        spec = self.inputs[name]
        shape = (1, total, int(spec.shape[2]))
        self._fed.pop(name, None)
        self._binding.bind_input(name, self._memory.device, 0, np.dtype(spec.dtype).type, shape, rows.address)


def check_rows(path: Path, spec: GraphSpec) -> None:
    """Raises BackendError unless rows of keys, values and features all start where kernels may read them."""
    for name, tensor in {**spec.inputs, **spec.outputs}.items():
        if name in (*ROWS, *spec.past):
            numbers = int(np.prod([dim for dim in tensor.shape if isinstance(dim, int)]))
            size = numbers * np.dtype(tensor.dtype).itemsize
            if size % VECTOR:
                raise BackendError(
                    f"{path}: a row of {name} takes {size} bytes, and GPUs need a multiple of {VECTOR}; "
                    "run this bundle with --backend cpu"
                )
