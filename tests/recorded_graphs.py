"""Graphs of the native operators, for replay.c: python tests/recorded_graphs.py CASES writes them.

A case is a graph with its weights, inputs, and the outputs of the plain form, which defines the bits."""

from __future__ import annotations

import struct
import sys
from pathlib import Path

import numpy as np

from convolution_graphs import convolution
from delta_graphs import delta, scan
from eagle_export.recipes.blocks import Grid
from expert_graphs import mixture
from operator_graphs import Array, Heads, OneNode, instructions, product, random_blocks, sincos
from step_graphs import layers

TYPES = {
    np.dtype(np.float32): 1,
    np.dtype(np.uint8): 2,
    np.dtype(np.int64): 7,
    np.dtype(np.float16): 10,
}  # ONNX's numbers
PRODUCTS = [  # K, columns and grids of the weights, rows
    (576, [(576, Grid(4, 64, True)), (192, Grid(8, 64, True)), (192, Grid(8, 64, True))], (1, 2, 3, 4, 7)),
    (1536, [(80, Grid(4, 128, True))], (1, 5)),
    (200, [(50, Grid(4, 32, True)), (33, Grid(8, 64, False))], (1, 6)),
    (48, [(40, Grid(4, 16, False)), (24, Grid(8, 16, True))], (4,)),
    (320, [(50, Grid(4, 32, True, sixteenths=True))], (1, 7)),
]
HEADS = [Heads(9, 3, 64, 16), Heads(4, 2, 16, 16, window=40), Heads(8, 1, 256, 32, window=200, cap=30.0)]
HEADS += [Heads(9, 3, 64, 16, kept="float16"), Heads(9, 3, 64, 64, kept="uint8")]


def cases() -> list[tuple[OneNode, dict[str, Array], list[Array]]]:
    """Graphs, inputs and outputs."""
    rng, found = np.random.default_rng(0), []
    with instructions("plain"):
        for k, shapes, counts in PRODUCTS:
            recorded = product([random_blocks(rng, (k, n), grid) for n, grid in shapes])
            for rows in counts:
                x = rng.standard_normal((1, rows, k)).astype(np.float32)
                found.append((recorded, {"x": x}, recorded.run(None, {"x": x})))
        blocks = [random_blocks(rng, (576, 64), Grid(4, 64, True))]
        gated = product(blocks, more=("up", "added"), activation=1)
        feeds = {name: rng.standard_normal((1, 3, n)).astype(np.float32) for name, n in [("x", 576), ("up", 576)]}
        feeds["added"] = rng.standard_normal((1, 3, 64)).astype(np.float32)
        found.append((gated, feeds, gated.run(None, feeds)))
        normed = product(blocks, np.linspace(0.5, 1.5, 576, dtype=np.float32), epsilon=1e-5)
        found.append((normed, {"x": feeds["x"]}, normed.run(None, {"x": feeds["x"]})))
        angles = {"x": (np.arange(2000)[:, None] * 10000 ** (-np.arange(32) / 32)).astype(np.float32)[None]}
        found.append((rotations := sincos(factor=1.25), angles, rotations.run(None, angles)))
        for heads in HEADS:
            session = heads.session()
            for length, parents in [(0, [-1]), (130, [-1, 0, 0, 1, 1, 2, 5]), (700, range(-1, 40))]:
                past = heads.past(rng, length)
                inputs = heads.feeds(heads.rows(rng, len(parents)), past, list(parents), spare=8)
                found.append((session, inputs, session.run(None, inputs)))
        for norms, length, parents in [(False, 0, [-1]), (True, 130, [-1, 0, 0, 1, 1, 2, 5])]:
            two = layers(rng, norms=norms)
            inputs = two.feeds(rng, length, parents)
            found.append((two.joined, inputs, two.joined.run(None, inputs)))
        for kept, length, parents in [("float32", 0, [-1, 0, 0, 1]), ("float16", 130, [-1, 0, 0, 1, 1, 2, 5])]:
            layer = convolution(rng, Heads(6, 3, 64, 32, rotated=False, kept=kept), 3, biased=length == 0)
            inputs = layer.feeds(rng, length, parents)
            step = layer.session()
            found.append((step, inputs, step.run(None, inputs)))
        for net in (delta(rng, 2, 4, 32, 72), scan(rng, 2, 4, 32, 72)):
            step = net.session()
            for pending, parents in [(0, range(-1, 20)), (3, [-1, 0, 0, 1, 1, 2, 5])]:
                inputs = net.feeds(rng, pending, list(parents))
                found.append((step, inputs, step.run(None, inputs)))
        experts = mixture(rng, 6, 96, 64)
        step = experts.session()
        for rows in (1, 9):
            inputs = experts.feeds(rng, rows, 2)
            found.append((step, inputs, step.run(None, inputs)))
    return found


def write(path: Path) -> int:
    """Writes the cases and returns how many there are."""
    found = cases()
    with path.open("wb") as file:

        def number(*values: int) -> None:
            file.write(struct.pack(f"<{len(values)}Q", *values))

        number(len(found))
        for graph, inputs, outputs in found:
            number(len(graph.model))
            file.write(graph.model)
            number(len(inputs))
            for name, array in inputs.items():
                file.write(name.encode().ljust(16, b"\0"))
                number(TYPES[array.dtype], array.ndim, array.nbytes, *array.shape)
                file.write(np.ascontiguousarray(array).tobytes())
            number(len(outputs))
            for i, array in enumerate(outputs):
                file.write(f"y{i}".encode().ljust(16, b"\0"))
                number(array.nbytes)
                file.write(array.tobytes())
    return len(found)


if __name__ == "__main__":
    print(write(Path(sys.argv[1])), "cases")
