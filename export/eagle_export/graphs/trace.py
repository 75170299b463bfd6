"""Traces a graph module into ONNX without its weights, and checks the result.

Weights are fake tensors during the trace (shapes and types only), so that a model of any size is traced in a few
hundred megabytes; weights.py attaches the real ones when they are written.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, TypeVar

import onnx_ir as ir
import torch
from onnxscript import optimizer
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from eagle_export.base.errors import ExportError
from eagle_export.base.quiet import quiet
from eagle_export.graphs.graphs import TargetGraph
from eagle_export.graphs.native_operators import native_operators
from eagle_export.graphs.repeated_experts import few_experts, repeat_experts
from eagle_export.graphs.repeated_layers import hidden_names, repeat_layers, repeats_of, shortened, tap_names
from eagle_export.heads.config import HeadConfig
from eagle_export.reading.families.family import Rows
from eagle_export.recipes.graph import CONVOLUTION, STATE_SPACE
from eagle_runtime.bundle.graph import past_names, present_names

Built = TypeVar("Built", bound=nn.Module)

OPSET = 24
# Example sizes, all different and above 1: torch would merge equal dimensions, and make a size of 1 a constant.
EXAMPLE = {"T": 7, "P": 5, "L": 9, "R": 3, "B": 6}


@dataclass(frozen=True, slots=True)
class Layout:
    """Key/value heads and their width of each layer that has some, and the type of their rows."""

    rows: Rows
    dtype: torch.dtype


@dataclass(frozen=True, slots=True)
class Expected:
    """Node counts that a correct trace has."""

    attention: int
    rms_norm: int
    rotary: int  # one for queries and one for keys of a layer


def build_fake(build: Callable[[], Built], dtype: torch.dtype) -> Built:
    """Builds a module with fake parameters of `dtype`, which take no memory, but with real rotary tables and
    multipliers, which are in no checkpoint."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)  # fake parameters cannot be converted later
    try:
        with FakeTensorMode(allow_non_fake_inputs=True):
            module = build().eval()
    finally:
        torch.set_default_dtype(before)
    real_tables(module)
    return module


def real_tables(module: nn.Module) -> None:
    """Gives a module without memory what no checkpoint has: its rotary tables, and Gemma's multiplier of embeddings."""
    for part in list(module.modules()):
        for name, child in list(part.named_children()):
            if type(child).__name__.endswith("RotaryEmbedding"):
                setattr(part, name, type(child)(config=child.config).eval())
        if hasattr(part, "scalar_embed_scale"):
            part.embed_scale = torch.tensor(part.scalar_embed_scale)


def trace_target(module: TargetGraph, layout: Layout, expected: Expected) -> ir.Model:
    """Traces a target into ONNX, with the contract's names. Raises ExportError if the trace is not as expected."""
    with few_experts(module), ExitStack() as until_end:
        repeats = None if module.linked else repeats_of(module)
        if repeats is not None:
            until_end.enter_context(shortened(module, repeats))
            layout = replace(layout, rows=repeats.of_traced(layout.rows))
        model = trace_layers(module, layout)
    fold(model)
    if module.mixtures:
        repeat_experts(model, module.mixtures[0].count)
    if repeats is not None:
        repeat_layers(model, repeats, module.taps)
    return checked(model, expected)


def trace_layers(module: TargetGraph, layout: Layout) -> ir.Model:
    """Traces a target with the layers that it has; unless these are linked, inputs in the place of taps, and
    outputs of hidden states."""
    names = ["input_ids", "position_ids", "tree_mask", "logit_rows"]
    t, mask = EXAMPLE["T"], torch.zeros(1, 1, EXAMPLE["T"], EXAMPLE["L"], dtype=layout.dtype)
    args = (torch.zeros(1, t, dtype=torch.int64), torch.arange(t)[None], mask, torch.arange(EXAMPLE["R"]))
    dims = ({1: "T"}, {1: "T"}, {2: "T", 3: "L"}, {0: "R"})
    if module.linked:
        return _trace(module, names, args, dims, ["logits", "features"], layout)
    size = (1, t, int(module.config.hidden_size))
    taps = {name: torch.zeros(size, dtype=layout.dtype) for name in tap_names(len(module.taps))}
    return _trace(
        module, names, args, dims, ["logits", "features"], layout, taps, hidden_names(len(module.model.layers))
    )


def trace_draft(module: nn.Module, config: HeadConfig, layout: Layout, expected: Expected) -> ir.Model:
    """As trace_target, of a DraftGraph or BlockGraph."""
    names = ["input_ids", "features", "position_ids", "tree_mask", "logit_rows"]
    row = "T" if config.block is None else "B"
    count, mask = EXAMPLE[row], torch.zeros(1, 1, EXAMPLE[row], EXAMPLE["L"], dtype=layout.dtype)
    ids, features = torch.arange(count)[None], torch.zeros(1, EXAMPLE["T"], config.feature_size, dtype=layout.dtype)
    args = (torch.zeros_like(ids), features, ids, mask, torch.arange(EXAMPLE["R"]))
    dims = ({1: row}, {1: "T"}, {1: row}, {2: row, 3: "L"}, {0: "R"})
    last = ["hidden"] if config.block is None else ["scores"] if config.markov_rank else []
    model = _trace(module, names, args, dims, ["log_probs", "token_ids", *last], layout)
    fold(model)
    return checked(model, expected, row)


def _trace(
    module: nn.Module,
    input_names: list[str],
    args: tuple[Tensor, ...],
    dims: tuple[dict[int, str], ...],
    output_names: list[str],
    layout: Layout,
    taps: Mapping[str, Tensor] = MappingProxyType({}),
    hidden: Sequence[str] = (),
) -> ir.Model:
    """taps: inputs [1,T,H] after the past ones, of which the module takes a list. hidden: names of the last outputs."""
    symbols = {name: torch.export.Dim(name, min=0 if name == "P" else 1) for name in EXAMPLE}
    dynamic: list[Any] = [{axis: symbols[name] for axis, name in dim.items()} for dim in dims]
    dynamic.append([({1: symbols["P"]}, {1: symbols["P"]})] * len(layout.rows))
    shapes = [(1, EXAMPLE["P"], *row) for row in layout.rows]
    # One tensor per input: an object that is passed twice would be traced as one input.
    past = [(torch.zeros(shape, dtype=layout.dtype), torch.zeros(shape, dtype=layout.dtype)) for shape in shapes]
    last = [list(taps.values())] if taps else []
    dynamic += [[{1: symbols["T"]} for _ in each] for each in last]
    inputs = [*input_names, *past_names(len(past)), *taps]
    outputs = [*output_names, *present_names(len(past)), *hidden]
    with native_operators(module, module.halved if isinstance(module, TargetGraph) else None):
        return exported(module, (*args, past, *last), tuple(dynamic), inputs, outputs)


def exported(
    module: nn.Module,
    args: tuple[object, ...],
    dims: tuple[object, ...],
    input_names: Sequence[str],
    output_names: Sequence[str],
) -> ir.Model:
    """Returns what torch makes of a module. dims: of each argument its dynamic dimensions."""
    with quiet("torch.onnx"):
        program = torch.onnx.export(
            module,
            args,
            dynamo=True,
            dynamic_shapes=dims,
            opset_version=OPSET,
            optimize=False,  # its constant folding would read the fake weights
            input_names=input_names,
            output_names=output_names,
            verbose=False,
        )
    assert program is not None
    model: ir.Model = program.model
    return model


def fold(model: ir.Model) -> None:
    """Folds constants, in place."""
    weights = {value: value.const_value for value in model.graph.initializers.values() if is_fake(value)}
    for weight in weights:
        weight.const_value = None  # hidden: folding would read every weight, and merge equal ones
    with quiet("onnx_ir"):
        optimizer.optimize_ir(model)
    for weight, tensor in weights.items():
        weight.const_value = tensor


def is_fake(value: ir.Value) -> bool:
    """Whether an initializer is a parameter of a traced module, which has no values."""
    return isinstance(getattr(value.const_value, "raw", None), FakeTensor)


def checked(model: ir.Model, expected: Expected, row: str = "T") -> ir.Model:
    """Returns a trace, without the source paths and stack traces that torch notes. Raises ExportError unless each norm,
    rotation and attention is one standard node, and each dynamic dimension is symbolic. With a transformers release
    that renames a function, the graph would else be correct but slow, or fixed to the example's sizes. row: dimension
    of the rows of input_ids."""
    graph = model.graph
    made = [value for node in graph for value in node.outputs]
    for item in (model, graph, *graph, *graph.inputs, *graph.initializers.values(), *made):
        item.metadata_props.clear()
    foreign = sorted({node.domain for node in model.graph if node.domain not in ("", CONVOLUTION[0])})
    counts = Counter(node.op_type for node in model.graph)
    traced = (counts["Attention"], counts["RMSNormalization"], counts["RotaryEmbedding"])
    wanted = (expected.attention, expected.rms_norm, expected.rotary)
    if foreign or traced != wanted:
        raise ExportError(
            f"the trace has {traced} Attention, RMSNormalization and RotaryEmbedding nodes instead of {wanted} and "
            f"foreign domains {foreign}; this transformers version is not supported (try the tested one)"
        )
    states = any((node.domain, node.op_type) == STATE_SPACE for node in graph)  # which know the order without positions
    if unused := [n.name for n in graph.inputs if not n.uses() and not (states and n.name == "position_ids")]:
        raise ExportError(f"the trace does not use its input {unused[0]}; report this as a bug")
    symbolic = {"input_ids": {1: row}, "tree_mask": {2: row, 3: "L"}, past_names(1)[0]: {1: "P"}}
    for value in model.graph.inputs:
        for axis, name in symbolic.get(value.name or "", {}).items():
            dim = value.shape[axis] if value.shape is not None else None
            if not isinstance(dim, ir.SymbolicDim) or dim.value != name:
                raise ExportError(f"the trace froze dimension {name} of {value.name} to {dim}; report this as a bug")
    return model
