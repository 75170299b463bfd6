"""The memory of builds and of the engines they make: what a build takes is checked before it begins, what an engine
takes is read from the build's log."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from eagle_export.base.errors import ExportError
from eagle_runtime.machine.host import free_memory

# Memory of a build per byte of a graph's weights, with TensorRT for RTX 1.7.1 and two profiles: 3.9 was measured for an
# fp16 graph of 0.26 GB, 3.1 for one of 2 GB, and what the process holds before.
PER_BYTE_OF_WEIGHTS = 4.0
PROCESS_BYTES = 200_000_000
_LINE = re.compile(r"Total (Activation|Weights) Memory: (\d+) bytes")


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """Bytes of GPU memory of an engine: its weights, and the scratch memory of its largest profile. None where the
    library does not report them."""

    weights: int | None
    scratch: int | None


def read_memory(messages: Iterable[str]) -> EngineMemory:
    """Returns the memory of an engine from the lines that its build logged."""
    logged: dict[str, list[int]] = {"Activation": [], "Weights": []}
    for match in filter(None, map(_LINE.search, messages)):
        logged[match[1]].append(int(match[2]))
    return EngineMemory(max(logged["Weights"], default=None), max(logged["Activation"], default=None))


def check_memory(graph: Path) -> None:
    """Raises ExportError if the machine has less free memory than building an engine of this ONNX graph takes."""
    weights = sum(path.stat().st_size for path in graph.parent.iterdir() if path.is_file())
    needed, free = int(PER_BYTE_OF_WEIGHTS * weights) + PROCESS_BYTES, free_memory()
    if free is not None and needed > free:
        raise ExportError(
            f"building the engine of {graph} takes about {needed / 1e9:.1f} GB of memory "
            f"({PER_BYTE_OF_WEIGHTS:g} times its {weights / 1e9:.2f} GB of weights), but {free / 1e9:.1f} GB are free; "
            "end other programs, export in int8 or int4, or build on a machine with more memory (tensorrt-rtx needs no "
            "GPU there)"
        )
