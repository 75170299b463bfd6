"""The inputs of an engine that come from the host, and the outputs that it reads: page-locked memory there, from where
and to which they are copied."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.bundle.manifest import TensorSpec
from eagle_runtime.core.cache import ALIGNMENT
from eagle_runtime.trt.device import Device
from eagle_runtime.trt.execution import concrete
from eagle_runtime.trt.fixed_shapes import round_up

GAP = 1 << 12  # bytes between two inputs that are copied along rather than beginning another copy; chosen


class Inputs:
    """A place on the host and one on the GPU for every input. All are zero at first, which every input can be: padding
    rows that are never written must not be NaN."""

    def __init__(self, device: Device, specs: Mapping[str, TensorSpec], largest: Mapping[str, int]) -> None:
        """largest: sizes of the largest forward pass."""
        self._device = device
        self._specs = specs
        sizes = {name: nbytes_of(spec, largest) for name, spec in specs.items()}
        self._offsets: dict[str, int] = {}
        end = 0
        for name in sorted(specs, key=lambda name: sizes[name]):  # large ones last, of which often little is used
            self._offsets[name] = end
            end += round_up(sizes[name], ALIGNMENT)
        self._host = device.reserve_host(end)
        self._host[:] = 0
        self._place = device.reserve(end)
        self._written: dict[str, int] = {}  # name -> bytes
        device.driver.clear(self._place, end, device.stream)
        self.addresses = {name: self._place + offset for name, offset in self._offsets.items()}

    def out(self, name: str, sizes: Mapping[str, int]) -> npt.NDArray[Any]:
        """Returns the host's array of an input in a forward pass of these sizes, to be written; `send` copies it."""
        spec = self._specs[name]
        shape = concrete(spec.shape, sizes)
        start, dtype = self._offsets[name], np.dtype(spec.dtype)
        self._written[name] = math.prod(shape) * dtype.itemsize
        return self._host[start : start + self._written[name]].view(dtype).reshape(shape)

    def send(self) -> None:
        """Queue copies of what was written since the last call, which must not change until the stream is idle. Inputs
        that lie between two of these may be copied again."""
        pieces = [(self._offsets[name], self._offsets[name] + size) for name, size in self._written.items()]
        for start, end in merged(sorted(pieces)):
            self._device.driver.upload(
                self._place + start, self._host.ctypes.data + start, end - start, self._device.stream
            )
        self._written.clear()


def merged(pieces: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Returns ascending pieces (start, end) with those joined that are at most GAP apart."""
    joined: list[tuple[int, int]] = []
    for start, end in pieces:
        if joined and start - joined[-1][1] <= GAP:
            joined[-1] = joined[-1][0], end
        else:
            joined.append((start, end))
    return joined


def nbytes_of(spec: TensorSpec, sizes: Mapping[str, int]) -> int:
    """Returns the bytes of a tensor in a forward pass of these sizes."""
    return math.prod(concrete(spec.shape, sizes)) * np.dtype(spec.dtype).itemsize


class Outputs:
    """A place on the GPU and one on the host for every output that the host reads, next to each other, so that one copy
    brings them all. None has a symbolic size."""

    def __init__(self, device: Device, specs: Mapping[str, TensorSpec]) -> None:
        self._device, self._specs = device, specs
        self._offsets: dict[str, int] = {}
        end = 0
        for name, spec in specs.items():
            self._offsets[name], end = end, end + round_up(nbytes_of(spec, {}), ALIGNMENT)
        self._place, self._host = device.reserve(end), device.reserve_host(end)
        self.addresses = {name: self._place + offset for name, offset in self._offsets.items()}

    def read(self) -> dict[str, npt.NDArray[Any]]:
        """Returns the outputs on the host, by one copy and one wait. Ids are int64; the other arrays are valid until
        the next call."""
        driver, stream = self._device.driver, self._device.stream
        driver.download(self._host.ctypes.data, self._place, self._host.nbytes, stream)
        self._device.wait()
        return {name: self._array(name) for name in self._specs}

    def _array(self, name: str) -> npt.NDArray[Any]:
        spec, start = self._specs[name], self._offsets[name]
        flat = self._host[start : start + nbytes_of(spec, {})].view(spec.dtype)
        array: npt.NDArray[Any] = flat.reshape([int(size) for size in spec.shape])
        return array.astype(np.int64) if array.dtype.kind == "i" else array
