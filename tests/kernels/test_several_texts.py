"""Rows of several texts in one pass of attention: each has the bits that it has alone, whatever the others are; a pass
that does not fit its announcement is refused; and what passes are told to write into caches is what they return."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from conftest import needs_operators
from eagle_runtime.ort.session import texts_mask
from eagle_runtime.ort.texts import MOST_SHAPES, MOST_TEXTS
from operator_graphs import INSTRUCTION_SETS, Array, Heads, announce, bits, instructions, library, write_rows

pytestmark = needs_operators
TEXTS = [(130, 5), (0, 1), (700, 40), (63, 9)]  # committed columns and rows of each
HEADS = [Heads(9, 3, 64, 16), Heads(4, 2, 16, 16, window=40, cap=30.0), Heads(2, 2, 24, 24, rotated=False)]
HEADS += [Heads(8, 2, 64, 32, kept="float16"), Heads(8, 2, 64, 64, kept="uint8")]


@pytest.fixture(autouse=True)
def nothing_stays_announced() -> Any:
    yield
    announce([])
    write_rows(0)


def texts_of(heads: Heads, rng: np.random.Generator) -> list[dict[str, Array]]:
    """Inputs of a pass over each text of TEXTS alone."""
    texts = []
    for length, count in TEXTS:
        parents = [-1, *(int(rng.integers(max(0, node - 3), node)) for node in range(1, count))]
        past = heads.past(rng, length)
        texts.append(heads.feeds(heads.rows(rng, count), past, parents, spare=4))
    return texts


def joined(texts: list[dict[str, Array]]) -> dict[str, Array]:
    """Inputs of one pass over the rows of all texts."""
    names = ("q", "k", "v", "positions", "cosine", "sine")
    feeds = {name: np.concatenate([one[name] for one in texts], 1) for name in names if name in texts[0]}
    ends = np.cumsum([one["q"].shape[1] for one in texts]).tolist()
    mask = texts_mask([one["mask"][0, 0] for one in texts], ends)
    return {**feeds, "keys": texts[0]["keys"], "values": texts[0]["values"], "mask": mask[None, None]}


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_rows_have_the_bits_that_they_have_alone(heads: Heads, instruction_set: str) -> None:
    texts = texts_of(heads, np.random.default_rng(heads.width))
    with instructions(instruction_set):
        session = heads.session()
        alone = [session.run(None, one) for one in texts]
        for order in ([0, 1, 2, 3], [2, 0], [3, 1, 2]):
            some = [texts[i] for i in order]
            announce([TEXTS[i][0] for i in order], some)
            together = session.run(None, joined(some))
            announce([])
            for name, parts in enumerate(zip(*(alone[i] for i in order), strict=True)):
                np.testing.assert_array_equal(bits(together[name]), bits(np.concatenate(parts, 1)))


@pytest.mark.parametrize("order", [(0, 1, 2), (2, 0, 1)])
def test_layers_of_several_shapes_share_a_pass(order: tuple[int, ...]) -> None:
    """As in Gemma-4, whose layers have heads of two widths: each layer finds the caches of its own shape."""
    rng = np.random.default_rng(3)
    shapes = [HEADS[number] for number in (0, 3, 4)]
    texts = [texts_of(heads, rng) for heads in shapes]
    alone = [[heads.session().run(None, one) for one in some] for heads, some in zip(shapes, texts, strict=True)]
    announce([length for length, _ in TEXTS], *(texts[number] for number in order))
    for heads, some, expected in zip(shapes, texts, alone, strict=True):
        for output, parts in zip(heads.session().run(None, joined(some)), zip(*expected, strict=True), strict=True):
            np.testing.assert_array_equal(bits(output), bits(np.concatenate(parts, 1)))


def test_too_many_texts_or_shapes_are_not_taken() -> None:
    call: Any = ctypes.CDLL(str(library())).eagle_next_texts
    nothing = ctypes.c_void_p(np.zeros(7, np.int64).ctypes.data)
    for texts, shapes in ((MOST_TEXTS + 1, 1), (1, MOST_SHAPES + 1), (1, 0), (-1, 1)):
        assert call(nothing, ctypes.c_int64(texts), ctypes.c_int64(shapes)) == -1


@pytest.mark.parametrize("heads", [heads for heads in HEADS if not heads.window and heads.kept == "float32"])
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
def test_rows_of_heads_have_the_bits_that_they_have_alone(heads: Heads, instruction_set: str) -> None:
    """Where caches hold row after row, as those of draft heads do."""
    rng = np.random.default_rng(heads.width)
    texts = []
    for length, count in ((130, 5), (1, 1), (300, 40)):
        shape = (length, heads.kv_heads, heads.width)
        past = (rng.standard_normal(shape).astype(np.float32), rng.standard_normal(shape).astype(np.float32))
        texts.append(heads.level(heads.feeds(heads.rows(rng, count), past, range(-1, count - 1), spare=0), past, 0))
    with instructions(instruction_set):
        session = heads.session(by_rows=True)
        alone = [session.run(None, one) for one in texts]
        for order in ([0, 1, 2], [2, 0]):
            some = [texts[i] for i in order]
            announce([one["keys"].shape[1] for one in some], some)
            together = session.run(None, joined(some))
            announce([])
            for name, parts in enumerate(zip(*(alone[i] for i in order), strict=True)):
                np.testing.assert_array_equal(bits(together[name]), bits(np.concatenate(parts, 1)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ("nothing announced", "tree_mask have another shape"),
        ("another number", "other texts than those that were announced"),
        ("apart", "do not stand together"),
        ("sees another", "a row sees one of another text"),
        ("another cache", "a text's cache is not as it was announced"),
        ("too many columns", "a text's cache is not as it was announced"),
    ],
)
def test_what_does_not_fit_is_refused(change: str, message: str) -> None:
    heads = HEADS[0]
    texts = texts_of(heads, np.random.default_rng(1))
    lengths = [length for length, _ in TEXTS]
    feeds = joined(texts)
    mask = feeds["mask"][0, 0]
    if change == "another number":
        announce(lengths[:3], texts[:3])
    elif change == "another cache":
        announce([lengths[1], *lengths[1:]], [texts[1], *texts[1:]])
    elif change != "nothing announced":
        announce([length + 10_000 * (change == "too many columns") for length in lengths], texts)
    if change == "apart":
        mask[0, -1] = 1
    if change == "sees another":
        mask[0, 7] = 0
    with pytest.raises(Exception, match=message):
        heads.session().run(None, feeds)


def appended(feeds: dict[str, Array], length: int, outputs: list[Array]) -> tuple[Array, Array]:
    """The keys and values of a cache after a pass that returned `outputs`: as before, but for the new rows."""
    keys, values = feeds["keys"].copy(), feeds["values"].copy()
    new_keys, new_values = outputs[1][0], outputs[2][0]  # [T, kv_heads, D], or words that hold bytes
    if keys.dtype == np.uint8:
        new_keys, new_values = new_keys.view(np.uint8), new_values.view(np.uint8)
    count = len(new_keys)
    keys[:, length : length + count] = new_keys.transpose(1, 0, 2)
    pieces = new_values.reshape(count, values.shape[0], values.shape[1], values.shape[3])
    values[:, :, length : length + count] = pieces.transpose(1, 2, 0, 3)
    return keys, values


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("where", [1, 2], ids=["too", "alone"])
def test_new_rows_go_into_the_caches(heads: Heads, instruction_set: str, where: int) -> None:
    """Of one text and of several; the outputs are the same, as far as they are wanted, and no other column changes."""
    rng = np.random.default_rng(heads.width)
    texts = [{**one} for one in texts_of(heads, rng)]
    for one, (length, count) in zip(texts, TEXTS, strict=True):
        for name, axis in (("keys", 1), ("values", 2)):
            room = [(0, 0)] * one[name].ndim
            room[axis] = (0, max(0, length + count - one[name].shape[axis]))
            one[name] = np.pad(one[name], room)
    with instructions(instruction_set):
        session = heads.session()
        alone = [session.run(None, one) for one in texts]
        expected = [appended(one, n, out) for one, (n, _), out in zip(texts, TEXTS, alone, strict=True)]
        before = [{**one, "keys": one["keys"].copy(), "values": one["values"].copy()} for one in texts]
        wanted = ["y0", "y1", "y2"] if where == 1 else ["y0"]
        write_rows(where)
        again = [session.run(wanted, one) for one in texts]
        announce([length for length, _ in TEXTS], before)
        together = session.run(wanted, joined(before))
        write_rows(0)
    for outputs, of_text in zip(alone, again, strict=True):
        for array, other in zip(outputs, of_text, strict=False):
            np.testing.assert_array_equal(bits(array), bits(other))
    for place, parts in list(enumerate(zip(*alone, strict=True)))[: len(wanted)]:
        np.testing.assert_array_equal(bits(together[place]), bits(np.concatenate(parts, 1)))
    for caches in (texts, before):
        for one, (keys, values) in zip(caches, expected, strict=True):
            np.testing.assert_array_equal(bits(one["keys"]), bits(keys))
            np.testing.assert_array_equal(bits(one["values"]), bits(values))


def test_a_cache_without_columns_for_new_rows_is_refused() -> None:
    heads = HEADS[0]
    text = texts_of(heads, np.random.default_rng(2))[2]
    assert text["keys"].shape[1] < sum(TEXTS[2])
    write_rows(1)
    with pytest.raises(Exception, match="no columns for the new rows"):
        heads.session().run(None, text)
