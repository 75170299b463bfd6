"""Graphs of a mixture of experts as a step, and the same as products of each expert's rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from onnx import TensorProto, helper

from eagle_export.recipes.blocks import Blocks, Grid
from eagle_export.recipes.weight_blocks import packed
from operator_graphs import Array, OneNode, opened_model, product, random_blocks, serialised
from step_graphs import joined

INPUTS = dict.fromkeys(("x", "shares", "added"), (TensorProto.FLOAT, 3))
GRIDS = (
    Grid(4, 32, True),
    Grid(8, 16, True),
    Grid(4, 64, True),
    Grid(4, 32, True, sixteenths=True),
)  # of weights, in turns


@dataclass(frozen=True, slots=True)
class Mixture:
    """experts: of each gate, up and down. biases: of each those of the three, or none."""

    experts: tuple[tuple[Blocks, Blocks, Blocks], ...]
    hidden: int
    width: int
    activation: int = 1
    biases: tuple[tuple[Array, Array, Array], ...] = ()

    @property
    def bounds(self) -> dict[str, Any]:
        """Attributes of activation 3."""
        return {"alpha": 1.702, "limit": 0.8} if self.activation == 3 else {}

    def weights(self) -> dict[str, Array]:
        """Initializers of the step, in the order of its inputs."""
        flat = [weight for expert in self.experts for weight in expert]
        found = {"grids": np.array([[weight.grid.bits, weight.grid.size] for weight in flat], np.int64)}
        for n, weight in enumerate(flat):
            found |= zip((f"levels{n}", f"steps{n}", f"zeros{n}"), packed(weight), strict=True)
        found |= {f"bias{n}": each for n, each in enumerate(each for three in self.biases for each in three)}
        return found

    def model(self, weights: dict[str, Array] | None = None, *, sums: bool = True, **other: Any) -> bytes:
        """The graph. sums: something is added. other: attributes in the place of the right ones."""
        tensors = weights or self.weights()
        attributes: dict[str, Any] = {"H": self.hidden, "I": self.width, "activation": self.activation}
        attributes |= self.bounds | ({"biases": 1} if self.biases else {}) | other
        names = ["x", "shares", "added" if sums else "", *tensors]
        node = helper.make_node("RowExactExperts", names, ["y0"], domain="eagle", **attributes)
        return joined(serialised([node], {name: INPUTS[name] for name in names[:3] if name}, 1, tensors))

    def session(self, threads: int = 1, *, sums: bool = True) -> OneNode:
        """The step."""
        return opened_model(self.model(sums=sums), threads)

    def feeds(self, rng: np.random.Generator, rows: int, chosen: int, *, sums: bool = True) -> dict[str, Array]:
        """Inputs of a pass whose rows have `chosen` experts each."""
        x, added = (rng.standard_normal((1, rows, self.hidden)).astype(np.float32) for _ in range(2))
        shares = np.zeros((1, rows, len(self.experts)), np.float32)
        for row in shares[0]:
            row[rng.choice(len(row), chosen, replace=False)] = rng.random(chosen) + 0.1
        return {"x": x, "shares": shares, **({"added": added} if sums else {})}

    def by_products(self, feeds: dict[str, Array]) -> Array:
        """The output, computed by a RowExactMatMul per expert and weight for one row at a time."""
        out = np.zeros_like(feeds["x"])
        for number, (gate, up, down) in enumerate(self.experts):
            of_in, of_out = (self.biases[number][:2], self.biases[number][2:]) if self.biases else ((), ())
            first = product([gate, up], biases=of_in)
            second = product([down], more=("up",), biases=of_out, activation=self.activation, **self.bounds)
            for t in np.flatnonzero(feeds["shares"][0, :, number]):
                gated, ups = first.run(None, {"x": feeds["x"][:, t : t + 1]})
                (made,) = second.run(None, {"x": gated, "up": ups})
                out[0, t] += feeds["shares"][0, t, number] * made[0, 0]
        return out + feeds["added"] if "added" in feeds else out


def mixture(
    rng: np.random.Generator,
    experts: int,
    hidden: int,
    width: int,
    grids: Sequence[Grid] = GRIDS,
    activation: int = 1,
    biased: bool = False,
) -> Mixture:
    """Random experts, whose weights have these grids in turns."""
    made = []
    for number in range(experts):
        shapes = ((hidden, width), (hidden, width), (width, hidden))
        each = [random_blocks(rng, shape, grids[(number + i) % len(grids)]) for i, shape in enumerate(shapes)]
        made.append((each[0], each[1], each[2]))
    sizes = (width, width, hidden)
    biases = [tuple(rng.standard_normal(size).astype(np.float32) for size in sizes) for _ in made] if biased else []
    return Mixture(tuple(made), hidden, width, activation, tuple((a, b, c) for a, b, c in biases))
