"""Steps of one operator have the bits of as many operators, with any number of threads, and plans are checked."""

from __future__ import annotations

import concurrent.futures

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from conftest import needs_operators
from eagle_runtime.base.errors import BackendError
from operator_graphs import INSTRUCTION_SETS, Array, instructions, opened_model
from step_graphs import PER_LAYER, layers

pytestmark = needs_operators
TREES = [(0, [-1]), (5, [-1]), (130, [-1, 0, 0, 1, 1, 2, 5]), (700, range(-1, 2)), (40, range(-1, 69))]
WIDTH = 20  # of a row of a plan: kind, inputs, outputs


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize(("threads", "norms"), [(1, False), (2, False), (2, True), (5, True)])
def test_steps_have_the_bits_of_operators(instruction_set: str, threads: int, norms: bool) -> None:
    rng = np.random.default_rng(threads)
    with instructions("plain"):
        plain = layers(np.random.default_rng(0), norms=norms).apart
    with instructions(instruction_set):
        made = layers(np.random.default_rng(0), threads=threads, norms=norms)
    (node,) = [node for node in onnx.load_from_string(made.joined.model).graph.node if node.domain]
    assert node.op_type == "RowExactSteps"
    for length, parents in TREES:
        feeds = made.feeds(rng, length, list(parents))
        for one, mine, same in zip(
            plain.run(None, feeds), made.apart.run(None, feeds), made.joined.run(None, feeds), strict=True
        ):
            np.testing.assert_array_equal(one, same)
            np.testing.assert_array_equal(mine, same)


def test_passes_of_several_threads_do_not_disturb_each_other() -> None:
    made = layers(np.random.default_rng(0), threads=2)
    feeds = [made.feeds(np.random.default_rng(length), length, list(parents)) for length, parents in TREES]
    alone = [made.joined.run(None, one) for one in feeds]
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        for number, outputs in enumerate(pool.map(lambda i: made.joined.run(None, feeds[i % len(feeds)]), range(60))):
            for one, other in zip(alone[number % len(feeds)], outputs, strict=True):
                np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize(
    ("row", "column", "value", "said"),
    [
        (0, 0, 8, "unknown kind"),
        (0, 0, -1, "unknown kind"),
        (0, 1, 1000, "an input that is not there"),
        (0, 1, 0, "an input that is not there"),
        (0, 1, -2, "an input that is not there"),  # its own output
        (3, 1, -2 - 3 * 1000, "an input that is not there"),
        (3, 1, -2 - 3 * 2 - 1, "an input that is not there"),  # a second output of a step of one
        (1, 12, 1, "an input that is not there"),  # attention has nine
        (2, 2, -2, "not an initializer"),
        (4, 17, 7, "an output that is not there"),
        (4, 17, -1, "an output is no step's"),
        (9, 17, 0, "an output that is not there, or one twice"),
        (0, 17, -2, "an output that is not there"),
        (2, 17, -2, "an input that is not there"),  # of the step after it
        (1, 19, -2, "heads, kv_heads"),
        (6, 19, -2, "an output is no step's"),
    ],
)
def test_plans_are_checked(row: int, column: int, value: int, said: str) -> None:
    model = layers(np.random.default_rng(0)).joined.model
    plan = plan_of(model).copy()
    plan[row, column] = value
    with pytest.raises(BackendError, match=said):
        opened_model(with_plan(model, plan))


def test_plans_of_another_shape_are_refused() -> None:
    model = layers(np.random.default_rng(0)).joined.model
    plan = plan_of(model)
    assert plan.shape == (2 * PER_LAYER, WIDTH)
    for other in (plan.reshape(-1, 1), plan[None], plan[:0]):
        with pytest.raises(BackendError, match="the plan has another shape or type"):
            opened_model(with_plan(model, other))


def test_a_rotation_has_cosines_and_sines() -> None:
    model = layers(np.random.default_rng(0), norms=True).joined.model
    plan = plan_of(model).copy()
    cosines, sines = -2, -3
    plan[0, 18] = -2  # no sines; who read them reads cosines
    plan[:, 1:17][plan[:, 1:17] == sines] = cosines
    with pytest.raises(BackendError, match="cosines and sines"):
        opened_model(with_plan(model, plan))


def test_plans_of_older_bundles_run() -> None:
    """They have no places for biases."""
    made = layers(np.random.default_rng(0), biases=False)
    plan = plan_of(made.joined.model)
    older = opened_model(with_plan(made.joined.model, np.delete(plan, np.s_[14:17], 1)))
    feeds = made.feeds(np.random.default_rng(1), 5, [-1, 0])
    for one, other in zip(made.apart.run(None, feeds), older.run(None, feeds), strict=True):
        np.testing.assert_array_equal(one, other)


def plan_of(model: bytes) -> Array:
    (node,) = [node for node in onnx.load_from_string(model).graph.node if node.op_type == "Constant"]
    plan: Array = numpy_helper.to_array(node.attribute[0].t)
    return plan


def with_plan(model: bytes, plan: Array) -> bytes:
    graph = onnx.load_from_string(model)
    (node,) = [node for node in graph.graph.node if node.op_type == "Constant"]
    node.attribute[0].t.CopyFrom(numpy_helper.from_array(plan))
    content: bytes = graph.SerializeToString()
    return content


def test_inputs_of_a_step_are_checked_in_every_pass() -> None:
    made = layers(np.random.default_rng(0))
    feeds = made.feeds(np.random.default_rng(1), 5, [-1, 0])
    for name, said in (("x", "K as its last dimension"), ("mask", "tree_mask"), ("keys", "past keys")):
        with pytest.raises(Exception, match=said):
            made.joined.run(None, {**feeds, name: feeds[name][..., :-1]})
    wrong = {**feeds, "x": np.concatenate([feeds["x"]] * 2, 1)}
    with pytest.raises(Exception, match="position_ids or tree_mask"):
        made.joined.run(None, wrong)
    assert np.isfinite(made.joined.run(None, feeds)[0]).all()
