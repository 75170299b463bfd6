"""A graph as TensorRT for RTX parses and builds it, which needs no GPU."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest

from eagle_export.base.errors import ExportError
from eagle_export.tensorrt import network
from eagle_export.tensorrt.network import Kernel, read_kernels
from eagle_runtime.trt.engine_file import Profile

if sys.platform == "linux" and platform.machine() == "x86_64":
    import tensorrt_rtx as trt
else:  # not every platform has the wheel
    trt = pytest.importorskip("tensorrt_rtx")

CAPABILITIES = ("8.6", "8.9", "12.0")
# Smallest and largest size of each dynamic dimension. A head's mask also covers the scratch rows of earlier levels.
TARGET_SIZES = {"T": (1, 64), "P": (0, 448), "L": (1, 64), "R": (1, 64)}
DRAFT_SIZES = {"T": (1, 64), "P": (0, 448), "L": (1, 128), "R": (1, 64)}


class Network:
    """A parsed graph, and the sizes that it is built for."""

    def __init__(self, model: Path, sizes: Mapping[str, tuple[int, int]]) -> None:
        self._network = network.Network(trt, model)
        assert not self.errors
        self._profile = Profile("tree", {name: (least, most, most) for name, (least, most) in sizes.items()})

    @property
    def errors(self) -> list[str]:
        """The errors of the last build, or of parsing the graph."""
        return self._network.messages.errors

    def build(self, capabilities: Sequence[str] = CAPABILITIES) -> list[Kernel]:
        """Build one engine for these compute capabilities. Returns its kernels, none if the build fails. An engine for
        several capabilities has one list of kernels, which are the same for all of them (test_tensorrt.py)."""
        try:
            engine = self._network.build([self._profile], capabilities)
        except ExportError:
            return []
        assert engine.nbytes > 0 and not self.errors, self.errors
        return read_kernels(self._network.messages.layers)
