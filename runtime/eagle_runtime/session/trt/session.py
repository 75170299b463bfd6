"""Sessions of TensorRT for RTX and TensorRT: the engines of a bundle on this machine's GPU. Both libraries share the
code.

Key/value rows, features and hidden states stay on the GPU; token ids, masks and logits are copied. There are two kinds
of forward passes. *Steady*: past rows are padded to one of a few lengths, and new rows are written to a fixed place
and copied to the cache, so that shapes and addresses repeat and whole forward passes can be replayed as graphs.
*Exact*: no past row is padded, and new rows are written to the cache directly if their size allows it. Exact passes
serve weights that are streamed from the host, which graphs cannot hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.bundle.manifest import GraphSpec, Manifest, TensorSpec
from eagle_runtime.cache import ALIGNMENT
from eagle_runtime.errors import call_all
from eagle_runtime.machine.user_cache import cache_folder
from eagle_runtime.session.counters import Counters
from eagle_runtime.session.protocol import Array, Session
from eagle_runtime.session.trt.device import SLACK, Device, DeviceCache, DeviceRows, cache_rows, in_place, joined_rows
from eagle_runtime.session.trt.driver import CudaDriver
from eagle_runtime.session.trt.engine_file import EngineFolder, EngineSpec, find_engines
from eagle_runtime.session.trt.execution import Execution, concrete
from eagle_runtime.session.trt.library import load_library, record
from eagle_runtime.session.trt.memory import MARGIN, Needs, check_room, fit_streamed
from eagle_runtime.session.trt.padding import (
    HEAD_ROWS,
    TARGET_ROWS,
    PassShape,
    Steps,
    pass_shape,
    past_steps,
    round_up,
    rows_up_to,
    shapes_of,
    write_ids,
    write_mask,
)

KEPT = ("features", "hidden")  # outputs that stay on the GPU


def open_sessions(
    bundle: Path, manifest: Manifest, library: str, context: int, head_scratch: int
) -> tuple[TensorRTSession, ...]:
    """Returns the sessions of a bundle's target and, if it has one, of its head, on the GPU. manifest: the bundle's,
    with its hashes verified. library: "tensorrt-rtx" or "tensorrt". context: tokens of prompt and output; head_scratch:
    additional rows of the head's cache. Raises BackendError, BundleError."""
    trt = load_library(library)
    driver = CudaDriver()
    folder = find_engines(bundle, manifest, library, trt.__version__, driver.describe(), context, head_scratch)
    return start_sessions(trt, driver, folder, manifest, context, head_scratch)


def start_sessions(
    trt: Any,
    driver: CudaDriver,
    folder: EngineFolder,
    manifest: Manifest,
    context: int,
    head_scratch: int,
    steady: bool = True,
) -> tuple[TensorRTSession, ...]:
    """As open_sessions, with a given library, driver and engines. steady: the kind of forward passes of engines whose
    weights stay on the GPU; those with streamed weights always run exact passes."""
    engines, info = folder.engines, driver.describe()
    parts = [_Part(manifest.target.graph, engines.target, context, streamed=engines.weight_streaming)]
    if manifest.head is not None:
        assert engines.draft is not None, "the engines were checked against this manifest"
        parts.append(_Part(manifest.head.graph, engines.draft, context + head_scratch, streamed=False))
    needs = [part.needs for part in parts]
    check_room(needs, info, context)
    room = info.available - MARGIN - sum(one.weights + one.cache + one.buffers for one in needs)
    messages = record(trt)
    runtime = trt.Runtime(messages.logger)
    runtime.error_recorder = messages.recorder
    device = Device(driver, users=len(parts))
    try:
        executions = [
            Execution(trt, runtime, folder.folder / part.engine.file, part.graph, part.engine.profiles, messages)
            for part in parts
        ]
        nbytes = fit_streamed(executions, [part.streamed for part in parts], room)
        scratch = device.reserve(nbytes)  # shared, since the two never run at once
        sessions = []
        for part, execution in zip(parts, executions, strict=True):
            kernels = _kernel_file(part.engine, info.compute_capability)
            repeats = steady and not part.streamed
            execution.start(device, scratch, nbytes, repeats, kernels)
            sessions.append(TensorRTSession(device, execution, part.graph, part.engine, part.steps(repeats)))
    except BaseException:
        for _ in parts:
            device.release()
        raise
    return tuple(sessions)


def _kernel_file(engine: EngineSpec, compute_capability: str) -> Path | None:
    """Returns the file that keeps kernels compiled on this machine; None for a user without a home folder. It is not in
    the bundle, whose maker could put any code there: only files listed in the sidecar are run."""
    try:
        return cache_folder() / f"kernels-{engine.sha256[:24]}-{compute_capability}"
    except RuntimeError:
        return None


@dataclass(frozen=True, slots=True)
class _Part:
    """One graph with its engine. capacity: rows of its cache. streamed: whether its weights are streamed from the
    host."""

    graph: GraphSpec
    engine: EngineSpec
    capacity: int
    streamed: bool

    def steps(self, steady: bool) -> Steps:
        """Returns the sizes that forward passes are padded to."""
        largest, rows = _most(self.engine), HEAD_ROWS if "features" in self.graph.inputs else TARGET_ROWS
        past = past_steps(self.capacity) if steady else ()
        return Steps(rows_up_to(rows, largest["T"]), past, largest["R"])

    @property
    def needs(self) -> Needs:
        """The GPU memory that it takes, with the inputs and outputs of the largest forward pass."""
        graph, engine, largest = self.graph, self.engine, _most(self.engine)
        buffers = [spec for name, spec in {**graph.inputs, **graph.outputs}.items() if name not in graph.past]
        token = len(graph.past) * graph.kv_row_bytes
        return Needs(
            weights=0 if self.streamed else engine.size if engine.weights is None else engine.weights,
            cache=cache_rows(self.capacity) * token,
            token=token,
            buffers=sum(_nbytes(spec, largest) for spec in buffers),
            scratch=engine.scratch or 0,
        )


class TensorRTSession(Session):
    """A graph as an engine on the GPU (protocol.Session)."""

    def __init__(
        self, device: Device, execution: Execution, graph: GraphSpec, engine: EngineSpec, steps: Steps
    ) -> None:
        self._device = device
        self._execution: Execution | None = execution
        self._steps = steps
        gpu = device.driver.describe()
        self.facts = (gpu.name, gpu.compute_capability, engine.sha256, "steady" if steps.steady else "exact")
        self._past_names, self._new_names, self._row_bytes = graph.past, graph.present, graph.kv_row_bytes
        self.inputs: Mapping[str, TensorSpec] = {n: s for n, s in graph.inputs.items() if n not in self._past_names}
        self.outputs: Mapping[str, TensorSpec] = {n: s for n, s in graph.outputs.items() if n not in self._new_names}
        largest = _most(engine)
        self._in_place = not steps.steady and in_place(self._row_bytes)
        self._feeds = _Feeds(device, {n: s for n, s in self.inputs.items() if n != "features"}, largest)
        self._places = {n: device.reserve(_nbytes(s, largest)) for n, s in self.outputs.items()}
        self._host = {n: device.reserve_host(_nbytes(s, largest)) for n, s in self.outputs.items() if n not in KEPT}
        addresses = {**self._feeds.addresses, **self._places}
        if "features" in self.inputs:
            nbytes = _nbytes(self.inputs["features"], largest)
            self._features = addresses["features"] = device.reserve(nbytes)
            # Padding rows read what is here, which must not be NaN.
            device.driver.clear(self._features, nbytes, device.stream)
        self._new_pitch = round_up(largest["T"] * self._row_bytes, ALIGNMENT)
        self._new = device.reserve(len(self._new_names) * self._new_pitch)
        self._new_places = {name: self._new + index * self._new_pitch for index, name in enumerate(self._new_names)}
        addresses |= self._new_places
        for name, address in addresses.items():
            execution.bind(name, address)

    def new_cache(self, capacity: int) -> DeviceCache:
        return DeviceCache(self._device, len(self._past_names) // 2, capacity, self._row_bytes)

    def run(self, feeds: Mapping[str, Any], cache: DeviceCache) -> dict[str, Any]:
        execution = self._execution
        assert execution is not None, "the session is closed"
        rows, columns = feeds["tree_mask"].shape
        assert rows <= cache.room, "the caller checks the capacity before a forward pass"
        wanted = len(feeds["logit_rows"])
        shape = pass_shape(self._steps, rows, cache.length, columns, wanted)
        execution.check(shape)
        self._feeds.upload(feeds, cache.length, shape)
        if "features" in feeds:
            self._copy_features(feeds["features"])
        self._bind_past(cache)
        # An empty past is padded by rows that the engine reads while it writes the new ones.
        written = self._in_place and cache.length > 0 and shape["T"] - rows <= SLACK
        for index, name in enumerate(self._new_names):
            execution.bind(name, cache.address(index, cache.length) if written else self._new_places[name])
        execution.run(shape)
        if not written:
            cache.append(self._new, self._new_pitch, rows)
        results = self._results({"T": rows, "R": wanted})
        self._device.wait()
        return results

    def warm(self, cache: DeviceCache, report: Callable[[int, int], None]) -> None:
        assert self._execution is not None, "the session is closed"
        self._bind_past(cache)
        self._execution.specialise(shapes_of(self._steps), report)

    def joined(self, parts: Sequence[DeviceRows]) -> DeviceRows:
        return joined_rows(self._device, parts)

    def close(self) -> None:
        """As in protocol.Session. Raises the first BackendError of freeing, once all is freed."""
        if self._execution is not None:
            execution, self._execution = self._execution, None
            call_all([self._device.wait, execution.close, self._device.release])

    @property
    def capturable(self) -> bool | None:
        """As in Execution."""
        assert self._execution is not None, "the session is closed"
        return self._execution.capturable

    def counters(self) -> Counters:
        """As in CountedSession."""
        return self._device.driver.tally.now

    def _bind_past(self, cache: DeviceCache) -> None:
        assert self._execution is not None
        for index, name in enumerate(self._past_names):
            self._execution.bind(name, cache.address(index))

    def _copy_features(self, rows: DeviceRows | Array) -> None:
        """Copy features to where the engine reads them. Waits for rows on the host, whose memory the caller may
        reuse."""
        driver, stream = self._device.driver, self._device.stream
        if isinstance(rows, DeviceRows):
            driver.copy(self._features, rows.address, rows.nbytes, stream)
        else:
            assert rows.flags.c_contiguous and rows.dtype == self.inputs["features"].dtype
            driver.upload(self._features, rows.ctypes.data, rows.nbytes, stream)
            self._device.wait()

    def _results(self, sizes: Mapping[str, int]) -> dict[str, Any]:
        """Queue the downloads; returns every output without padding rows, which come last. sizes: T and R, unpadded."""
        results: dict[str, Any] = {}
        for name, spec in self.outputs.items():
            _, count, width = concrete(spec.shape, sizes)
            if name in KEPT:
                results[name] = DeviceRows(self._device, self._places[name], count, width, spec.dtype)
                continue
            host = self._host[name][: count * width * np.dtype(spec.dtype).itemsize]
            self._device.driver.download(host.ctypes.data, self._places[name], host.nbytes, self._device.stream)
            results[name] = host.view(spec.dtype).reshape(count, width)
        return results


class _Feeds:
    """The small inputs: a page-locked block on the host and one of the same layout on the GPU, with one copy per
    forward pass."""

    def __init__(self, device: Device, specs: Mapping[str, TensorSpec], largest: Mapping[str, int]) -> None:
        self._device = device
        self._specs = specs
        self._offsets: dict[str, int] = {}
        end = 0
        for name in sorted(specs, key=lambda name: name == "tree_mask"):  # the mask last, whose size changes
            self._offsets[name] = end
            end += round_up(_nbytes(specs[name], largest), ALIGNMENT)
        self._host = device.reserve_host(end)
        self._place = device.reserve(end)
        device.driver.clear(self._place, end, device.stream)  # what `warm` computes with: ids that exist, no mask
        self.addresses = {name: self._place + offset for name, offset in self._offsets.items()}

    def upload(self, feeds: Mapping[str, Any], past: int, shape: PassShape) -> None:
        """Write the padded inputs and queue their copy. The last forward pass is over, so its inputs can be
        overwritten. past: rows of the cache; shape: of the padded forward pass."""
        for name, spec in self._specs.items():
            sizes = concrete(spec.shape, shape.sizes)
            count = math.prod(sizes)
            start = self._offsets[name]
            end = start + count * np.dtype(spec.dtype).itemsize
            out: npt.NDArray[Any] = self._host[start:end].view(spec.dtype)
            if name == "tree_mask":
                write_mask(feeds[name], past, shape, out.reshape(sizes[2:]))
                last = end
            else:
                write_ids(feeds[name], out)
        self._device.driver.upload(self._place, self._host.ctypes.data, last, self._device.stream)


def _most(engine: EngineSpec) -> dict[str, int]:
    """Returns the largest size of each dimension in any profile."""
    limits = [profile.sizes for profile in engine.profiles]
    return {name: max(limit[name][-1] for limit in limits) for name in limits[0]}


def _nbytes(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    return math.prod(concrete(spec.shape, sizes)) * np.dtype(spec.dtype).itemsize
