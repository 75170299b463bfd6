"""Opens the engines of a bundle on this machine's GPU, with TensorRT for RTX or TensorRT, which share the code.

Key/value rows, features, hidden states and logits stay on the GPU. What crosses the bus in a cycle: embeddings, masks
and positions up, a pool of drafted candidates and the likeliest tokens of every row down. Shapes and addresses repeat,
so that forward passes are replayed as graphs, except where weights are streamed from the host, which no graph can hold.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.bundle.manifest import GraphSpec, Manifest
from eagle_runtime.machine.user_cache import cache_folder
from eagle_runtime.trt.block_session import BlockSession
from eagle_runtime.trt.device import Device, cache_rows
from eagle_runtime.trt.draft_session import DraftSession
from eagle_runtime.trt.driver import CudaDriver
from eagle_runtime.trt.engine_file import EngineFolder, EngineSpec, find_engines
from eagle_runtime.trt.engine_session import Opened
from eagle_runtime.trt.execution import Execution
from eagle_runtime.trt.fixed_shapes import HEAD_ROWS, TARGET_ROWS, Steps, past_steps, rows_up_to
from eagle_runtime.trt.inputs import nbytes_of
from eagle_runtime.trt.library import load_library, record
from eagle_runtime.trt.memory_budget import MARGIN, Needs, check_room, fit_streamed
from eagle_runtime.trt.target_session import RowKeeper, TargetSession

Sessions = tuple[TargetSession] | tuple[TargetSession, DraftSession | BlockSession]


def open_sessions(bundle: Path, manifest: Manifest, library: str, context: int) -> Sessions:
    """Returns the sessions of a bundle's target and, if it has one, of its head, on the GPU. manifest: the bundle's,
    with its hashes verified. library: "tensorrt-rtx" or "tensorrt". context: tokens of prompt and output. Raises
    BackendError, BundleError."""
    trt = load_library(library)
    driver = CudaDriver()
    folder = find_engines(bundle, manifest, library, trt.__version__, driver.describe(), context)
    return start_sessions(trt, driver, folder, manifest, context)


def start_sessions(trt: Any, driver: CudaDriver, folder: EngineFolder, manifest: Manifest, context: int) -> Sessions:
    """As open_sessions, with a given library, driver and engines."""
    engines, info = folder.engines, driver.describe()
    graphs = {name: model.graph for name, model in manifest.models.items()}
    parts = {
        name: _Part(spec, graphs.get(name), context, streamed=engines.weight_streaming and name == "target")
        for name, spec in engines.specs.items()
    }
    needs = [part.needs for part in parts.values()]
    check_room(needs, info, context)
    room = info.available - MARGIN - sum(one.weights + one.cache + one.buffers for one in needs)
    messages = record(trt)
    runtime = trt.Runtime(messages.logger)
    runtime.error_recorder = messages.recorder
    device = Device(driver, users=len(graphs))
    with contextlib.ExitStack() as freed:  # if anything raises: the engines first, once the stream is idle
        for _ in graphs:
            freed.callback(device.release)
        executions: dict[str, Execution] = {}
        for name, part in parts.items():
            executions[name] = Execution(trt, runtime, folder.folder / part.engine.file, part.engine, messages)
            freed.callback(executions[name].close)
        freed.callback(device.wait)
        nbytes = fit_streamed([*executions.values()], [part.streamed for part in parts.values()], room)
        scratch = device.reserve(nbytes)  # shared, since no two run at once
        for name, part in parts.items():
            kernels = _kernel_file(part.engine, info.compute_capability)
            executions[name].start(device, scratch, nbytes, not part.streamed, kernels)
        keeper = RowKeeper(device, executions["keep"]) if "keep" in executions else None
        opened, tables = {}, {}
        for name, graph in graphs.items():
            part, tables[name] = parts[name], _tables(folder, parts[name].engine)
            opened[name] = Opened(executions[name], graph, part.largest, part.steps, tables[name]["embedding"])
        sessions: Sessions = (TargetSession(device, opened["target"], keeper),)
        if "draft" in opened and manifest.head is not None and manifest.head.form.block:
            sessions = *sessions, BlockSession(device, opened["draft"])
        elif "draft" in opened:
            sessions = *sessions, DraftSession(device, opened["draft"], tables["draft"].get("known"))
        freed.pop_all()
    return sessions


def _tables(folder: EngineFolder, engine: EngineSpec) -> Mapping[str, npt.NDArray[Any]]:
    """Returns an engine's tables, memory-mapped. Their hashes were verified."""
    tables = engine.tables.items()
    return {name: np.memmap(folder.folder / one.file, one.dtype, "r", shape=one.shape) for name, one in tables}


def _kernel_file(engine: EngineSpec, compute_capability: str) -> Path | None:
    """Returns the file that keeps kernels compiled on this machine; None for a user without a home folder. It is not in
    the bundle, whose maker could put any code there: only files listed in the sidecar are run."""
    try:
        return cache_folder() / f"kernels-{engine.sha256[:24]}-{compute_capability}"
    except RuntimeError:
        return None


@dataclass(frozen=True, slots=True)
class _Part:
    """An engine, with the graph of the bundle that it was made of, None for one that has no cache. context: rows of
    its cache. streamed: whether its weights are streamed from the host."""

    engine: EngineSpec
    graph: GraphSpec | None
    context: int
    streamed: bool

    @property
    def largest(self) -> dict[str, int]:
        """The largest size of each dimension in any profile."""
        limits = [profile.sizes for profile in self.engine.profiles]
        return {name: max(limit[name][-1] for limit in limits) for name in limits[0]}

    @property
    def steps(self) -> Steps:
        """The sizes that forward passes are padded to."""
        largest = self.largest
        rows = TARGET_ROWS if "R" in largest else HEAD_ROWS
        padded = rows_up_to(rows, largest["T"]) if "T" in largest else ()
        return Steps(padded, past_steps(self.context), largest.get("R", 0))

    @property
    def needs(self) -> Needs:
        """The GPU memory that it takes, with the inputs and outputs of the largest forward pass."""
        graph, engine, largest = self.graph, self.engine, self.largest
        past = () if graph is None else graph.past
        token = 0 if graph is None else len(past) * graph.kv_row_bytes
        tensors = {**engine.inputs, **engine.outputs}
        return Needs(
            weights=0 if self.streamed else engine.size if engine.weights is None else engine.weights,
            cache=cache_rows(self.context) * token,
            token=token,
            buffers=sum(nbytes_of(spec, largest) for name, spec in tensors.items() if name not in past),
            scratch=engine.scratch or 0,
        )
