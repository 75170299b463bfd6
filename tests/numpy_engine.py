"""An engine in NumPy: ONNX's reference implementation runs a graph node by node. It is slow and independent of every
kernel that ships, so tests compare other engines with it.

It is also the smallest example of a backend: a Session (eagle_runtime.core.session) and the row-major cache.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, cast

import numpy as np
import onnx
from onnx.reference import ReferenceEvaluator

from eagle_runtime.bundle.manifest import GraphSpec
from eagle_runtime.core.cache import KVCache
from eagle_runtime.core.session import Array, Session

BATCHED = {"input_ids", "position_ids", "features"}  # inputs that have a batch axis in the graph


class NumpySession(Session):
    """One fp32 graph of a bundle. Graphs of other precisions hold operators that the reference lacks."""

    def __init__(self, path: Path, spec: GraphSpec) -> None:
        self._graph = ReferenceEvaluator(onnx.load(path))
        kept = {*spec.past, *spec.present}
        self._past, self._present = spec.past, spec.present
        self._row, self._dtype = spec.inputs[spec.past[0]].shape[2:], spec.inputs[spec.past[0]].dtype
        self.inputs = {name: tensor for name, tensor in spec.inputs.items() if name not in kept}
        self.outputs = {name: tensor for name, tensor in spec.outputs.items() if name not in kept}

    def new_cache(self, capacity: int) -> KVCache:
        heads, width = map(int, self._row)
        return KVCache(len(self._past) // 2, capacity, heads, width, self._dtype)

    def run(self, feeds: Mapping[str, Any], cache: KVCache) -> dict[str, Any]:
        count, start = len(feeds["input_ids"]), cache.length
        inputs = {name: np.asarray(value)[None] if name in BATCHED else value for name, value in feeds.items()}
        inputs["tree_mask"] = feeds["tree_mask"][None, None]
        inputs |= {name: cache.rows[index, None, :start] for index, name in enumerate(self._past)}
        results = cast(list[Array], self._graph.run([*self.outputs, *self._present], inputs))
        for index, new in enumerate(results[len(self.outputs) :]):
            cache.rows[index, start : start + count] = new[0]
        return {name: value[0] for name, value in zip(self.outputs, results, strict=False)}

    def close(self) -> None:
        """There is nothing to free."""

    def __enter__(self) -> NumpySession:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
