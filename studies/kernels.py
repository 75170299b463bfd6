"""What a linear layer costs on this processor for some numbers of rows, per way of storing it: what the exporter's
choice of blocks was made from (docs/dev/precision.md).

    python -m studies kernels --shape 2048 2048 --threads 2

Each way is one graph of several layers with weights of their own, so that weights come from memory as they do in a
model. The time is the median over repeated runs, divided by the number of layers. Rows are counted as equal if each row
of a run has the bits that it has in the largest run.
"""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from statistics import median

import numpy as np
import onnx_ir as ir

from eagle_export.recipes.blocks import Grid
from eagle_export.recipes.graph import LayerPass
from eagle_export.recipes.int8 import Int8PerToken
from eagle_export.recipes.weight_blocks import WeightBlocks
from eagle_runtime.commands.command import Parser
from eagle_runtime.ort.library import open_graph
from eagle_tools.markdown import markdown_table
from studies.harness import positive

ROWS = (1, 2, 3, 4, 6, 8, 16, 32)
RUNS = 15
WAYS: dict[str, LayerPass] = {
    "int8-token": Int8PerToken(),
    **{
        f"int{bits}, blocks of {size}": WeightBlocks(Grid(bits, size, asymmetric=True))
        for bits in (8, 4)
        for size in (32, 64, 128)
    },
}


def layers_model(shape: tuple[int, int], layers: int) -> ir.Model:
    """Returns a model of x [1, T, K] times `layers` random weights [K, N]."""
    k, n = shape
    rng, fp32 = np.random.default_rng(0), ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", type=fp32, shape=ir.Shape([1, "T", k]))
    weights, nodes = [], []
    for index in range(layers):
        array = ir.tensor(rng.standard_normal((k, n), np.float32))
        weights.append(ir.Value(name=f"w{index}", const_value=array, type=fp32, shape=ir.Shape([k, n])))
        node = ir.node("MatMul", [x, weights[-1]])
        node.outputs[0].name, node.outputs[0].type = f"y{index}", fp32
        node.outputs[0].shape = ir.Shape([1, "T", n])
        nodes.append(node)
    outputs = [node.outputs[0] for node in nodes]
    graph = ir.Graph([x], outputs, nodes=nodes, initializers=weights, opset_imports={"": 24}, name="layers")
    return ir.Model(graph, ir_version=10)


def measure(way: LayerPass, shape: tuple[int, int], layers: int, threads: int) -> tuple[list[float], list[int]]:
    """Returns milliseconds per layer for each of ROWS, and the numbers of rows that are equal to the bit."""
    model = layers_model(shape, layers)
    way.apply(model)
    session = open_graph(Path(), threads=threads, model=ir.to_proto(model).SerializeToString())
    x = np.random.default_rng(1).standard_normal((1, max(ROWS), shape[0])).astype(np.float32)
    wanted = [out.copy() for out in session.run(None, {"x": x})]
    times, equal = [], []
    for rows in ROWS:
        seconds = []
        for _ in range(RUNS + 1):
            started = time.perf_counter()
            outputs = session.run(None, {"x": x[:, :rows]})
            seconds.append(time.perf_counter() - started)
        times.append(1e3 * median(seconds[1:]) / layers)
        if all(np.array_equal(out, want[:, :rows]) for out, want in zip(outputs, wanted, strict=True)):
            equal.append(rows)
    return times, equal


def report(args: argparse.Namespace) -> str:
    """Measures every way; returns the table."""
    positive(*args.shape, args.layers, args.threads, names="shape, layers and threads")
    lines = []
    for name, way in WAYS.items():
        times, equal = measure(way, tuple(args.shape), args.layers, args.threads)
        same = "all" if equal == list(ROWS) else ", ".join(map(str, equal))
        lines.append([name, *(f"{ms:.3f}" for ms in times), same])
    return markdown_table(["ms per layer, rows", *map(str, ROWS), "equal to the bit"], lines)


def add_options(parser: Parser) -> None:
    """What is timed."""
    parser.add_argument("--shape", type=int, nargs=2, default=[2048, 2048], metavar=("K", "N"), help="of the weights")
    parser.add_argument("--layers", type=int, default=12, metavar="N", help="weights that take turns (default 12)")
    parser.add_argument("--threads", type=int, default=2, metavar="N", help="default 2")
