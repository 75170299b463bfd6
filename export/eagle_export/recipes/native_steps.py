"""Native operators that follow each other are steps of one node, RowExactSteps: threads stay together from the first to
the last, and what only steps read is not a tensor of the graph. All layers of a Llama are one node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.graph import Pass, take_place

DOMAIN = "eagle"  # of the operators
# Exist as steps alone.
EXPERTS, CONVOLUTION, DELTA, SCAN = "RowExactExperts", "RowExactConvolution", "RowExactDelta", "RowExactScan"
SINCOS = "ExactSinCos"
KINDS = ("RowExactMatMul", "ExactTreeAttention", "RowExactNorm", EXPERTS, SINCOS, CONVOLUTION, DELTA, SCAN)
STEPS_ALONE = (EXPERTS, CONVOLUTION, DELTA, SCAN)
INPUTS, OUTPUTS = 16, 3  # of a step, at most
OF_EXPERTS = 4  # inputs that the plan names; the weights follow the last of them
ABSENT, INSIDE, NONE = -1, -1, -2  # an input; an output that only steps read; no such output

Run = list[ir.Node]


@dataclass(frozen=True, slots=True)
class JoinedRuns(Pass[Run]):
    """Makes one node of every run of native operators: of those that can be computed without another in between."""

    name = "joined runs"

    def pattern(self, model: ir.Model) -> list[Run]:
        return [run for run in _runs(model.graph) if len(run) > 1 or any(node.op_type in STEPS_ALONE for node in run)]

    def rewrite(self, model: ir.Model, matches: list[Run]) -> dict[str, str]:
        changed = {}
        for number, run in enumerate(matches):
            node = _joined(run, f"steps_{number}")
            changed[str(node.outputs[0].name)] = f"{len(run)} steps"
        model.graph.sort()
        return changed


def _runs(graph: ir.Graph) -> list[Run]:
    """Nodes in the graph's order. A node is of the run before it unless it reads what another operator made of that."""
    runs: list[Run] = [[]]
    mine: set[ir.Value] = set()  # outputs of the last run
    after: set[ir.Value] = set()  # made of them by other operators
    for node in graph:
        native = node.domain == DOMAIN and node.op_type in KINDS
        if native and any(value in after for value in node.inputs):
            runs.append([])
            mine, after = set(), set()
        if native:
            runs[-1].append(node)
            mine |= set(node.outputs)
        elif any(value in mine or value in after for value in node.inputs):
            after |= set(node.outputs)
    return runs


def _joined(run: Run, name: str) -> ir.Node:
    """Puts one node in the place of a run's last one. Its consumers may stand before it until the graph is sorted."""
    nodes = set(run)
    numbers = {value: -2 - OUTPUTS * s - i for s, node in enumerate(run) for i, value in enumerate(node.outputs)}
    outside = [value for value in numbers if value.is_graph_output() or any(u.node not in nodes for u in value.uses())]
    given = dict.fromkeys(value for node in run for value in node.inputs if value is not None and value not in numbers)
    numbers |= {value: 1 + i for i, value in enumerate(given)}
    plan = np.full((len(run), 1 + INPUTS + OUTPUTS), ABSENT, np.int64)
    plan[:, 1 + INPUTS :] = NONE
    attributes: dict[str, Any] = {}
    for row, (step, node) in zip(plan, enumerate(run), strict=True):
        row[0] = KINDS.index(node.op_type)
        for i, value in enumerate(node.inputs[:OF_EXPERTS] if node.op_type == EXPERTS else node.inputs):
            row[1 + i] = ABSENT if value is None else numbers[value]
        for i, value in enumerate(node.outputs):
            row[1 + INPUTS + i] = outside.index(value) if value in outside else INSIDE
        attributes |= {f"s{step}_{key}": attribute.value for key, attribute in node.attributes.items()}
    constant = ir.node("Constant", [], {"value": ir.tensor(plan)}, num_outputs=1)
    constant.outputs[0].name = f"{name}.plan"
    inputs = [constant.outputs[0], *given]
    joined = ir.node("RowExactSteps", inputs, attributes, domain=DOMAIN, num_outputs=len(outside), name=name)
    assert isinstance(run[-1].graph, ir.Graph)
    run[-1].graph.insert_after(run[-1], [constant, joined])
    for old, new in zip(outside, joined.outputs, strict=True):
        take_place(old, new)
    run[-1].graph.remove(run, safe=True)
    return joined
