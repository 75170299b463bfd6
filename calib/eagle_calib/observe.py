"""A Session that runs a graph as usual and records the inputs of its linear layers."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_calib.calibration import LEAST_ROWS, Float, Input, Observed, is_expert
from eagle_calib.errors import CalibrationError
from eagle_calib.graph import observable
from eagle_runtime.bundle.manifest import GraphSpec, TensorSpec
from eagle_runtime.core.cache import Cache
from eagle_runtime.core.session import Array, Session
from eagle_runtime.ort.session import AnyCache, OrtSession

SAMPLE_ROWS = 1024  # rows kept per tensor if nothing else is asked for
SEED = 0  # of the sampling
AT_ONCE = 1 << 24  # bytes that are read from a file at once
ADVICE = "check the checkpoint, or calibrate on other text"


class SampleFile:
    """Samples of many tensors in one file without a name, which is gone when the block ends, or the process: those of
    all layers of a model would take as much memory as the model. folder: on the disk that is used. On Windows the file
    has a name, and the folder can be removed only after it."""

    def __init__(self, folder: Path) -> None:
        self._file = tempfile.TemporaryFile(dir=folder, buffering=0)  # noqa: SIM115 (closed at the block's end)
        self._end = 0

    def __enter__(self) -> SampleFile:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def reserve(self, size: int) -> int:
        """Returns where the next `size` bytes begin. Bytes that are not written take no space."""
        start, self._end = self._end, self._end + size
        return start

    def write(self, start: int, rows: Array) -> None:
        """Writes an array's bytes. Raises OSError."""
        self._file.seek(start)
        content = np.ascontiguousarray(rows).reshape(-1).view(np.uint8).data
        while content:
            content = content[self._file.write(content) :]

    def read(self, start: int, shape: tuple[int, int], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
        """Returns an array that was written."""
        out = np.empty(shape, dtype)
        view = out.reshape(-1).view(np.uint8).data
        while view and (content := self._read_at(start, len(view))):
            view[: len(content)] = content
            start, view = start + len(content), view[len(content) :]
        return out

    def _read_at(self, start: int, size: int) -> bytes:
        if hasattr(os, "pread"):  # a copy of the process may read too: a place in the file would be that of both
            return os.pread(self._file.fileno(), min(size, AT_ONCE), start)
        self._file.seek(start)
        return self._file.read(size) or b""


class _Sample:
    """Rows [kept, K] of a tensor, in the memory or in a file."""

    def __init__(self, shape: tuple[int, int], dtype: Any, file: SampleFile | None) -> None:
        self.shape, self.dtype, self._file = shape, np.dtype(dtype), file
        self._array = np.zeros(shape, dtype) if file is None else None
        self._start = 0 if file is None else file.reserve(shape[0] * shape[1] * np.dtype(np.float32).itemsize)

    def put(self, place: int, rows: Array) -> None:
        """Writes rows from a place on."""
        if self._array is not None:
            self._array[place : place + len(rows)] = rows
        elif self._file is not None:
            self._file.write(self._start + place * self.shape[1] * self.dtype.itemsize, rows.astype(self.dtype))

    def first(self, count: int) -> npt.NDArray[np.floating[Any]]:
        """Returns a copy of the first rows."""
        if self._array is not None:
            return self._array[:count].copy()
        assert self._file is not None
        rows: npt.NDArray[np.floating[Any]] = self._file.read(self._start, (count, self.shape[1]), self.dtype)
        return rows

    def widen(self, count: int) -> None:
        """Goes on in fp32; `count` rows are there."""
        rows = self.first(count)
        self.dtype = np.dtype(np.float32)
        if self._array is not None:
            self._array = np.zeros(self.shape, np.float32)
        self.put(0, rows)


class InputStatistics:
    """Statistics of one tensor's rows [n, K], in memory of constant size."""

    def __init__(
        self, name: str, channels: int, kept: int = SAMPLE_ROWS, *, half: bool = False, file: SampleFile | None = None
    ) -> None:
        """name: what errors call the tensor. kept: the most rows in the sample. half: whether the sample is in fp16,
        unless a value is beyond its range. file: where the sample is kept, None for the memory."""
        self._name = name
        self._rows = 0
        self._channel_absmax = np.zeros(channels, np.float32)
        self._sample = _Sample((kept, channels), np.float16 if half else np.float32, file)
        self._rng = np.random.default_rng(SEED)

    @property
    def rows(self) -> int:
        """Rows so far."""
        return self._rows

    def add(self, rows: Float) -> None:
        """Adds rows [n, K]. Raises CalibrationError if a value is not finite."""
        largest = np.abs(rows).max(axis=0, initial=0)
        if not np.isfinite(largest).all():
            raise CalibrationError(f"{self._name} holds values that are not finite; {ADVICE}")
        np.maximum(self._channel_absmax, largest, out=self._channel_absmax)
        if largest.max(initial=0) > np.finfo(self._sample.dtype).max:
            self._sample.widen(min(self._rows, self._sample.shape[0]))
        self._draw(rows)
        self._rows += len(rows)

    def observed(self) -> Observed:
        """Returns the statistics of all rows so far. Raises CalibrationError if all of them are zero."""
        self.check()
        kept = min(self._rows, self._sample.shape[0])
        return Observed(self._rows, self._channel_absmax.copy(), self._sample.first(kept))

    def check(self) -> None:
        """Raises CalibrationError if all rows so far are zero."""
        if self._channel_absmax.max(initial=0) < np.finfo(np.float32).tiny:
            raise CalibrationError(f"{self._name} is zero throughout, so that it has no range; {ADVICE}")

    def _draw(self, rows: Float) -> None:
        """Reservoir sampling (Vitter's algorithm R): each row so far is in the sample with the same probability."""
        places = self._rows + np.arange(len(rows))
        kept = self._sample.shape[0]
        if len(rows) and places[-1] < kept:
            self._sample.put(self._rows, rows)
            return
        slots = np.where(places < kept, places, self._rng.integers(0, places + 1))
        for row in np.flatnonzero(slots < kept):
            self._sample.put(int(slots[row]), rows[row : row + 1])


class ExpertSession(OrtSession):
    """A session that also returns the inputs of experts, whose number of rows is known only when they are computed."""

    def run(self, feeds: Mapping[str, Any], cache: AnyCache) -> dict[str, Array]:
        results = super().run(feeds, cache)
        outputs = self._bound.binding.get_outputs()
        values = outputs[len(outputs) - len(self.outputs) :]  # as they were bound: new rows first
        for name, value in zip(self.outputs, values, strict=True):
            if results[name].size == 0:
                results[name] = value.numpy()[0]
        return results

    def _bind_output(self, name: str, sizes: Mapping[str, int]) -> Array:
        spec = self.outputs[name]
        if all(dim in sizes for dim in spec.shape if isinstance(dim, str)):
            return super()._bind_output(name, sizes)
        self._bound.binding.bind_output(name, "cpu")  # memory of the engine's own
        return np.empty(0, np.dtype(spec.dtype))


class ObservingSession(Session):
    """A Session of a bundle's graph that records the inputs of its linear layers. An expert's are the rows that are
    routed to it."""

    def __init__(self, path: Path, spec: GraphSpec, threads: int | None = None) -> None:
        """Raises CalibrationError for a graph that cannot be observed, and BackendError for one that cannot run."""
        graph = observable(path, spec)
        self._layers = graph.layers
        self._statistics = {
            tensor: InputStatistics(f"{path}: the input of {' and '.join(weights)}", channels)
            for tensor, (channels, weights) in graph.layers.items()
        }
        self._session: Session = ExpertSession(path, graph.spec, threads, graph.model)
        self.inputs: Mapping[str, TensorSpec] = self._session.inputs
        self.outputs: Mapping[str, TensorSpec] = {
            name: tensor for name, tensor in self._session.outputs.items() if name in spec.outputs
        }

    def new_cache(self, capacity: int) -> Cache:
        return self._session.new_cache(capacity)

    def run(self, feeds: Mapping[str, Any], cache: Cache) -> dict[str, Array]:
        results = self._session.run(feeds, cache)
        for tensor, statistics in self._statistics.items():
            values = results[tensor] if tensor in results else feeds[tensor]
            statistics.add(values.reshape(-1, values.shape[-1]).astype(np.float32, copy=False))
        return {name: results[name] for name in self.outputs}

    def observed(self) -> list[Input]:
        """Returns what was recorded so far, in the graph's order, without experts of fewer than LEAST_ROWS rows. Raises
        CalibrationError naming layers without a range."""
        return [
            Input(tensor, weights, self._statistics[tensor].observed())
            for tensor, (_, weights) in self._layers.items()
            if self._statistics[tensor].rows >= LEAST_ROWS or not is_expert(weights[0])
        ]

    def close(self) -> None:
        self._session.close()
