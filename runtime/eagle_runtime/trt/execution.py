"""Runs one TensorRT engine: sets shapes, addresses and profiles, captures and replays graphs, keeps compiled kernels,
reports errors."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from eagle_runtime.base.errors import BackendError, BundleError, RequestError, call_all
from eagle_runtime.base.files import LARGEST, read_plain, replacing
from eagle_runtime.trt.device import Device
from eagle_runtime.trt.engine_file import EngineSpec
from eagle_runtime.trt.fixed_shapes import PassShape
from eagle_runtime.trt.library import Messages, release

SPARE_GRAPHS = 4  # captured graphs kept in addition to those of the shapes that were specialised; chosen


class Execution:
    """An engine in memory. `start` it before the first run."""

    def __init__(self, trt: Any, runtime: Any, path: Path, spec: EngineSpec, messages: Messages) -> None:
        """path: an engine whose sidecar, spec, was checked. runtime: the library's Runtime, which logs to `messages`.
        Raises BackendError if the engine does not load or was built from another graph."""
        self._trt = trt
        self._runtime = runtime  # must outlive its engines
        self.graph = spec
        self._profiles = spec.profiles
        self._messages = messages
        messages.begin()
        content = np.memmap(path, np.uint8, "r")  # mapped, to save a copy on the host
        self._engine: Any = runtime.deserialize_cuda_engine(content)
        if self._engine is None:
            raise self._failure(f"does not load from {path}")
        self._context: Any = None
        self._cache_file: Path | None = None
        self._runtime_cache: Any = None
        self._profile: int | None = None
        self._shapes: dict[str, tuple[int, ...]] = {}
        self._addresses: dict[str, int] = {}
        self._last: PassShape | None = None  # shape of the last forward pass that ran without a graph
        self._graphs: OrderedDict[PassShape, int | None] = OrderedDict()  # latest last; None cannot be captured
        self._room = SPARE_GRAPHS
        self._seen: set[PassShape] = set()  # whose kernels are compiled
        self._saved = b""  # content of the file of compiled kernels
        names = {self._engine.get_tensor_name(index) for index in range(self._engine.num_io_tensors)}
        if wrong := sorted(names ^ (spec.inputs.keys() | spec.outputs.keys())):
            self.close()
            raise BackendError(f"{spec.file} has other inputs or outputs than the graph ({wrong[0]}); build it again")

    def keep_on_gpu(self, nbytes: int) -> int:
        """Set how many bytes of streamed weights stay on the GPU, which changes the scratch memory; returns them, at
        most all."""
        kept = max(0, min(nbytes, int(self._engine.streamable_weights_size)))
        self._engine.weight_streaming_budget_v2 = kept
        return kept

    @property
    def scratch_bytes(self) -> int:
        """Bytes of scratch memory that running any profile takes."""
        return int(self._engine.device_memory_size_v2)

    def start(self, device: Device, scratch: int, nbytes: int, replayed: bool, cache_file: Path | None) -> None:
        """Create the execution context. scratch, nbytes: address and size of scratch memory, which other engines on the
        stream may share. replayed: whether graphs can hold forward passes; none can while weights are streamed.
        cache_file: where TensorRT for RTX keeps the kernels that it compiles; None for nowhere."""
        self._device = device
        trt, engine = self._trt, self._engine
        managed = trt.ExecutionContextAllocationStrategy.USER_MANAGED
        self._own_graphs = replayed and not hasattr(trt, "CudaGraphStrategy")
        if hasattr(trt, "CudaGraphStrategy"):  # TensorRT for RTX
            config = engine.create_runtime_config()
            config.set_execution_context_allocation_strategy(managed)
            graphs, kernels = trt.CudaGraphStrategy, trt.DynamicShapesKernelSpecializationStrategy
            config.cuda_graph_strategy = graphs.WHOLE_GRAPH_CAPTURE if replayed else graphs.DISABLED
            # This compiles a shape's kernels in its first forward pass, which waits for them; LAZY would run slower
            # ones until a thread in the background has compiled them.
            config.dynamic_shapes_kernel_specialization_strategy = kernels.EAGER
            self._cache_file = cache_file
            if cache_file is not None:
                self._runtime_cache, self._saved = _read_runtime_cache(config, cache_file)
            self._context = engine.create_execution_context(config)
        else:
            self._context = engine.create_execution_context(managed)
        if self._context is None:
            raise self._failure("cannot start")
        if nbytes:
            self._context.set_device_memory(scratch, nbytes)

    def bind(self, name: str, address: int) -> None:
        """Set the address of a tensor."""
        if self._addresses.get(name) == address:
            return
        self._drop_graphs()  # they hold the old address
        if not self._context.set_tensor_address(name, address):
            raise self._failure(f"does not take the address of {name}")
        self._addresses[name] = address

    def check(self, shape: PassShape) -> int:
        """Returns the index of the profile that serves a forward pass. Raises RequestError if there is none."""
        for index, profile in enumerate(self._profiles):
            if profile.serves(shape.sizes):
                return index
        widest = self._profiles[-1]
        raise RequestError(
            f"a forward pass of {_in_words(shape.sizes)} is more than {self.graph.file} serves "
            f"({_in_words({name: limit[-1] for name, limit in widest.sizes.items()})}); lower total_token or context"
        )

    def specialise(self, shapes: Sequence[PassShape], report: Callable[[int, int], None]) -> None:
        """Run a forward pass of every shape, so that all kernels are compiled and all graphs captured; what was
        compiled is saved, also when this is interrupted.

        Every tensor is bound, and inputs hold numbers that the graph can compute with; what is at the outputs'
        addresses is lost. report: called with the shapes done and all of them, after each. Raises BackendError,
        RequestError."""
        self._room = max(self._room, len(shapes) + SPARE_GRAPHS)
        try:
            for done, shape in enumerate(shapes, 1):
                self._queue_pass(shape)
                self._queue_pass(shape)  # as a graph
                self._device.wait()  # one shape's work at a time, so that what is reported is done
                report(done, len(shapes))
        finally:
            self._save_kernels()

    def run(self, shape: PassShape) -> None:
        """Queue one forward pass over the bound tensors. Kernels that are compiled for a new shape are saved at once.
        Raises BackendError, RequestError."""
        new = shape not in self._seen
        self._queue_pass(shape)
        if new:
            self._save_kernels()

    def _queue_pass(self, shape: PassShape) -> None:
        index = self.check(shape)
        self._messages.begin()
        if (graph := self._graphs.get(shape)) is not None:
            self._graphs.move_to_end(shape)
            self._launch(graph, shape)
            return
        if index != self._profile:
            try:
                self._context.set_optimization_profile_async(index, self._device.stream)
            except RuntimeError:  # instead of returning False
                raise self._failure("does not take its profile") from None
            self._shapes.clear()  # changing the profile resets them
            self._profile = index
        for name, tensor in self.graph.inputs.items():
            wanted = concrete(tensor.shape, shape.sizes)
            if self._shapes.get(name) != wanted:
                if not self._context.set_input_shape(name, wanted):
                    raise self._failure(f"does not take {name} of shape {list(wanted)}")
                self._shapes[name] = wanted
        if self._own_graphs and shape == self._last and shape not in self._graphs:
            # The library prepared this shape in the last forward pass: now it queues only kernels.
            graph = self._device.driver.capture(self._device.stream, self._queue)
            self._graphs[shape] = graph
            if len(self._graphs) > self._room:
                _, oldest = self._graphs.popitem(last=False)  # whose last use is longest ago
                if oldest is not None:
                    self._device.driver.destroy_graph(oldest)
            if graph is not None:
                self._launch(graph, shape)
                return
        self._last = shape
        self._count(shape)
        if not self._queue():
            raise self._failure("failed")
        self._seen.add(shape)

    @property
    def capturable(self) -> bool | None:
        """Whether forward passes of the shape and profile set last can be captured as graphs; None where the library
        does not tell."""
        ask = getattr(self._context, "is_stream_capturable", None)
        return None if ask is None else bool(self._context.is_stream_capturable(self._device.stream))

    def close(self) -> None:
        """Free the engine. The stream must be idle. Raises BackendError once that is done, if a graph could not be
        destroyed."""
        if self._engine is None:
            return
        release(self._context, self._engine, self._runtime)
        try:
            self._drop_graphs()
        finally:
            self._context = self._runtime_cache = self._engine = None

    def _save_kernels(self) -> None:
        """Write the compiled kernels if they are other than those in the file. Ignores a folder that cannot be
        written, which only makes the next start slower."""
        if self._runtime_cache is None or self._cache_file is None:
            return
        with contextlib.suppress(OSError, TypeError):  # a read-only folder; nothing to serialise
            content = bytes(memoryview(self._runtime_cache.serialize()))
            if content != self._saved:
                self._cache_file.parent.mkdir(parents=True, exist_ok=True)
                with replacing(self._cache_file) as new:
                    new.write_bytes(content)
                self._saved = content

    def _drop_graphs(self) -> None:
        graphs = [graph for graph in self._graphs.values() if graph is not None]
        self._graphs.clear()
        self._last = None
        call_all(partial(self._device.driver.destroy_graph, graph) for graph in graphs)

    def _launch(self, graph: int, shape: PassShape) -> None:
        self._count(shape)
        self._device.driver.launch(graph, self._device.stream)

    def _count(self, shape: PassShape) -> None:
        self._device.driver.tally.engine_call((self.graph.file, shape))

    def _queue(self) -> bool:
        return bool(self._context.execute_async_v3(self._device.stream))

    def _failure(self, action: str) -> BackendError:
        """Returns the error for a failed action ("does not load ..."), with the cause that TensorRT gives."""
        return BackendError(f"{self.graph.file} {action} ({self._messages.cause}); build it again, or free GPU memory")


def _in_words(sizes: Mapping[str, int]) -> str:
    words = {"T": "{} rows", "R": "{} of them with logits", "P": "after {} others"}
    return ", ".join(text.format(sizes[name]) for name, text in words.items() if name in sizes)


def concrete(shape: Sequence[int | str], sizes: Mapping[str, int]) -> tuple[int, ...]:
    """Returns a graph's shape with sizes in place of its symbolic dimensions."""
    return tuple(sizes[size] if isinstance(size, str) else size for size in shape)


def _read_runtime_cache(config: Any, path: Path) -> tuple[Any, bytes]:
    """Returns the kernels compiled by earlier runs, empty if the file is missing, damaged or from another machine, and
    the bytes they were read from; None if the library takes no cache."""
    cache = config.create_runtime_cache()
    try:
        content = read_plain(path, LARGEST)
    except (OSError, BundleError):
        content = b""
    if content and not cache.deserialize(content):
        cache.reset()
        content = b""
    return (cache if config.set_runtime_cache(cache) else None), content
