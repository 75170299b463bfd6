"""Rows of several texts in one pass of attention: each has the bits that it has alone, whatever the others are; and a
pass that does not fit its announcement is refused."""

from __future__ import annotations

import ctypes
from typing import Any

import numpy as np
import pytest

from conftest import needs_operators
from eagle_runtime.ort.session import texts_mask
from operator_graphs import INSTRUCTION_SETS, Array, Heads, instructions, library

pytestmark = needs_operators
TEXTS = [(130, 5), (0, 1), (700, 40), (63, 9)]  # committed columns and rows of each
HEADS = [Heads(9, 3, 64, 16), Heads(4, 2, 16, 16, window=40, cap=30.0), Heads(2, 2, 24, 24, rotated=False)]
HEADS += [Heads(8, 2, 64, 32, half=True)]


def announce(texts: list[dict[str, Array]], lengths: list[int]) -> None:
    """As the runtime does before a pass; of graphs with one layer."""
    numbers = [
        (one["keys"].ctypes.data, 1, one["values"].ctypes.data, 1, one["keys"].shape[1], length)
        for one, length in zip(texts, lengths, strict=True)
    ]
    array = np.array(numbers, np.int64)
    take: Any = ctypes.CDLL(str(library())).eagle_next_pass
    assert take(ctypes.c_void_p(array.ctypes.data), ctypes.c_int64(len(texts))) == 0


@pytest.fixture(autouse=True)
def nothing_stays_announced() -> Any:
    yield
    announce([], [])


def texts_of(heads: Heads, rng: np.random.Generator) -> list[dict[str, Array]]:
    """Inputs of a pass over each text of TEXTS alone."""
    texts = []
    for length, count in TEXTS:
        past = tuple(rng.standard_normal((length, heads.kv_heads, heads.width)).astype(np.float32) for _ in range(2))
        parents = [-1, *(int(rng.integers(max(0, node - 3), node)) for node in range(1, count))]
        texts.append(heads.feeds(heads.rows(rng, count), (past[0], past[1]), parents, spare=4))
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
            announce(some, [TEXTS[i][0] for i in order])
            together = session.run(None, joined(some))
            announce([], [])
            for name, parts in enumerate(zip(*(alone[i] for i in order), strict=True)):
                np.testing.assert_array_equal(together[name], np.concatenate(parts, 1))


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
        announce(texts[:3], lengths[:3])
    elif change == "another cache":
        announce([texts[1], *texts[1:]], [lengths[1], *lengths[1:]])
    elif change != "nothing announced":
        announce(texts, [length + 10_000 * (change == "too many columns") for length in lengths])
    if change == "apart":
        mask[0, -1] = 1
    if change == "sees another":
        mask[0, 7] = 0
    with pytest.raises(Exception, match=message):
        heads.session().run(None, feeds)
