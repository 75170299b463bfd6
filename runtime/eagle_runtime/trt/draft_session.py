"""The head as an engine on the GPU that drafts a whole tree in one call (drafting/one_call.py)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from eagle_runtime.base.errors import BackendError
from eagle_runtime.base.tree import Int
from eagle_runtime.core.session import Drafted, Weights
from eagle_runtime.trt.device import Device, DeviceCache
from eagle_runtime.trt.engine_session import EngineSession, Opened
from eagle_runtime.trt.fixed_shapes import PassShape, pass_shape, write_ids, write_masks, write_seen
from eagle_runtime.trt.inputs import Outputs, nbytes_of

DRAFTED = ("pool_tokens", "pool_log_probs", "root_tokens", "root_log_probs", "frontier")  # outputs that the host needs


class DraftSession(EngineSession):
    """A head's engine (one_call.OneCallSession)."""

    def __init__(self, device: Device, opened: Opened, known: Int | None) -> None:
        """The engine's graph is draft_graph.draft_graph. known: as in OneCallSession."""
        super().__init__(device, opened)
        self.known = known
        engine, largest = opened.execution.graph, opened.largest
        self.most_rows = largest["T"]
        self.depth = int(engine.inputs["level_positions"].shape[0])
        count = int(engine.outputs["pool_tokens"].shape[0])
        self.top_k = next(k for k in range(1, count + 1) if k + self.depth * k * k == count)
        self._quiet = True  # whether the noise on the GPU is zero
        self._features = device.reserve(nbytes_of(engine.inputs["features"], largest))
        device.driver.clear(self._features, nbytes_of(engine.inputs["features"], largest), device.stream)
        self._drafted = Outputs(device, {name: engine.outputs[name] for name in DRAFTED if name in engine.outputs})
        for name, address in {**self._drafted.addresses, "features": self._features}.items():
            opened.execution.bind(name, address)

    def draft(self, tokens: Int, features: Any, weights: Weights, cache: DeviceCache) -> Drafted:
        """As in OneCallSession: one call of the engine, one copy to the host, one wait."""
        assert not self._closed, "the session is closed"
        assert len(tokens) == len(features) <= self.most_rows and len(tokens) <= cache.room
        shape = pass_shape(self._steps, len(tokens), cache.length)
        self._execution.check(shape)
        self._write(tokens, cache.length, weights, shape)
        rows = self._on_device(features)
        self._device.driver.copy(self._features, rows.address, rows.nbytes, self._device.stream)
        self._queue(shape, cache)
        got = self._drafted.read()
        frontier = got.get("frontier", np.zeros((0, self.top_k), np.int64))
        return Drafted(got["pool_tokens"], got["pool_log_probs"], frontier, got["root_tokens"], got["root_log_probs"])

    def run(self, feeds: Mapping[str, Any], cache: DeviceCache) -> dict[str, Any]:
        """Raises BackendError: the engine computes no single level."""
        raise BackendError("this head's engine drafts whole trees; give it to drafting.one_call.OneCallHead")

    def _write(self, tokens: Int, past: int, weights: Weights, shape: PassShape) -> None:
        out, sizes, count = self._from_host.out, shape.sizes, len(tokens)
        self._embed(tokens, sizes)
        write_ids(past + np.arange(count), out("position_ids", sizes)[0])
        write_masks(None, past, out("tree_mask", sizes)[0, 0], out("past_mask", sizes)[0, 0, 0])
        write_seen(count, out("row_mask", sizes)[0, 0, 0])
        out("last_row", sizes)[:] = count - 1
        out("level_positions", sizes)[:] = past + count + np.arange(self.depth)
        out("ranking", sizes)[:] = weights.numbers
        if weights.noise is not None or not self._quiet:
            out("noise", sizes)[:] = 0 if weights.noise is None else weights.noise
        self._quiet = weights.noise is None
