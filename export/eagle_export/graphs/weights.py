"""Attaches a checkpoint's tensors to the initializers of a traced graph; they are read one by one as the file is
written."""

from __future__ import annotations

import math
import os
import tempfile
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import ml_dtypes  # noqa: F401  (adds the 16-bit types that onnx_ir writes to NumPy)
import numpy as np
import onnx_ir as ir
import torch

from eagle_export.base.data_file import Report, external, pointing_to, write
from eagle_export.base.errors import ExportError
from eagle_export.base.parted import Array, Part, PartedTensor, transposed
from eagle_export.graphs.trace import is_fake
from eagle_export.reading.stored_tensors import StoredTensor
from eagle_runtime.bundle.manifest import GraphSpec, TensorSpec

DATA_SUFFIX = ".data"


@dataclass(frozen=True, slots=True)
class Weight:
    """The tensor that holds an initializer's values, and the initializer's name, one in both graphs of a bundle."""

    name: str
    source: StoredTensor


def attach(model: ir.Model, weights: Mapping[str, Weight]) -> None:
    """Replaces fake initializers by lazy tensors. weights: by parameter name. Raises ExportError if one is missing."""
    graph = model.graph
    for name, value in list(graph.initializers.items()):
        if name not in weights:
            if is_fake(value):
                raise ExportError(f"no tensor of the checkpoints belongs to parameter {name!r}; report this as a bug")
            continue
        weight = weights[name]
        assert value.shape is not None and value.dtype is not None
        shape = value.shape.numpy()
        assert shape == weight.source.shape, weight  # checked before the trace
        _set_lazy(value, PartedTensor(_reader(weight.source, value.dtype), 0, value.dtype, shape, weight.name))
        if weight.name == name:
            continue
        graph.initializers.pop(name)
        if weight.name in graph.initializers:  # tied: a weight with two parameter names is stored once
            ir.convenience.replace_all_uses_with(value, graph.initializers[weight.name])
            continue
        value.name = weight.name
        graph.register_initializer(value)


def store_transposed(model: ir.Model) -> None:
    """Removes transpositions of weights, which are written transposed."""
    for node in list(model.graph):
        value = node.inputs[0] if node.op_type == "Transpose" else None
        source = None if value is None else value.const_value
        if value is None or not isinstance(source, PartedTensor) or len(value.uses()) > 1:
            continue  # a tied embedding is also read by a Gather: it is stored once, not transposed
        _set_lazy(value, transposed(source))
        ir.convenience.replace_all_uses_with(node.outputs[0], value)
        model.graph.remove(node, safe=True)


def save(model: ir.Model, path: Path, report: Report = lambda name, done: None, kept: Path | None = None) -> str:
    """Writes the graph and its weights (path + ".data"), with one tensor in memory at a time. Returns the SHA-256 of
    the weights.

    report: called before each tensor. kept: a folder for the weights, in which those that an earlier run finished are
    not computed again; the file gets its place by a second name. Raises ExportError for values that are not finite."""
    data = path.with_name(path.name + DATA_SUFFIX)
    values = external(model)
    with tempfile.TemporaryDirectory(dir=path.parent) if kept is None else nullcontext(kept) as folder:
        stem = Path(folder) / path.parent.name
        stored = stem.with_suffix(DATA_SUFFIX)
        digest = write(values, stored, stem.with_suffix(".journal"), report)
        try:
            os.link(stored, data)
        except OSError:  # the file system has no second names
            stored.rename(data)
    try:
        with pointing_to(values, data):
            ir.save(model, path)
    except ir.serde.SerdeError as error:  # small weights are read by the graph's writer, which wraps our error
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, ExportError):
                raise cause from None
            cause = cause.__cause__
        raise
    return digest


def save_over(model: ir.Model, written: ir.Model, path: Path, other: str) -> None:
    """Writes a graph whose large weights are, by name, those of a graph that `save` wrote next to it as `other`."""
    values = external(written)
    with pointing_to(values, path.with_name(PurePosixPath(other).name + DATA_SUFFIX)):
        for value in values:
            if (mine := model.graph.initializers.get(str(value.name))) is not None:
                mine.const_value = value.const_value
        store_lines(model)
        ir.save(model, path)


def store_lines(model: ir.Model) -> None:
    """Removes reshapes of weights in a file to [first dimension, the rest]: the same bytes are a second initializer, of
    that shape. ONNX Runtime would compute it when it opens the graph, and keep the copy."""
    for node in list(model.graph):
        weight, shape = (node.inputs[0], node.inputs[1]) if node.op_type == "Reshape" else (None, None)
        if weight is None or shape is None or shape.const_value is None:
            continue
        stored = weight.const_value
        if not isinstance(stored, ir.ExternalTensor) or shape.const_value.numpy().tolist() != [0, -1]:
            continue
        first, *rest = stored.shape.numpy()
        name, two = f"{weight.name}.lines", ir.Shape([first, math.prod(rest)])
        tensor = ir.ExternalTensor(
            stored.location, stored.offset, stored.length, stored.dtype, shape=two, name=name, base_dir=stored.base_dir
        )
        lines = ir.Value(name=name, shape=two, type=weight.type, const_value=tensor)
        model.graph.register_initializer(lines)
        ir.convenience.replace_all_uses_with(node.outputs[0], lines)
        model.graph.remove(node, safe=True)
        if not weight.uses():
            model.graph.initializers.pop(str(weight.name))


def num_bytes(model: ir.Model) -> int:
    """Size of a graph's weights on disk, in bytes."""
    return sum(value.const_value.nbytes for value in model.graph.initializers.values() if value.const_value)


def graph_spec(file: str, model: ir.Model, decisions: dict[str, str]) -> GraphSpec:
    """Describes a graph for the manifest. decisions: what a recipe did to each weight."""
    graph = model.graph
    return GraphSpec(
        file=file,
        inputs={str(value.name): tensor_spec(value) for value in graph.inputs},
        outputs={str(value.name): tensor_spec(value) for value in graph.outputs},
        weights={name: tensor_spec(value) for name, value in graph.initializers.items()},
        recipe=decisions,
    )


def tensor_spec(value: ir.Value) -> TensorSpec:
    """Returns the type and shape of a value as manifests hold them."""
    assert value.shape is not None and value.dtype is not None
    shape = tuple(dim if isinstance(dim, int) else str(dim.value) for dim in value.shape)
    return TensorSpec(str(value.dtype.numpy()), shape)


def _reader(source: StoredTensor, dtype: ir.DataType) -> Part:
    kind = torch.float16 if dtype == ir.DataType.FLOAT16 else torch.float32
    if dtype not in (ir.DataType.FLOAT, ir.DataType.FLOAT16):
        raise ExportError(f"{source.file}: tensor {source.name!r} would be stored as {dtype}; report this as a bug")

    def part(axis: int, piece: slice) -> Array:
        stored = source.rows(piece.start, piece.stop) if axis == 0 else source.read()[:, piece]
        array: Array = stored.to(kind).numpy()
        if not np.isfinite(array).all():
            cause = (
                "is beyond the range of fp16" if source.dtype != "F16" and kind == torch.float16 else "is not finite"
            )
            raise ExportError(
                f"{source.file}: tensor {source.name!r} holds a value that {cause}; use a sound checkpoint or fp32"
            )
        return array

    return part


def _set_lazy(value: ir.Value, tensor: PartedTensor) -> None:
    value.const_value, value.shape, value.dtype = tensor, ir.Shape(tensor.shape.numpy()), tensor.dtype
