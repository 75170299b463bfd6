"""The three ONNX graphs that allocate, select and move rows in device memory, as the bytes of ONNX files. Rows are
moved as words of four bytes, whatever their type."""

from __future__ import annotations

from eagle_runtime.session.ort.onnx_bytes import FLOAT, INT64, model, node


def allocate() -> bytes:
    """Returns a graph: shape [1] int64 -> words, zeros of that shape, in memory that the engine allocates."""
    return model([node("ConstantOfShape", ["shape"], "words")], {"shape": (INT64, 1)}, {"words": (FLOAT, 1)})


def pick() -> bytes:
    """Returns a graph: rows [n, W], index [m] int64 -> picked [m, W]."""
    gather = node("Gather", ["rows", "index"], "picked", axis=0)
    return model([gather], {"rows": (FLOAT, 2), "index": (INT64, 1)}, {"picked": (FLOAT, 2)})


def move() -> bytes:
    """Returns a graph: cache [A, n, W], index [m] int64, places [A, m, 2] int64 -> committed [A, n, W], the cache with
    cache[:, index] written at places. With committed bound to the address of the cache it works in place, since all
    rows are read before one is written."""
    nodes = [
        node("Gather", ["cache", "index"], "picked", axis=1),
        node("ScatterND", ["cache", "places", "picked"], "committed"),
    ]
    inputs = {"cache": (FLOAT, 3), "index": (INT64, 1), "places": (INT64, 3)}
    return model(nodes, inputs, {"committed": (FLOAT, 3)})
