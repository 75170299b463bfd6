"""A block head as an engine on the GPU: one call drafts all positions of a block (drafting/block_head.py).

Features of verified rows are the keys and values of the head's layers. They are copied to the cache, where the engine
reads all but the last; that one is an input, because it also brings the target's last state where the head reads it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from eagle_runtime.bundle.graph import TensorSpec
from eagle_runtime.trt.device import Device, FilledCache
from eagle_runtime.trt.engine_session import EngineSession, Opened
from eagle_runtime.trt.fixed_shapes import PassShape, pass_shape, write_seen
from eagle_runtime.trt.inputs import Outputs, nbytes_of


class BlockSession(EngineSession):
    """A block head's engine (protocol.Session)."""

    def __init__(self, device: Device, opened: Opened) -> None:
        """The engine's graph is block_graph.block_graph, which has P alone."""
        super().__init__(device, opened)
        engine = opened.execution.graph
        ids = TensorSpec(self.inputs["input_ids"].dtype, engine.inputs["position_ids"].shape)  # with a fixed B
        self.inputs = {**self.inputs, "input_ids": ids}
        self._hosted = engine.inputs.keys() & {"input_ids", "position_ids"}
        nbytes = nbytes_of(engine.inputs["features"], {})
        self._last = device.reserve(nbytes)
        device.driver.clear(self._last, nbytes, device.stream)
        self._drafted = Outputs(device, engine.outputs)
        for name, address in {**self._drafted.addresses, "features": self._last}.items():
            opened.execution.bind(name, address)

    def new_cache(self, capacity: int) -> FilledCache:
        return FilledCache(self._device, len(self._past) // 2, capacity, self._row_bytes, self._staged)

    def run(self, feeds: Mapping[str, Any], cache: FilledCache) -> dict[str, Any]:
        """As in Session: one call of the engine, one copy to the host, one wait. What the rows of a block see and which
        of them draft is fixed in the engine."""
        assert not self._closed, "the session is closed"
        features = self._on_device(feeds["features"])
        assert 0 < len(features) <= cache.room, "the caller checks the capacity before a forward pass"
        past = cache.length + len(features) - 1
        shape = pass_shape(self._steps, 0, past)
        self._execution.check(shape)
        cache.fill(features)
        last = features[len(features) - 1 :]
        self._device.driver.copy(self._last, last.address, last.nbytes, self._device.stream)
        self._write(feeds, past, shape)
        self._queue(shape, cache)
        return {name: array[0] for name, array in self._drafted.read().items()}

    def _write(self, feeds: Mapping[str, Any], past: int, shape: PassShape) -> None:
        out, sizes = self._from_host.out, shape.sizes
        self._embed(feeds["input_ids"], sizes)
        for name in self._hosted:
            out(name, sizes)[0] = feeds[name]
        write_seen(past, out("past_mask", sizes)[0, 0, 0])
