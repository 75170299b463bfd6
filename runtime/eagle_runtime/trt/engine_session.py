"""What the sessions of target and head have in common."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.errors import call_all
from eagle_runtime.base.tree import Int
from eagle_runtime.bundle.manifest import GraphSpec, TensorSpec
from eagle_runtime.core.counters import Counters
from eagle_runtime.core.session import Session
from eagle_runtime.trt.device import Device, DeviceCache, DeviceRows, Staged, empty_rows, joined_rows
from eagle_runtime.trt.execution import Execution
from eagle_runtime.trt.fixed_shapes import PassShape, Steps, shapes_of
from eagle_runtime.trt.inputs import Inputs


@dataclass(frozen=True, slots=True)
class Opened:
    """An engine that was made of a bundle's graph. largest: sizes of its largest forward pass. table [V, H]: the
    embedding, memory-mapped."""

    execution: Execution
    graph: GraphSpec
    largest: Mapping[str, int]
    steps: Steps
    table: npt.NDArray[Any]


class EngineSession(Session):
    """An engine with the inputs and outputs of a bundle's graph, what it gets from the host, and the place where it
    writes new keys and values, if it makes some."""

    def __init__(self, device: Device, opened: Opened) -> None:
        execution, graph, largest = opened.execution, opened.graph, opened.largest
        self._device, self._execution, self._steps, self._table = device, execution, opened.steps, opened.table
        self._closed = False
        gpu = device.driver.describe()
        self.facts = (gpu.name, gpu.compute_capability, execution.graph.sha256)
        self._past, present, self._row_bytes = graph.past, graph.present, graph.kv_row_bytes
        self.inputs: Mapping[str, TensorSpec] = {n: s for n, s in graph.inputs.items() if n not in self._past}
        self.outputs: Mapping[str, TensorSpec] = {n: s for n, s in graph.outputs.items() if n not in present}
        new = [name for name in present if name in execution.graph.outputs]
        self._staged = Staged.reserve(device, len(new), largest.get("T", 1), self._row_bytes)
        for index, name in enumerate(new):
            execution.bind(name, self._staged.of(index))
        hosted = {n: s for n, s in execution.graph.inputs.items() if n not in (*self._past, "features")}
        self._from_host = Inputs(device, hosted, largest)
        for name, address in self._from_host.addresses.items():
            execution.bind(name, address)

    def new_cache(self, capacity: int) -> DeviceCache:
        return DeviceCache(self._device, len(self._past) // 2, capacity, self._row_bytes, self._staged)

    def joined(self, parts: Sequence[DeviceRows]) -> DeviceRows:
        return joined_rows(self._device, parts)

    def warm(self, cache: DeviceCache, report: Callable[[int, int], None]) -> None:
        self._bind_past(cache)
        self._execution.specialise(shapes_of(self._steps), report)

    def close(self) -> None:
        """As in protocol.Session. Raises the first BackendError of freeing, once all is freed."""
        if not self._closed:
            self._closed = True
            call_all([self._device.wait, *self._closing(), self._device.release])

    def _closing(self) -> list[Callable[[], None]]:
        """What frees the engines."""
        return [self._execution.close]

    @property
    def capturable(self) -> bool | None:
        """As in Execution."""
        assert not self._closed, "the session is closed"
        return self._execution.capturable

    def counters(self) -> Counters:
        return self._device.driver.tally.now

    def _on_device(self, features: Any) -> DeviceRows:
        """Returns features [n, Hd] on the GPU."""
        if isinstance(features, DeviceRows):
            return features
        array = np.ascontiguousarray(features, self.inputs["features"].dtype)
        rows = empty_rows(self._device, len(array), array.shape[1], array.dtype)
        self._device.driver.upload(rows.address, array.ctypes.data, array.nbytes, self._device.stream)
        self._device.wait()  # the caller may reuse its memory
        return rows

    def _embed(self, tokens: Int, sizes: Mapping[str, int]) -> None:
        """Write the embeddings of a forward pass's tokens."""
        np.take(self._table, tokens, axis=0, out=self._from_host.out("embeds", sizes)[0, : len(tokens)], mode="clip")

    def _queue(self, shape: PassShape, cache: DeviceCache) -> None:
        """Queue a forward pass over the inputs that were written."""
        self._from_host.send()
        self._bind_past(cache)
        self._execution.run(shape)

    def _bind_past(self, cache: DeviceCache) -> None:
        for index, name in enumerate(self._past):
            self._execution.bind(name, cache.address(index))
