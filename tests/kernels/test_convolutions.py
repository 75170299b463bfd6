"""The short convolution of a layer as a step: a row's bits are those that it has alone, whatever else is in a pass."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conftest import needs_operators
from convolution_graphs import Convolution, convolution
from eagle_runtime.base.errors import BackendError
from eagle_runtime.ort.session import texts_mask
from operator_graphs import INSTRUCTION_SETS, Array, Heads, announce, bits, instructions, seen, write_rows

pytestmark = needs_operators
HEADS = [
    Heads(4, 2, 16, 16, rotated=False),
    Heads(6, 3, 64, 32, rotated=False, kept="float16"),
    Heads(2, 1, 24, 8, rotated=False, kept="float16"),
]
TREE = [-1, 0, 0, 1, 1, 2, 3, 5, 7, 6]


@pytest.mark.parametrize("instruction_set", INSTRUCTION_SETS)
@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize(("tokens", "biased"), [(3, False), (5, True), (1, False)])
def test_it_is_the_sum_over_a_rows_last_tokens(instruction_set: str, heads: Heads, tokens: int, biased: bool) -> None:
    """Trees, chains and prompts, at the start of a text and later, with the bits of the plain form."""
    rng = np.random.default_rng(tokens)
    layer = convolution(rng, heads, tokens, biased=biased)
    for length, parents in ((0, TREE), (1, TREE), (130, TREE), (40, [-1]), (7, list(range(-1, 99)))):
        feeds = layer.feeds(rng, length, parents)
        with instructions("plain"):
            expected = layer.session().run(None, feeds)
        with instructions(instruction_set):
            got = layer.session(threads=3).run(None, feeds)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_array_equal(bits(one), bits(other))
        np.testing.assert_allclose(got[0][0], layer.in_words(feeds), atol=2e-5, rtol=2e-5)


@pytest.mark.parametrize("heads", HEADS)
def test_a_node_of_a_tree_has_its_bits_as_the_only_row(heads: Heads) -> None:
    rng = np.random.default_rng(7)
    layer = convolution(rng, heads, 4)
    session, feeds = layer.session(), layer.feeds(rng, 20, TREE, spare=len(TREE))
    out, *new = session.run(None, feeds)
    visible, depths = seen(TREE)
    for node in range(len(TREE)):
        *before, last = np.flatnonzero(visible[node])
        alone = {name: feeds[name].copy() for name in ("keys", "values")}
        for column, ancestor in enumerate(before, 20):
            alone["keys"][:, column] = new[0][0, ancestor]
            alone["values"][:, :, column] = new[1][0, ancestor].reshape(heads.kv_heads, -1, heads.cut)
        alone |= {"x": feeds["x"][:, last : last + 1], "positions": np.array([[20 + depths[node]]])}
        alone["mask"] = np.zeros((1, 1, 1, 1), np.float32)
        np.testing.assert_array_equal(bits(session.run(None, alone)[0][0, 0]), bits(out[0, node]))


def test_rows_of_several_texts_share_a_pass() -> None:
    rng = np.random.default_rng(3)
    layer = convolution(rng, HEADS[1], 3)
    lengths, trees = [130, 0, 2], [TREE, [-1], list(range(-1, 40))]
    texts = [layer.feeds(rng, length, parents) for length, parents in zip(lengths, trees, strict=True)]
    session = layer.session(2)
    alone = [session.run(None, one) for one in texts]
    feeds = {name: np.concatenate([one[name] for one in texts], 1) for name in ("x", "positions")}
    ends = np.cumsum([len(parents) for parents in trees]).tolist()
    feeds |= {"keys": texts[0]["keys"], "values": texts[0]["values"]}
    feeds["mask"] = texts_mask([one["mask"][0, 0] for one in texts], ends)[None, None]
    announce(lengths, texts)
    try:
        together = session.run(None, feeds)
    finally:
        announce([])
    for number, parts in enumerate(zip(*alone, strict=True)):
        np.testing.assert_array_equal(bits(together[number]), bits(np.concatenate(parts, 1)))


@pytest.mark.parametrize("heads", HEADS)
def test_new_rows_go_into_the_cache_where_a_pass_is_told_so(heads: Heads) -> None:
    rng = np.random.default_rng(4)
    layer = convolution(rng, heads, 3)
    feeds = layer.feeds(rng, 9, TREE, spare=len(TREE))
    out, keys, values = layer.session().run(None, feeds)
    written = {name: array.copy() for name, array in feeds.items()}
    write_rows(1)
    try:
        again = layer.session().run(None, written)
    finally:
        write_rows(0)
    np.testing.assert_array_equal(bits(again[0]), bits(out))
    kept = keys[0].transpose(1, 0, 2), values[0].reshape(len(TREE), heads.kv_heads, -1, heads.cut).transpose(1, 2, 0, 3)
    np.testing.assert_array_equal(written["keys"][:, 9:], kept[0].astype(heads.kept))
    np.testing.assert_array_equal(written["values"][:, :, 9:], kept[1].astype(heads.kept))


def small() -> Convolution:
    return convolution(np.random.default_rng(5), HEADS[0], 3, biased=True)


@pytest.mark.parametrize(
    "other",
    [
        {"kv_heads": 0},
        {"kv_heads": 3},
        {"width": 12},
        {"width": 2048},
        {"weights": np.zeros((64, 3), np.float32)},
        {"weights": np.zeros((64, 1, 65), np.float32)},
        {"weights": np.zeros((64, 1, 0), np.float32)},
        {"weights": np.zeros((64, 1, 3), np.float16)},
        {"bias": np.zeros(63, np.float32)},
    ],
)
def test_attributes_and_weights_are_checked(other: dict[str, Any]) -> None:
    with pytest.raises(BackendError, match="RowExactConvolution"):
        small().session(**other)


def test_inputs_are_checked_in_every_pass() -> None:
    layer = small()
    session, right = layer.session(), layer.feeds(np.random.default_rng(6), 5, TREE)
    wrong: dict[str, list[Array]] = {
        "x": [right["x"][:, :, 1:], right["x"][:, :0]],
        "keys": [right["keys"][:1], right["keys"][:, :0]],
        "values": [right["values"][:, :, :4]],
        "positions": [right["positions"][:, 1:], right["positions"] + 100, right["positions"] - 9],
        "mask": [right["mask"][..., 1:]],
    }
    for name, arrays in wrong.items():
        for array in arrays:
            with pytest.raises(Exception, match=r"RowExactConvolution|ExactTreeAttention"):
                session.run(None, right | {name: array})
