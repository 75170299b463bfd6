"""A graph as TensorRT-RTX reads and builds it for one compute capability, which needs no GPU."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from pathlib import Path

import pytest

from eagle_export.errors import ExportError
from eagle_export.tensorrt import network
from eagle_export.tensorrt.kernels import Kernel, read_kernels
from eagle_runtime.session.trt.engine_file import Profile

if sys.platform == "linux" and platform.machine() == "x86_64":
    import tensorrt_rtx as trt
else:  # not every platform has the wheel
    trt = pytest.importorskip("tensorrt_rtx")

CAPABILITIES = ("8.6", "8.9", "12.0")
# Smallest and largest size of each dynamic dimension. A head's mask also covers the scratch rows of earlier levels.
TARGET_SIZES = {"T": (1, 64), "P": (0, 448), "L": (1, 64), "R": (1, 64)}
DRAFT_SIZES = {"T": (1, 64), "P": (0, 448), "L": (1, 128), "R": (1, 64)}


class Network:
    """A parsed graph and the sizes it is built for."""

    def __init__(self, model: Path, sizes: Mapping[str, tuple[int, int]]) -> None:
        self._network = network.Network(trt, model)
        assert not self.errors
        limits = (tuple(sizes[name][end] for end in (0, 1, 1)) if name in sizes else () for name in "TPLR")
        self._profile = Profile("tree", *limits)

    @property
    def errors(self) -> list[str]:
        """What TensorRT complained of, in the last build or in reading the graph."""
        return self._network.messages.errors

    def build(self, capability: str) -> list[Kernel]:
        """Build for one compute capability -> the kernels of the engine, none if there is no engine."""
        try:
            engine = self._network.build([self._profile], [capability])
        except ExportError:
            return []
        assert engine.nbytes > 0 and not self.errors, self.errors
        return read_kernels(self._network.messages.layers)
