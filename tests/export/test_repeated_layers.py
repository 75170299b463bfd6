"""A target of which one layer of each kind is traced has the graph of a whole trace."""

from __future__ import annotations

import hashlib
from dataclasses import replace
from pathlib import Path

import onnx_ir as ir
import pytest
import torch

from eagle_export.base.errors import ExportError
from eagle_export.graphs.graphs import TargetGraph
from eagle_export.graphs.pair import _target_module, open_pair
from eagle_export.graphs.repeated_experts import few_experts, repeat_experts
from eagle_export.graphs.repeated_layers import Repeats, repeat_layers, repeats_of, shortened
from eagle_export.graphs.trace import Layout, fold, trace_layers
from tiny_families import ROWS, save_source

MANY = 4  # layers
APART = [name for name in ROWS if name != "Gemma-4, with layers that use others' keys"]
TRACED = {  # numbers of the layers that are traced, of MANY: 0, and the first of each kind after it
    "Qwen2.5, tied, upper layers with a window": (0, 1, 2),
    "Gemma-2": (0, 1, 2),
    "Gemma-3": (0, 1, 2),
    "Gemma-4, with values that are keys": (0, 1, 3),
    "Gemma-4, with experts": (0, 1, 3),
    "SmolLM3": (0, 1, 2),
    "OLMo-3": (0, 1, 3),
    "EXAONE 4.0": (0, 1, 2),
    "Qwen3-MoE, one layer without experts": (0, 1, 2),
    "LFM2": (0, 1, 2),
    "Qwen3.5": (0, 1, 2),
    "Qwen3.5, with experts": (0, 1, 2),
    "Granite 4": (0, 1, 2),
    "Granite 4, with experts and rotation": (0, 1, 2),
    "LFM2, with experts": (0, 1, 2, 3),
    "LFM2, with biases and wide convolutions": (0, 1, 3),
}


def digest(*parts: object) -> str:
    return hashlib.sha256(repr(parts).encode()).hexdigest()


def computed(model: ir.Model) -> dict[str, str]:
    """Output -> a digest of all that it is computed from, by whatever names and in whatever order. A dimension's size
    may be read from any input that has it."""
    graph, known = model.graph, dict[ir.Value, str]()
    for value in graph.inputs:
        known[value] = digest(value.name, str(value.shape), value.dtype)
    for name, value in graph.initializers.items():
        assert value.const_value is not None
        content = name if "." in name else value.const_value.numpy().tobytes()
        known[value] = digest(content, str(value.shape), value.dtype)
    for node in graph:
        inputs = [None if value is None else known[value] for value in node.inputs]
        first = node.inputs[0] if node.inputs else None
        attributes = {name: str(attribute.value) for name, attribute in node.attributes.items()}
        if node.op_type == "Shape" and first is not None and first.is_graph_input() and first.shape is not None:
            start, end = node.attributes.get_int("start"), node.attributes.get_int("end")
            inputs, attributes = [str(first.shape[start:end])], {}
        for index, value in enumerate(node.outputs):
            known[value] = digest(
                node.domain, node.op_type, sorted(attributes.items()), inputs, index, str(value.shape), value.dtype
            )
    return {str(value.name): known[value] for value in graph.outputs}


def graph_of(module: TargetGraph, layout: Layout, repeats: Repeats) -> ir.Model:
    with shortened(module, repeats):
        model = trace_layers(module, replace(layout, rows=repeats.of_traced(layout.rows)))
    fold(model)
    repeat_layers(model, repeats, module.taps)
    return model


def module_of(target: Path, head: Path | None) -> tuple[TargetGraph, Layout]:
    pair = open_pair(target, head)
    module = _target_module(pair, torch.float32)
    return module, Layout(pair.rows, torch.float32)


def assert_as_whole(module: TargetGraph, layout: Layout) -> None:
    every = tuple(range(len(module.model.layers)))
    short, whole = (
        graph_of(module, layout, each) for each in (repeats_of(module), Repeats(every, every, module.numbers))
    )
    assert computed(short) == computed(whole)
    assert list(computed(short)) == list(computed(whole))
    assert [value.name for value in short.graph.inputs] == [value.name for value in whole.graph.inputs]
    weights = ([name for name in each.graph.initializers if "." in name] for each in (short, whole))
    assert next(weights) == next(weights)
    assert len(short.graph) == len(whole.graph)
    names = [str(value.name) for node in short.graph for value in node.outputs]
    assert len(set(names)) == len(names)


def family(name: str, folder: Path) -> tuple[TargetGraph, Layout]:
    row = ROWS[name]
    save_source(replace(row, config={**row.config, "num_hidden_layers": MANY}), folder)
    return module_of(folder, None)


@pytest.mark.parametrize("name", APART)
def test_one_layer_of_each_kind_is_traced(name: str, tmp_path: Path) -> None:
    module, _ = family(name, tmp_path)
    assert repeats_of(module).traced == TRACED.get(name, (0, 1))
    next(iter(module.model.layers[3].children())).extra = 1.0
    assert repeats_of(module).traced == tuple(sorted({*TRACED.get(name, (0, 1)), 3}))


@pytest.mark.slow
@pytest.mark.parametrize("name", APART)
def test_copies_of_one_layer_of_a_kind_are_the_whole_trace(name: str, tmp_path: Path) -> None:
    assert_as_whole(*family(name, tmp_path))


@pytest.mark.parametrize("name", ["gpt-oss", pytest.param("Qwen3.5, with experts", marks=pytest.mark.slow)])
def test_copies_of_an_expert_are_the_whole_trace(name: str, tmp_path: Path) -> None:
    """With biases and an MLP for every row; two experts of each layer are traced."""
    module, layout = family(name, tmp_path)
    repeats = repeats_of(module)
    with shortened(module, repeats):
        layout = replace(layout, rows=repeats.of_traced(layout.rows))
        whole = trace_layers(module, layout)
        with few_experts(module):
            short = trace_layers(module, layout)
    fold(whole)
    fold(short)
    assert len(short.graph) < len(whole.graph)
    repeat_experts(short, 4)
    assert computed(short) == computed(whole)
    assert len(short.graph) == len(whole.graph)
    weights = (sorted(name for name in each.graph.initializers if "." in name) for each in (short, whole))
    assert next(weights) == next(weights)
    names = [str(value.name) for node in short.graph for value in node.outputs]
    assert len(set(names)) == len(names)


@pytest.mark.slow
def test_taps_are_those_of_the_whole_trace(golden: Path) -> None:
    module, layout = module_of(golden / "target", golden / "head_eagle3_dv44")
    assert len(repeats_of(module).traced) < len(layout.rows)
    assert_as_whole(module, layout)


def test_a_layer_that_gives_more_than_its_hidden_state_is_refused(golden: Path) -> None:
    module, layout = module_of(golden / "target", None)
    repeats = repeats_of(module)
    with shortened(module, repeats):
        model = trace_layers(module, replace(layout, rows=tuple(layout.rows[each] for each in repeats.traced)))
    fold(model)
    graph = model.graph
    sigmoids = [node for node in graph if node.op_type == "Sigmoid"]
    extra = ir.node("Sigmoid", [sigmoids[-1].outputs[0]])
    graph.append(extra)
    graph.outputs.append(extra.outputs[0])
    with pytest.raises(ExportError, match=r"layer 1 gives .* to other parts of the trace"):
        repeat_layers(model, repeats, ())
