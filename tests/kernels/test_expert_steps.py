"""A mixture of experts as a step: its bits are those of products of each expert's rows, one row at a time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conftest import needs_operators
from eagle_export.recipes.blocks import Grid
from eagle_runtime.base.errors import BackendError
from expert_graphs import GRIDS, mixture
from operator_graphs import INSTRUCTION_SETS, bits, instructions, opened_model

pytestmark = needs_operators
SHAPES = [  # experts, hidden, width, of which a row has
    (6, 64, 48, 2),
    (3, 160, 96, 3),
    (12, 96, 200, 1),
]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(("experts", "hidden", "width", "chosen"), SHAPES)
@pytest.mark.parametrize("threads", [1, 3])
def test_a_mixture_has_the_bits_of_products(
    instruction_set: str, experts: int, hidden: int, width: int, chosen: int, threads: int
) -> None:
    rng = np.random.default_rng(experts)
    for activation, sums in ((1, True), (2, False), (3, True)):
        made = mixture(rng, experts, hidden, width, activation=activation, biased=activation == 3)
        with instructions(instruction_set):
            session = made.session(threads, sums=sums)
        for rows in (1, 2, 9, 40):
            feeds = made.feeds(rng, rows, chosen, sums=sums)
            with instructions("plain"):
                expected = made.by_products(feeds)
            (got,) = session.run(None, feeds)
            np.testing.assert_array_equal(bits(got), bits(expected))


def test_a_row_has_its_bits_with_any_neighbours() -> None:
    rng = np.random.default_rng(3)
    made = mixture(rng, 8, 128, 64, GRIDS[:1])
    session = made.session(2)
    feeds = made.feeds(rng, 33, 3)
    (together,) = session.run(None, feeds)
    for t in range(33):
        (alone,) = session.run(None, {name: array[:, t : t + 1] for name, array in feeds.items()})
        np.testing.assert_array_equal(bits(alone[0, 0]), bits(together[0, t]))


def test_an_expert_without_rows_is_not_read() -> None:
    """Its steps are no numbers, and would make any sum one."""
    rng = np.random.default_rng(4)
    made = mixture(rng, 4, 64, 64)
    gate, up, down = made.experts[2]
    broken = replace(gate, step=np.full_like(gate.step, np.nan)), up, down
    session = replace(made, experts=(*made.experts[:2], broken, *made.experts[3:])).session()
    feeds = made.feeds(rng, 7, 2)
    feeds["shares"][..., 2] = 0
    assert np.isfinite(session.run(None, feeds)[0]).all()
    feeds["shares"][0, 3, 2] = 0.5
    (out,) = session.run(None, feeds)
    np.testing.assert_array_equal(np.isfinite(out[0]).all(-1), np.arange(7) != 3)


def test_rows_may_have_no_expert_and_a_pass_no_rows() -> None:
    rng = np.random.default_rng(5)
    made = mixture(rng, 4, 64, 64)
    session = made.session(2)
    feeds = made.feeds(rng, 5, 2)
    feeds["shares"][0, 1] = 0
    np.testing.assert_array_equal(session.run(None, feeds)[0][0, 1], feeds["added"][0, 1])
    feeds["shares"][:] = 0
    np.testing.assert_array_equal(session.run(None, feeds)[0], feeds["added"])
    assert session.run(None, {name: array[:, :0] for name, array in feeds.items()})[0].shape == (1, 0, 64)


@pytest.mark.parametrize(
    "other",
    [
        {"H": 60},
        {"H": 72},
        {"I": 0},
        {"I": 4},
        {"I": 72},
        {"activation": 0},
        {"activation": 3},
        {"activation": 5},
        {"biases": 2},
        {"biases": 1},
    ],
)
def test_attributes_are_checked(other: dict[str, Any]) -> None:
    made = mixture(np.random.default_rng(6), 2, 64, 64, [Grid(4, 32, True)])
    with pytest.raises(BackendError, match="RowExact"):
        opened_model(made.model(**other))


def test_weights_are_checked() -> None:
    made = mixture(np.random.default_rng(7), 2, 64, 64, [Grid(4, 32, True)])
    right = made.weights()
    wrong = {
        "grids": [right["grids"][:5], right["grids"][0], right["grids"] * 3, right["grids"][:, :1], right["grids"][:0]],
        "levels4": [right["levels4"][:-1], right["levels4"].astype(np.int8)],
        "steps1": [right["steps1"].astype(np.float32)],
        "zeros5": [right["zeros5"][:, :0]],
    }
    for name, arrays in wrong.items():
        for array in arrays:
            with pytest.raises(BackendError, match="RowExact"):
                opened_model(made.model(right | {name: array}))
    with pytest.raises(BackendError, match="weights are missing"):
        opened_model(made.model({name: array for name, array in right.items() if name != "zeros5"}))


def test_inputs_are_checked_in_every_pass() -> None:
    rng = np.random.default_rng(8)
    made = mixture(rng, 3, 64, 64)
    session = made.session()
    feeds = made.feeds(rng, 4, 2)
    for name, said in (("x", "H as its last"), ("shares", "shares are not"), ("added", "added has another")):
        for wrong in (feeds[name][..., :-1], feeds[name][:, :-1]):
            with pytest.raises(Exception, match=said if wrong.shape[1] == 4 else "RowExactExperts"):
                session.run(None, {**feeds, name: wrong})
    assert np.isfinite(session.run(None, feeds)[0]).all()
