"""The graphs that a bundle's engines are built from, and the tables that the runtime looks up on the host."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnx_ir as ir

from eagle_export.graphs.weights import tensor_spec
from eagle_export.recipes.graph import Array, size_of
from eagle_export.recipes.vocabulary import known_tokens
from eagle_export.tensorrt.compose import dtype_of, end_of, table_of
from eagle_export.tensorrt.draft_graph import block_graph, draft_graph
from eagle_export.tensorrt.target_graph import keep_graph, target_graph
from eagle_runtime.base.files import file_sha256
from eagle_runtime.bundle.graph import TensorSpec, past_names
from eagle_runtime.bundle.manifest import Manifest
from eagle_runtime.trt.engine_file import TableSpec

ROWS_AT_ONCE = 4096  # of a table that is written


@dataclass(frozen=True, slots=True)
class EngineGraph:
    """content: an ONNX file whose weights are in files next to `source`, a graph of the bundle. inputs, outputs: the
    graph's. layers: decoder layers. tables: name -> array, memory-mapped where it is large."""

    name: str
    content: bytes
    source: Path
    inputs: dict[str, TensorSpec]
    outputs: dict[str, TensorSpec]
    layers: int
    tables: dict[str, Array]


def engine_graphs(bundle: Path, manifest: Manifest, rows: int) -> Iterator[EngineGraph]:
    """Yields the graphs of the target, of the head if there is one, and of the gathering of accepted rows. rows: of the
    target's largest forward pass. Raises ExportError."""
    target = manifest.target
    source = bundle / target.graph.file
    graph = ir.load(source).graph
    yield _engine_graph("target", target_graph(source), source, target.num_layers, {"embedding": _embedding(graph)})
    if manifest.head is None:
        return
    defaults, head = manifest.tree_defaults, bundle / manifest.head.graph.file
    head_graph = ir.load(head).graph
    tables = {"embedding": _embedding(head_graph)}
    if manifest.head.block is not None:
        model = block_graph(head, manifest.head.block)
    else:
        if (known := known_tokens(head_graph)) is not None:
            tables["known"] = known
        depth, top_k = max(1, defaults.depth), min(defaults.draft_top_k, manifest.head.top_k)
        model = draft_graph(head, depth, top_k)
    yield _engine_graph("draft", model, head, manifest.head.num_layers, tables)
    past = past_names(target.num_layers)
    keys, features = end_of(graph, past[0]), end_of(graph, "features")
    width = size_of(keys, 2) * size_of(keys, 3)
    keep = keep_graph(len(past), rows, width, size_of(features, 2), dtype_of(graph))
    yield _engine_graph("keep", keep, source, 0, {})


def files_of(bundle: Path, manifest: Manifest, graph: EngineGraph) -> dict[str, str]:
    """Returns the bundle's files that the graph was made of -> SHA-256; none for a graph without weights."""
    folder = graph.source.parent.relative_to(bundle)
    return {file: digest for file, digest in manifest.files.items() if graph.layers and Path(file).parent == folder}


def write_tables(graph: EngineGraph, folder: Path) -> dict[str, TableSpec]:
    """Write the tables of a graph to a folder; one that is there already is not written again."""
    return {name: _written(f"{graph.name}-{name}.table", table, folder) for name, table in graph.tables.items()}


def _written(file: str, table: Array, folder: Path) -> TableSpec:
    path = folder / file
    with path.open("wb") as out:
        for start in range(0, len(table), ROWS_AT_ONCE):
            out.write(np.ascontiguousarray(table[start : start + ROWS_AT_ONCE]).tobytes())
    digest, size = file_sha256(path), path.stat().st_size
    for other in sorted(folder.glob("*.table")):
        if other != path and other.stat().st_size == size and file_sha256(other) == digest:
            path.unlink()
            path = other
            break
    return TableSpec(path.name, digest, size, table.dtype.name, tuple(map(int, table.shape)))


def _engine_graph(name: str, model: ir.Model, source: Path, layers: int, tables: dict[str, Array]) -> EngineGraph:
    content = ir.to_proto(model).SerializeToString()
    ends = model.graph.inputs, model.graph.outputs
    inputs, outputs = ({str(value.name): tensor_spec(value) for value in values} for values in ends)
    return EngineGraph(name, content, source, inputs, outputs, layers, tables)


def _embedding(graph: ir.Graph) -> Array:
    tensor = table_of(graph).const_value
    assert tensor is not None
    table: Array = tensor.numpy()
    return table
