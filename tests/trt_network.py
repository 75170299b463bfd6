"""A graph as TensorRT-RTX reads and builds it, which needs no GPU."""

from __future__ import annotations

import platform
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from trt_kernels import Kernel, read_kernels

if sys.platform == "linux" and platform.machine() == "x86_64":
    import tensorrt_rtx as trt
else:  # not every platform has the wheel
    trt = pytest.importorskip("tensorrt_rtx")

CAPABILITIES = ("SM86", "SM89", "SM120")
# Smallest and largest size of each dynamic dimension. A head's mask also covers the scratch rows of earlier levels.
TARGET_SIZES = {"T": (1, 64), "P": (0, 448), "L": (1, 64), "R": (1, 64)}
DRAFT_SIZES = {"T": (1, 64), "P": (0, 448), "L": (1, 128)}


class BuildLog(trt.ILogger):  # type: ignore[misc]
    """Keeps what TensorRT says: (severity, message), most severe 0."""

    def __init__(self) -> None:
        super().__init__()
        self.messages: list[tuple[int, str]] = []

    def log(self, severity: Any, msg: str) -> None:
        self.messages.append((int(severity), msg))

    @property
    def errors(self) -> list[str]:
        return [message for severity, message in self.messages if severity <= int(trt.ILogger.Severity.ERROR)]


class Network:
    """A graph as TensorRT reads it. The parser owns the weights, so it lives as long as the network."""

    def __init__(self, model: Path, sizes: Mapping[str, tuple[int, int]]) -> None:
        self.log = BuildLog()
        self.builder = trt.Builder(self.log)
        self.network = self.builder.create_network(0)
        self.parser = trt.OnnxParser(self.network, self.log)
        self.sizes = sizes
        parsed = self.parser.parse_from_file(str(model))
        problems = [self.parser.get_error(i).desc() for i in range(self.parser.num_errors)]
        assert parsed and not problems and not self.log.errors, problems or self.log.errors

    def build(self, capability: str) -> list[Kernel]:
        """Build for one compute capability -> the kernels of the engine, none if there is no engine."""
        self.log.messages.clear()
        config = self.builder.create_builder_config()
        config.profiling_verbosity = trt.ProfilingVerbosity.DETAILED
        config.num_compute_capabilities = 1
        config.set_compute_capability(getattr(trt.ComputeCapability, capability), 0)
        assert config.add_optimization_profile(self._profile()) == 0
        engine = self.builder.build_serialized_network(self.network, config)
        if engine is None:
            return []
        assert engine.nbytes > 0 and not self.log.errors, self.log.errors
        return read_kernels(message for _, message in self.log.messages)

    def _profile(self) -> Any:
        """The optimum is the maximum: a tree is padded rather than tuned for half its size."""
        profile = self.builder.create_optimization_profile()
        for tensor in (self.network.get_input(i) for i in range(self.network.num_inputs)):
            names = [tensor.get_dimension_name(axis) for axis in range(len(tensor.shape))]
            low, high = (
                [self.sizes[name][end] if size == -1 else size for name, size in zip(names, tensor.shape, strict=True)]
                for end in (0, 1)
            )
            profile.set_shape(tensor.name, low, high, high)
        return profile
