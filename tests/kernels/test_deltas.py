"""A gated delta net or a state space as a step: a row's bits are those that it has alone, whatever else is in a pass,
and wherever the rows before it lie: in the state, among the past rows, or in the tree."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from conftest import needs_operators
from delta_graphs import Delta, delta, scan
from eagle_runtime.base.errors import BackendError
from eagle_runtime.ort.session import texts_mask
from operator_graphs import HIDDEN, INSTRUCTION_SETS, Array, OneNode, announce, announce_numbers, bits, instructions

pytestmark = needs_operators
SHAPES = [(2, 4, 16, 16), (1, 2, 128, 128), (3, 3, 8, 72), (1, 9, 24, 32)]
TREE = [-1, 0, 0, 1, 1, 2, 3, 5, 7, 6, 0, 10]
CHAIN = list(range(-1, 39))
CACHE = ("keys", "values")
Made = Callable[..., Delta]
NAMES: dict[Made, str] = {delta: "RowExactDelta", scan: "RowExactScan"}
BOTH = pytest.mark.parametrize("made", NAMES)


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("shape", SHAPES)
@BOTH
def test_it_is_the_rule_of_its_kind(made: Made, instruction_set: str, shape: tuple[int, int, int, int]) -> None:
    """Trees and chains, with the bits of the plain form."""
    rng = np.random.default_rng(shape)
    layer = made(rng, *shape)
    with instructions("plain"):
        plain = layer.session()
    with instructions(instruction_set):
        session = layer.session(threads=3)
    for pending, parents in ((0, TREE), (1, [-1]), (3, TREE), (2, [-1, -1, 0]), (1, CHAIN[:9])):
        feeds = layer.feeds(rng, pending, parents)
        got = session.run(None, feeds)
        for one, other in zip(got, plain.run(None, feeds), strict=True):
            np.testing.assert_array_equal(bits(one), bits(other))
        out, state = layer.in_words(feeds)
        np.testing.assert_allclose(got[0][0], out, atol=2e-5, rtol=2e-5)
        np.testing.assert_array_equal(got[1], np.concatenate([feeds[name] for name in layer.of_rows], -1))
        np.testing.assert_allclose(layer.plain(got[2]), state, atol=2e-5, rtol=2e-5)


@BOTH
def test_gates_at_their_ends(made: Made) -> None:
    """Of a head that forgets everything and one that forgets nothing, with numbers far from 0."""
    rng = np.random.default_rng(0)
    layer = made(rng, 2, 2, 16, 16)
    layer.stored["rates"][:] = -80, 10
    _, *gates = layer.of_rows
    for far in (-90, -20, 20, 90):
        feeds = layer.feeds(rng, 2, TREE)
        feeds["keys"][..., -2 * len(gates) :] = far
        for name in gates:
            feeds[name][:] = far
        out, _, state = layer.session().run(None, feeds)
        for got, right in zip((out[0], layer.plain(state)), layer.in_words(feeds), strict=True):
            np.testing.assert_allclose(got, right, atol=2e-5, rtol=2e-5)


class Text:
    """Rows that are decoded one by one, each with the row before it pending; nodes of a tree may be rows."""

    def __init__(self, layer: Delta, session: OneNode, feeds: dict[str, Array]) -> None:
        self._layer, self._session, self._feeds = layer, session, feeds
        self.past, self.state = feeds["keys"], feeds["values"]

    def row(self, number: int) -> Array:
        """What row `number` of the feeds reads after the rows so far."""
        only = {name: self._feeds[name][:, number : number + 1] for name in (*self._layer.of_rows, "positions")}
        past = {"keys": self.past, "values": self.state}
        out, rows, self.state = self._session.run(None, {**only, **past, "mask": np.zeros((1, 1, 1, 1), np.float32)})
        keep = self._layer.tokens - 1
        self.past = np.concatenate([self.past[:, self.past.shape[1] - keep :], rows], 1)
        read: Array = out[0, 0]
        return read


@pytest.mark.parametrize("shape", SHAPES[:2])
@pytest.mark.parametrize("tokens", [4, 1])
@pytest.mark.parametrize("parents", [TREE, CHAIN], ids=["tree", "chain"])
@BOTH
def test_a_row_has_its_bits_as_the_only_one(
    made: Made, shape: tuple[int, int, int, int], tokens: int, parents: list[int]
) -> None:
    rng = np.random.default_rng(7)
    layer = made(rng, *shape, tokens=tokens)
    session, feeds = layer.session(), layer.feeds(rng, 1, parents)
    out, rows, _ = layer.session(threads=2).run(None, feeds)
    for node in (5, 8, 9, 11, len(parents) - 1):
        path = [node]
        while (parent := parents[path[0]]) >= 0:
            path.insert(0, parent)
        text = Text(layer, session, feeds)
        for row in path:
            np.testing.assert_array_equal(bits(text.row(row)), bits(out[0, row]))
        # The same node after a pass whose tree was cut to its path: the rows before it are pending.
        text.past, text.state = np.concatenate([feeds["keys"], rows[:, path[:-1]]], 1), feeds["values"]
        np.testing.assert_array_equal(bits(text.row(node)), bits(out[0, node]))


@BOTH
def test_a_prompt_has_its_bits_in_pieces_of_any_size(made: Made) -> None:
    rng = np.random.default_rng(8)
    layer = made(rng, *SHAPES[0])
    session, feeds = layer.session(), layer.feeds(rng, 0, list(range(-1, 149)))
    whole, _, _ = session.run(None, feeds)
    past, state, parts, first = feeds["keys"], feeds["values"], [], 0
    for count in (1, 64, 7, 78):
        rows = slice(first, first + count)
        mine = {name: feeds[name][:, rows] for name in (*layer.of_rows, "positions")}
        mask = np.ascontiguousarray(feeds["mask"][:, :, rows, rows])
        out, new, state = session.run(None, {**mine, "keys": past, "values": state, "mask": mask})
        parts.append(out)
        past, first = np.concatenate([past[:, past.shape[1] - layer.tokens + 1 :], new], 1), first + count
    np.testing.assert_array_equal(bits(np.concatenate(parts, 1)), bits(whole))


class Texts:
    """Several texts that share a pass of the second of two layers."""

    def __init__(self, layer: Delta, rng: np.random.Generator) -> None:
        parts = ((1, TREE), (0, [-1]), (4, CHAIN[:20]), (1, [-1, 0]))
        self.layer = layer
        self.alone = [layer.feeds(rng, pending, parents) for pending, parents in parts]
        self.caches = [{name: np.stack([np.zeros_like(one[name]), one[name]]) for name in CACHE} for one in self.alone]
        self.states = [np.zeros_like(cache["values"]) for cache in self.caches]
        self.numbers = [
            (*self._of_cache(cache), state.ctypes.data) for cache, state in zip(self.caches, self.states, strict=True)
        ]

    def _of_cache(self, cache: dict[str, Array]) -> tuple[int, ...]:
        keys, values = cache["keys"], cache["values"]
        return keys.ctypes.data, keys[0].nbytes, values.ctypes.data, values[0].nbytes, keys.shape[2], 0

    def feeds(self) -> dict[str, Array]:
        ends = np.cumsum([one["qkv"].shape[1] for one in self.alone]).tolist()
        names = (*self.layer.of_rows, "positions")
        rows = {name: np.concatenate([one[name] for one in self.alone], 1) for name in names}
        mask = texts_mask([one["mask"][0, 0] for one in self.alone], ends)[None, None]
        return {**rows, **{name: self.caches[0][name][1] for name in CACHE}, "mask": mask}


@pytest.fixture(params=NAMES)
def texts(request: pytest.FixtureRequest) -> Iterator[Texts]:
    yield Texts(small(request.param), np.random.default_rng(3))
    announce([])


def test_rows_of_several_texts_share_a_pass(texts: Texts) -> None:
    """Each text's new state goes where it was announced."""
    session = texts.layer.session(2)
    expected = [session.run(None, one) for one in texts.alone]
    announce_numbers(texts.numbers, len(texts.numbers))
    out, rows, state = session.run(None, texts.feeds())
    for got, parts in ((out, [one[0] for one in expected]), (rows, [one[1] for one in expected])):
        np.testing.assert_array_equal(bits(got), bits(np.concatenate(parts, 1)))
    for got, one in zip([state, *(each[1] for each in texts.states[1:])], expected, strict=True):
        np.testing.assert_array_equal(bits(got), bits(one[2]))
    assert not any(each[0].any() for each in texts.states)


@pytest.mark.parametrize(
    ("place", "number", "message"),
    [
        (4, 0, "not as it was announced"),
        (4, 2, "too few past rows"),
        (6, 0, "without memory"),
    ],
)
def test_announcements_that_do_not_fit_are_refused(texts: Texts, place: int, number: int, message: str) -> None:
    numbers = [list(each) for each in texts.numbers]
    numbers[1][place] = number - numbers[1][3] * (place == 6)  # of the first layer
    announce_numbers([tuple(each) for each in numbers], len(numbers))
    with pytest.raises(Exception, match=message):
        texts.layer.session().run(None, texts.feeds())


def small(made: Made = delta) -> Delta:
    return made(np.random.default_rng(5), *SHAPES[0])


@pytest.mark.parametrize(
    "other",
    [
        {"key_heads": 0},
        {"key_heads": 3},
        {"heads": 0},
        {"heads": 8192},
        {"key_width": 12},
        {"width": 2048},
        {"weights": np.zeros((128, 4), np.float32)},
        {"weights": np.zeros((128, 1, 65), np.float32)},
        {"weights": np.zeros((128, 1, 0), np.float32)},
        {"weights": np.zeros((128, 1, 4), np.float16)},
        {"rates": np.zeros(3, np.float32)},
        {"biases": np.zeros((4, 1), np.float32)},
    ],
)
@BOTH
def test_attributes_and_weights_are_checked(made: Made, other: dict[str, Any]) -> None:
    with pytest.raises(BackendError, match=NAMES[made]):
        small(made).session(**other)


@pytest.mark.parametrize(
    "other",
    [
        {"offsets": np.zeros(120, np.float32)},
        {"offsets": np.zeros(128, np.float16)},
        {"skips": np.zeros(1, np.float32)},
        {"skips": np.zeros((1, 4), np.float32)},
    ],
)
def test_weights_of_state_spaces_are_checked(other: dict[str, Any]) -> None:
    with pytest.raises(BackendError, match="RowExactScan"):
        small(scan).session(**other)


@BOTH
def test_inputs_are_checked_in_every_pass(made: Made) -> None:
    layer = small(made)
    session, right = layer.session(), layer.feeds(np.random.default_rng(6), 1, TREE)
    strange = np.repeat(right["mask"][None], 4, 0)
    strange[0, ..., 5, 5] = HIDDEN  # a row that does not see itself
    strange[1, ..., 5, 2] = HIDDEN  # nor its parent
    strange[2, ..., 3, 2] = 0  # one that sees its parent's sibling
    strange[3, ..., 4, 9] = 0  # and one that comes after it
    wrong: dict[str, list[Array]] = {
        "qkv": [right["qkv"][:, :, 1:], right["qkv"][:, :0], right["qkv"][0]],
        "keys": [right["keys"][:, 2:], right["keys"][..., 1:], right["keys"][:, :0]],
        "values": [right["values"][1:], right["values"][..., 1:]],
        "positions": [right["positions"][:, 1:]],
        "mask": [right["mask"][..., 1:], *strange],
    }
    _, *gates = layer.of_rows
    wrong |= {name: [right[name][:, 1:], right[name][..., 1:]] for name in gates}
    for name, arrays in wrong.items():
        for array in arrays:
            with pytest.raises(Exception, match=rf"{NAMES[made]}|ExactTreeAttention|Invalid rank"):
                session.run(None, right | {name: np.ascontiguousarray(array)})


def test_a_tree_that_needs_too_many_states_is_refused() -> None:
    """Of nodes with two children that have children themselves, one below the other."""
    layer, rng = small(), np.random.default_rng(6)
    session = layer.session()
    for depth in (64, 65):
        spine = [-1, *range(depth)]
        sides = list(range(depth))  # a second child of each node of the spine, which has a child
        parents = [*spine, *sides, *range(len(spine), len(spine) + len(sides))]
        feeds = layer.feeds(rng, 1, parents)
        if depth == 64:
            np.testing.assert_allclose(session.run(None, feeds)[0][0], layer.in_words(feeds)[0], atol=2e-5, rtol=2e-5)
        else:
            with pytest.raises(Exception, match="more than 64 states at once"):
                session.run(None, feeds)


@pytest.mark.parametrize("pending", [0, 1, 3])
@BOTH
def test_the_new_state_may_take_the_place_of_the_past_one(made: Made, pending: int) -> None:
    layer = made(np.random.default_rng(4), *SHAPES[1])
    session, feeds = layer.session(2).session, layer.feeds(np.random.default_rng(6), pending, [*TREE, -1])
    out, _, expected = session.run(None, feeds)
    binding, state = session.io_binding(), feeds.pop("values")
    for name, array in feeds.items():
        binding.bind_cpu_input(name, array)
    binding.bind_output("y0")
    binding.bind_output("y1")
    for bind, name in ((binding.bind_input, "values"), (binding.bind_output, "y2")):
        bind(name, "cpu", 0, np.float32, state.shape, state.ctypes.data)
    session.run_with_iobinding(binding)
    np.testing.assert_array_equal(bits(binding.get_outputs()[0].numpy()), bits(out))
    np.testing.assert_array_equal(bits(state), bits(expected))
