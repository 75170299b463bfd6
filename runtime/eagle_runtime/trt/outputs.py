"""The outputs of an engine that the host reads: they lie next to each other, so that one copy brings them all."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.bundle.manifest import TensorSpec
from eagle_runtime.core.cache import ALIGNMENT
from eagle_runtime.trt.device import Device
from eagle_runtime.trt.fixed_shapes import round_up
from eagle_runtime.trt.inputs import nbytes_of


class Outputs:
    """A place on the GPU and one on the host for every output. None has a symbolic size."""

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
