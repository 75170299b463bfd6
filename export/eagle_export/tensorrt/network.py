"""Parses an ONNX graph with TensorRT, builds an engine from it, and reads its kernels from the log of the build.

An engine cannot be inspected without a GPU, but a build with ProfilingVerbosity.DETAILED logs the kernels it compiled,
one per line:

    Layers:
    Name: _gemm_mha_v2_myl0_7, LayerType: kgen, Inputs: [ {...} ], Constants: [], Outputs: [ {...} ], TacticName: ...

The list covers one compute capability, even when the engine holds several, and all optimization profiles in turn. Build
for one capability at a time to see the kernels of each.
"""

from __future__ import annotations

import concurrent.futures
import re
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from eagle_export.base.errors import ExportError
from eagle_runtime.trt.engine_file import Profile
from eagle_runtime.trt.library import Messages, recorder

Report = Callable[[str, int, int], None]  # (phase, steps done, steps in all)
_TITLE = "Layers:\n"
_LINE = re.compile(r"Name: (.+?), LayerType: (\w+), Inputs: (.*), Constants: (.*), Outputs: (.*), TacticName: ")
_PROFILE = re.compile(r"_myl(\d+)_\d+$")
_DATATYPE = re.compile(r"Datatype: (\w+)")
_NO_KERNEL = {"shape_call", "signal", "wait"}  # shape arithmetic on the host and synchronisation of streams


@dataclass(frozen=True, slots=True)
class BuildMessages(Messages):
    """Messages of a build. layers: the lists of compiled kernels, and memory: totals of memory, which it logs."""

    layers: list[str] = field(default_factory=list)
    memory: list[str] = field(default_factory=list)


def listen(trt: Any) -> BuildMessages:
    """Returns messages with a logger and an error recorder of this library."""
    errors: list[str] = []
    layers: list[str] = []
    memory: list[str] = []

    class Logger(trt.ILogger):  # type: ignore[misc]
        def log(self, severity: Any, message: str) -> None:
            if int(severity) <= int(trt.ILogger.Severity.ERROR):
                errors.append(message)
            elif message.startswith(_TITLE):
                layers.append(message)
            elif message.startswith("Total "):
                memory.append(message)

    return BuildMessages(Logger(), recorder(trt, errors), errors, layers, memory)


class Network:
    """A parsed graph. The parser owns the weights, so it lives as long as the network."""

    def __init__(self, trt: Any, model: Path, content: bytes | None = None) -> None:
        """Parse an ONNX file. content: of another one, with weights in files next to it; None reads the file. Raises
        ExportError naming a node that TensorRT does not support."""
        self.messages = listen(trt)
        self._trt = trt
        self._model = model
        self._builder = trt.Builder(self.messages.logger)
        self._network = self._builder.create_network(0)
        self._parser = parser = trt.OnnxParser(self._network, self.messages.logger)
        read = parser.parse_from_file(str(model)) if content is None else parser.parse(content, str(model))
        if not read:
            faults = [parser.get_error(index) for index in range(parser.num_errors)]
            at = f"node {faults[0].node_name()} ({faults[0].node_operator()}): {faults[0].desc()}" if faults else ""
            raise ExportError(f"{model} cannot be read by {trt.__name__} ({at or self.messages.cause})")

    def build(
        self,
        profiles: Sequence[Profile],
        capabilities: Sequence[str] = (),
        *,
        stream_weights: bool = False,
        timing: Path | None = None,
        report: Report = lambda phase, done, steps: None,
    ) -> Any:
        """Build one engine and return its bytes as a buffer.

        capabilities: the compute capabilities to compile for, such as "8.9", with TensorRT for RTX; none for the GPU
        present. timing: file of kernel timings (with a GPU), read if it exists, and then written. report: called from
        another thread. Raises ExportError; an interrupt stops the build before it is raised."""
        trt = self._trt
        self.messages.begin()
        self.messages.layers.clear()
        self.messages.memory.clear()
        config = self._builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.max_aux_streams = 0  # layers depend on each other, so further streams would only add waiting
        if capabilities:
            config.num_compute_capabilities = len(capabilities)
            for index, capability in enumerate(capabilities):
                config.set_compute_capability(capability_of(trt, capability), index)
        for profile in profiles:
            config.add_optimization_profile(self._profile(profile))
        if stream_weights:
            config.set_flag(trt.BuilderFlag.WEIGHT_STREAMING)
        if timing is not None:
            known = timing.read_bytes() if timing.is_file() else b""
            config.set_timing_cache(config.create_timing_cache(known), False)
        stop = threading.Event()
        config.progress_monitor = monitor = progress_monitor(trt, report, stop)
        engine = _interruptible(lambda: self._builder.build_serialized_network(self._network, config), stop)
        del monitor
        if engine is None:
            raise ExportError(f"{self._model} does not build in {trt.__name__}: {self.messages.cause}")
        if timing is not None:
            timing.write_bytes(memoryview(config.get_timing_cache().serialize()))
        return memoryview(engine)

    def _profile(self, wanted: Profile) -> Any:
        profile, limits = self._builder.create_optimization_profile(), wanted.sizes
        for tensor in (self._network.get_input(index) for index in range(self._network.num_inputs)):
            names = [tensor.get_dimension_name(axis) for axis in range(len(tensor.shape))]
            least, tuned, most = (
                tuple(limits[name][end] if size == -1 else size for name, size in zip(names, tensor.shape, strict=True))
                for end in range(3)
            )
            profile.set_shape(tensor.name, least, tuned, most)
        return profile


def capability_of(trt: Any, capability: str) -> Any:
    """Returns the library's value, SM89 for "8.9". Raises ExportError with those that it supports."""
    members = trt.ComputeCapability.__members__
    known = {name: value for name, value in members.items() if name.startswith("SM")}
    value = known.get(f"SM{capability.replace('.', '')}") if capability.count(".") == 1 else None
    if value is None:
        offered = ", ".join(f"{name[2:-1]}.{name[-1]}" for name in known)
        raise ExportError(f"{trt.__name__} does not compile for compute capability {capability}; choose from {offered}")
    return value


def progress_monitor(trt: Any, report: Report, stop: threading.Event) -> Any:
    """Returns a monitor that reports the current phase, and cancels the build at its next step once `stop` is set."""

    class Monitor(trt.IProgressMonitor):  # type: ignore[misc]
        def __init__(self) -> None:
            trt.IProgressMonitor.__init__(self)
            self._steps: dict[str, int] = {}

        def phase_start(self, phase: str, parent: str | None, steps: int) -> None:
            self._steps[phase] = steps
            report(phase, 0, steps)

        def step_complete(self, phase: str, step: int) -> bool:
            report(phase, step + 1, self._steps.get(phase, step + 1))
            return not stop.is_set()

        def phase_finish(self, phase: str) -> None:
            self._steps.pop(phase, None)

    return Monitor()


def _interruptible(work: Callable[[], Any], stop: threading.Event) -> Any:
    """Returns the result of `work`, run in another thread, since the main thread handles no signal while it is inside a
    library. An exception here, such as a signal's, sets `stop` and waits for `work` to end."""
    with concurrent.futures.ThreadPoolExecutor(1) as pool:
        future = pool.submit(work)
        try:
            while not future.done():
                concurrent.futures.wait([future], timeout=0.2)
        except BaseException:
            stop.set()
            raise
        return future.result()


@dataclass(frozen=True, slots=True)
class Kernel:
    """One kernel. name: TensorRT's, made from the operations it fused. kind: LayerType, such as gemm or kgen. profile:
    index of the optimization profile it serves.

    reads, holds, writes: types of its inputs, constants and outputs, by TensorRT's names (Half, Float, Int64, ...)."""

    name: str
    kind: str
    profile: int
    reads: frozenset[str]
    holds: frozenset[str]
    writes: frozenset[str]

    @property
    def is_fused_attention(self) -> bool:
        """Whether the kernel computes scores, mask, softmax and weighted sum without storing the score matrix."""
        return "_mha_" in self.name


def read_kernels(messages: Iterable[str]) -> list[Kernel]:
    """Returns the kernels listed in the messages of one build, in order. Raises ValueError unless there is exactly one
    list, so that a log of another format is not mistaken for an engine without attention."""
    lists = [message for message in messages if message.startswith(_TITLE)]
    if len(lists) != 1:
        raise ValueError(f"the build log holds {len(lists)} lists of kernels instead of one")
    lines = [line for line in lists[0].split("\n") if ", LayerType: " in line]
    kernels = []
    for line in lines:
        match = _LINE.match(line)
        if match is None:
            raise ValueError(f"the build log has a line of unknown format: {line[:80]}")
        name, kind, *types = match.groups()
        if kind not in _NO_KERNEL:
            profile = _PROFILE.search(name)
            if profile is None:
                raise ValueError(f"the build log has a kernel of unknown name: {name[:80]}")
            reads, holds, writes = (frozenset(_DATATYPE.findall(part)) for part in types)
            kernels.append(Kernel(name, kind, int(profile[1]), reads, holds, writes))
    return kernels
