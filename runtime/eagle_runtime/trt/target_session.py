"""The target as an engine on the GPU.

Of a forward pass's logits the host gets the likeliest tokens, and those whose random numbers may let them win; a whole
row is copied when it is asked for (candidates.py). New keys and values are written to a fixed place; the accepted ones
are gathered by another engine, and one copy moves them to the cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.base.tree import Float, Int
from eagle_runtime.sampling.candidates import GREEDY_COUNT, DeviceLogits
from eagle_runtime.trt.device import Device, DeviceCache, DeviceRows, empty_rows
from eagle_runtime.trt.engine_session import EngineSession, Opened
from eagle_runtime.trt.execution import Execution, concrete
from eagle_runtime.trt.fixed_shapes import KEPT_ROWS, PassShape, pass_shape, write_ids, write_masks
from eagle_runtime.trt.inputs import Inputs, nbytes_of

SMALL = ("top_ids", "top_logits", "log_sum_exp", "watched_logits")


class TargetSession(EngineSession):
    """A target's engine (protocol.Session)."""

    def __init__(self, device: Device, opened: Opened, keep: RowKeeper | None) -> None:
        """The engine's graph is target_graph.target_graph. keep: gathers accepted rows; None copies
        them one by one."""
        super().__init__(device, opened)
        self._keep = keep
        engine, largest = opened.execution.graph, opened.largest
        asked = ("watched_ids", "inverse_temperature")
        self.inputs = {**self.inputs, **{name: engine.inputs[name] for name in asked}}
        self._outputs = {n: s for n, s in engine.outputs.items() if n not in opened.graph.present}
        self._places = {name: device.reserve(nbytes_of(spec, largest)) for name, spec in self._outputs.items()}
        self._host = {name: device.reserve_host(nbytes_of(self._outputs[name], largest)) for name in SMALL}
        if keep is not None:
            keep.bind(self._staged.address, self._places["features"])
        for name, address in self._places.items():
            opened.execution.bind(name, address)

    def run(self, feeds: Mapping[str, Any], cache: DeviceCache) -> dict[str, Any]:
        assert not self._closed, "the session is closed"
        ids, wanted = feeds["input_ids"], len(feeds["logit_rows"])
        assert len(ids) <= cache.room, "the caller checks the capacity before a forward pass"
        shape = pass_shape(self._steps, len(ids), cache.length, wanted)
        self._execution.check(shape)
        self._write(feeds, cache.length, shape)
        self._queue(shape, cache)
        watched = feeds.get("watched_ids")
        known = self._download(shape, None if watched is not None else GREEDY_COUNT)
        self._device.wait()
        width = int(self.outputs["features"].shape[2])
        address, dtype = self._places["features"], self.outputs["features"].dtype
        return {
            "logits": DeviceLogits(
                wanted, self._fetch, known, np.zeros((wanted, 0), np.int64) if watched is None else watched
            ),
            "features": DeviceRows(self._device, address, len(ids), width, dtype),
        }

    def keep(self, cache: DeviceCache, path: Int, features: DeviceRows) -> DeviceRows:
        """As in Session, by one call and one copy."""
        if self._keep is None or len(path) > KEPT_ROWS or path[-1] == len(path) - 1:
            cache.keep(path)
            return features[path]
        return self._keep.keep(cache, path, features)

    def warm(self, cache: DeviceCache, report: Callable[[int, int], None]) -> None:
        if self._keep is not None:
            self._keep.warm()
        super().warm(cache, report)

    def _closing(self) -> list[Callable[[], None]]:
        return super()._closing() if self._keep is None else [*super()._closing(), self._keep.close]

    def _fetch(self, first: int, count: int) -> Float:
        """Returns a copy of some rows of logits [count, V] on the host. Waits for the GPU."""
        host = np.empty((count, int(self.outputs["logits"].shape[2])), np.float32)
        address = self._places["logits"] + first * host.strides[0]
        self._device.driver.download(host.ctypes.data, address, host.nbytes, self._device.stream)
        self._device.wait()
        return host

    def _write(self, feeds: Mapping[str, Any], past: int, shape: PassShape) -> None:
        out, sizes = self._from_host.out, shape.sizes
        self._embed(feeds["input_ids"], sizes)
        for name in ("position_ids", "logit_rows"):
            write_ids(feeds[name], out(name, sizes).reshape(-1))
        write_masks(feeds["tree_mask"], past, out("tree_mask", sizes)[0, 0], out("past_mask", sizes)[0, 0, 0])
        out("inverse_temperature", sizes)[:] = feeds.get("inverse_temperature", 1.0)
        if "watched_ids" in feeds:
            watched = out("watched_ids", sizes)
            watched[: len(feeds["watched_ids"])] = feeds["watched_ids"]
            watched[len(feeds["watched_ids"]) :] = 0

    def _download(self, shape: PassShape, top: int | None) -> dict[str, npt.NDArray[Any]]:
        """Queue the copies of what the host needs of the logits; returns the arrays. top: candidates per row, without
        watched tokens; None for all, with them."""
        known: dict[str, npt.NDArray[Any]] = {}
        for name in SMALL:
            spec = self._outputs[name]
            sizes = list(concrete(spec.shape, shape.sizes))
            if top is not None and name.startswith("top_"):
                sizes[0] = min(top, sizes[0])
            if top is not None and name == "watched_logits":
                known[name] = np.zeros((sizes[0], 0), np.float32)
                continue
            nbytes = int(np.prod(sizes)) * np.dtype(spec.dtype).itemsize
            self._device.driver.download(self._host[name].ctypes.data, self._places[name], nbytes, self._device.stream)
            array = self._host[name][:nbytes].view(spec.dtype).reshape(sizes)
            known[name] = array.T if name.startswith("top_") else array
        return known


class RowKeeper:
    """The engine of target_graph.keep_graph: gathers an accepted path's rows of keys, values and features."""

    def __init__(self, device: Device, execution: Execution) -> None:
        self._device, self._execution = device, execution
        graph = execution.graph
        self._path = Inputs(device, {"path": graph.inputs["path"]}, {})
        kept, features = graph.outputs["kept"], graph.outputs["kept_features"]
        self._kept, self._features = (device.reserve(nbytes_of(spec, {})) for spec in (kept, features))
        self._width, self._dtype = int(features.shape[1]), features.dtype
        self._pitch = nbytes_of(kept, {}) // int(kept.shape[0])

    def bind(self, new: int, features: int) -> None:
        """new, features: addresses of the target's outputs."""
        places = {"new": new, "features": features, "kept": self._kept, "kept_features": self._features}
        for name, address in {**places, **self._path.addresses}.items():
            self._execution.bind(name, address)

    def keep(self, cache: DeviceCache, path: Int, features: DeviceRows) -> DeviceRows:
        """Commit the path's rows and return its features. The rest of the KEPT_ROWS rows that are copied come after
        the committed ones, where the next forward pass writes."""
        write_ids(path, self._path.out("path", {}))
        self._path.send()
        self._execution.run(PassShape(()))
        cache.append(self._kept, self._pitch, KEPT_ROWS)
        cache.length += len(path)
        kept = empty_rows(self._device, len(path), self._width, self._dtype)
        self._device.driver.copy(kept.address, self._features, kept.nbytes, self._device.stream)
        return kept

    def warm(self) -> None:
        """Prepare its forward pass, as Session.warm does."""
        self._execution.specialise([PassShape(())], lambda done, total: None)

    def close(self) -> None:
        """Free the engine. The stream must be idle."""
        self._execution.close()
