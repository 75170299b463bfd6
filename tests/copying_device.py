"""A device for eagle_runtime.ort whose memory is the host's and which copies as ONNX Runtime does for a GPU.

An input on the host is copied within bind_input (core/session/IOBinding.cc: CopyOneInputAcrossDevices), so that what is
written to its buffer afterwards is not seen. An output on the host is written at the end of a forward pass. What is in
the device's own memory is read and written where it is. Everything else is ONNX Runtime's own, on its CPU provider.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.ort.buffers import OrtMemory
from eagle_runtime.ort.device_session import OrtDeviceSession
from eagle_runtime.ort.library import open_graph

DEVICE = "copying"


class CopyingMemory(OrtMemory):
    """Memory of the device."""

    def __init__(self) -> None:
        super().__init__(DEVICE)

    def open(self, graph: Callable[[], bytes]) -> Any:
        return CopyingSession(super().open(graph))


class CopyingSession:
    """An InferenceSession on the device."""

    def __init__(self, session: Any) -> None:
        self._session = session
        self.get_inputs, self.get_outputs = session.get_inputs, session.get_outputs

    def io_binding(self) -> CopyingBinding:
        return CopyingBinding(self._session.io_binding())

    def run_with_iobinding(self, binding: CopyingBinding) -> None:
        self._session.run_with_iobinding(binding.real)
        for target, source in binding.downloads.values():
            ctypes.memmove(target, source.ctypes.data, source.nbytes)


class CopyingBinding:
    """An IOBinding of such a session. real: ONNX Runtime's, with host tensors in their places on the device; downloads:
    outputs on the host, with their places on the device."""

    def __init__(self, real: Any) -> None:
        self.real = real
        self.downloads: dict[str, tuple[int, npt.NDArray[Any]]] = {}
        self._copies: dict[str, npt.NDArray[Any]] = {}

    def bind_input(self, name: str, device: str, index: int, kind: Any, shape: Any, address: int) -> None:
        if device == "cpu":
            copy = np.empty(shape, kind)
            ctypes.memmove(copy.ctypes.data, address, copy.nbytes)
            self._copies[name], address = copy, copy.ctypes.data
        else:
            assert device == DEVICE, device
        self.real.bind_input(name, "cpu", index, kind, tuple(shape), address)

    def bind_output(
        self, name: str, device: str, index: int = 0, kind: Any = None, shape: Any = None, address: int = 0
    ) -> None:
        self.downloads.pop(name, None)
        if kind is None:
            assert device == DEVICE, device
            self.real.bind_output(name, "cpu")
            return
        if device == "cpu":
            place = np.empty(shape, kind)
            self.downloads[name], address = (address, place), place.ctypes.data
        else:
            assert device == DEVICE, device
        self.real.bind_output(name, "cpu", index, kind, tuple(shape), address)

    def get_outputs(self) -> Any:
        return self.real.get_outputs()


def copying_sessions(bundle: Path) -> tuple[OrtDeviceSession, ...]:
    """Returns the sessions of a bundle's target and head on the device."""
    memory = CopyingMemory()
    graphs = [model.graph for model in read_manifest(bundle).models.values()]
    return tuple(
        OrtDeviceSession(CopyingSession(open_graph(bundle / graph.file, threads=1)), bundle / graph.file, graph, memory)
        for graph in graphs
    )
