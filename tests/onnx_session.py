"""Graphs that a test made, opened as the runtime opens its own: byte products are exact on every processor."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import onnx_ir as ir

from eagle_runtime.ort.library import CPU, byte_products_saturate, open_graph
from eagle_runtime.ort.session import EXACT_BYTES


def open_model(model: ir.Model | Path, threads: int = 1) -> Any:
    """Returns an InferenceSession on the CPU of a model in memory, or of a file with its weights next to it."""
    config = {EXACT_BYTES: "1"} if byte_products_saturate() else {}
    if isinstance(model, Path):
        return open_graph(model, CPU, threads, config=config)
    return open_graph(Path("test graph"), CPU, threads, ir.to_proto(model).SerializeToString(), config)
