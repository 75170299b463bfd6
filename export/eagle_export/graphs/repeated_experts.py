"""A target's graph traced with two experts of each mixture, and completed with copies of the second.

Experts differ in nothing but their weights and their number. With all of them a trace of 128 took two minutes
on a busy machine, and one of 512 had not ended after eight: the passes that fold it take time by the square of its
nodes.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import onnx_ir as ir

from eagle_export.base.errors import ExportError
from eagle_export.graphs.graphs import TargetGraph
from eagle_export.graphs.repeated_layers import UNSUPPORTED, copied_nodes, nodes_above
from eagle_export.recipes.graph import Steps
from eagle_export.recipes.routed_experts import Mixture, mixtures

TRACED = 2


@contextmanager
def few_experts(module: TargetGraph) -> Iterator[None]:
    """Leaves each mixture of a module with the experts that are traced, until the end."""
    others = [list(mixture.experts)[TRACED:] for mixture in module.mixtures]
    for mixture in module.mixtures:
        del mixture.experts[TRACED:]
    try:
        yield
    finally:
        for mixture, experts in zip(module.mixtures, others, strict=True):
            mixture.experts.extend(experts)


def repeat_experts(model: ir.Model, count: int) -> None:
    """Completes the mixtures of a graph, in place. count: of experts in each. Raises ExportError for experts that
    depend on each other in another way than by the sum of what they write."""
    for mixture in mixtures(model):
        _repeat(model, mixture, count)


def _repeat(model: ir.Model, mixture: Mixture, count: int) -> None:
    total, graph = mixture.total, model.graph
    first, last = (use.node for out in mixture.outs for use in out.uses())  # an output times its share
    (before,) = (value for value in total.inputs if value is not last.outputs[0])
    own = nodes_above(last.outputs) - nodes_above([first.outputs[0], mixture.x, mixture.shares])
    nodes = [*(node for node in graph if node in own), total]
    (share,) = (place for place, node in enumerate(nodes) if mixture.shares in node.inputs)
    bounds = [value.const_value for value in nodes[share].inputs[1:3] if value is not None]
    if before is None or [each is not None and int(each.numpy()[0]) for each in bounds] != [TRACED - 1, TRACED]:
        raise ExportError(f"{mixture.names[-1]} reads more than its share of a row; {UNSUPPORTED}")
    experts, _, number = mixture.names[-1].rpartition(".")
    weights = {name: value for name, value in graph.initializers.items() if name.startswith(f"{experts}.{number}.")}
    readers, op, written = list(total.outputs[0].uses()), Steps(model, total), total
    for new in range(TRACED, count):
        values = {before: written.outputs[0]}
        for name, weight in weights.items():
            own_name = f"{experts}.{new}.{name.removeprefix(f'{experts}.{number}.')}"
            values[weight] = ir.Value(
                name=own_name, shape=weight.shape, type=weight.type, const_value=weight.const_value
            )
            graph.register_initializer(values[weight])
        copies = copied_nodes(nodes, values, f"expert{new}")
        for place, bound in enumerate((new, new + 1), 1):
            copies[share].replace_input_with(place, op.ints(bound))
        graph.insert_after(written, copies)
        written = copies[-1]
    for use in readers:
        use.node.replace_input_with(use.idx, written.outputs[0])
