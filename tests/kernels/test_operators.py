"""The native operators: every instruction set computes the bits of the plain form, a row's bits do not depend on the
other rows, and inputs that do not fit are refused."""

from __future__ import annotations

import dataclasses
import re
import runpy
import sys
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest

import eagle_runtime
from conftest import needs_operators
from eagle_export.recipes.blocks import Blocks, Grid
from eagle_runtime.base.errors import BackendError
from eagle_runtime.ort.library import open_graph
from eagle_runtime.ort.operators import native_operators
from operator_graphs import (
    HIDDEN,
    INSTRUCTION_SETS,
    Array,
    Heads,
    bits,
    instructions,
    library,
    norm,
    product,
    product_in_words,
    random_blocks,
)

pytestmark = needs_operators
PROMPT = 6  # times 20 rows: so many that levels of four bits are put apart
FEW = (1, 2, 3, 4, 5, 6, 7, 9, 12, 13, 16)
PRODUCTS = [  # K, and per weight N and grid
    (576, [(576, Grid(4, 64, True)), (192, Grid(8, 64, True)), (192, Grid(8, 64, True))]),
    (1536, [(80, Grid(4, 128, True))]),
    (200, [(50, Grid(4, 32, True)), (33, Grid(8, 64, False))]),
    (48, [(40, Grid(4, 16, False)), (24, Grid(8, 16, True))]),
    (2048, [(20, Grid(4, 256, True)), (20, Grid(8, 256, True))]),
    (
        320,
        [(50, Grid(4, 32, True, sixteenths=True)), (33, Grid(4, 64, True)), (20, Grid(4, 16, True, sixteenths=True))],
    ),
]
HEADS = [
    Heads(9, 3, 64, 16),
    Heads(4, 2, 16, 16, window=40),
    Heads(4, 4, 128, 32, cap=50.0),
    Heads(8, 1, 256, 32, window=200, cap=30.0),
    Heads(2, 2, 24, 24, rotated=False),
    Heads(9, 3, 64, 16, kept="float16"),
    Heads(8, 1, 128, 32, window=200, kept="float16"),
    Heads(9, 3, 64, 64, kept="uint8"),
    Heads(8, 1, 80, 80, window=200, cap=30.0, kept="uint8"),
    Heads(2, 2, 256, 256, rotated=False, kept="uint8"),
    Heads(4, 2, 40, 40, turned=16),
    Heads(2, 1, 32, 32, turned=16, kept="uint8"),
    Heads(8, 2, 64, 32, window=40, kept="float16", sinks=True),
    Heads(3, 3, 24, 24, rotated=False, sinks=True),
]


@pytest.mark.parametrize(("k", "shapes"), PRODUCTS)
def test_products_have_the_same_bits_on_every_instruction_set(k: int, shapes: list[tuple[int, Grid]]) -> None:
    rng = np.random.default_rng(k)
    blocks = [random_blocks(rng, (k, n), grid) for n, grid in shapes]
    x = rng.standard_normal((20, k)).astype(np.float32) * rng.choice([1e-4, 1, 30], (20, 1)).astype(np.float32)
    x[7] = 0
    with instructions("plain"):
        plain = product(blocks).run(None, {"x": x[None]})
    for one, words in zip(plain, blocks, strict=True):
        # NumPy adds in fp64 and rounds, which in rare cases differs from one rounding
        wrong = one[0] != product_in_words(x, words)
        assert wrong.mean() < 1e-3
    for name in INSTRUCTION_SETS:
        with instructions(name):
            fast = product(blocks)
        for count in (20, *FEW):
            for first in (0, 20 - count):
                for whole, part in zip(plain, fast.run(None, {"x": x[None, first : first + count]}), strict=True):
                    np.testing.assert_array_equal(whole[:, first : first + count], part)
        for whole, part in zip(plain, fast.run(None, {"x": np.tile(x[None], (1, PROMPT, 1))}), strict=True):
            np.testing.assert_array_equal(np.tile(whole, (1, PROMPT, 1)), part)


@pytest.mark.parametrize("grid", [Grid(4, 128, False), Grid(8, 64, False)])
def test_the_largest_products_do_not_overflow(grid: Grid, instruction_set: str) -> None:
    blocks = random_blocks(np.random.default_rng(0), (256, 32), grid)
    for level in (0, grid.highest):
        full = dataclasses.replace(blocks, level=np.full_like(blocks.level, level), step=np.ones_like(blocks.step))
        x = np.array([[[1.0], [-1.0]]], np.float32) * np.ones(256, np.float32)
        with instructions(instruction_set):
            (out,) = product([full]).run(None, {"x": x})
        assert out[0, :, 0].tolist() == [256 * (level - grid.middle), -256 * (level - grid.middle)]


def test_the_largest_products_with_zero_levels_in_sixteenths(instruction_set: str) -> None:
    blocks = random_blocks(np.random.default_rng(0), (512, 32), Grid(4, 256, True, sixteenths=True))
    x = np.array([[[1.0], [-1.0]]], np.float32) * np.ones(512, np.float32)
    for level, zero in ((0, 255), (15, 0), (15, 255), (7, 113)):
        parts = {"level": level, "zero": zero, "step": 1}
        full = {name: np.full_like(getattr(blocks, name), value) for name, value in parts.items()}
        with instructions(instruction_set):
            (out,) = product([dataclasses.replace(blocks, **full)]).run(None, {"x": x})
        assert out[0, :, 0].tolist() == [512 * (level - zero / 16), -512 * (level - zero / 16)]


@pytest.mark.parametrize("grid", [Grid(4, 32, True), Grid(8, 256, True)])
def test_nan_among_a_products_inputs_is_not_lost(grid: Grid, instruction_set: str) -> None:
    """Whichever input it is; other rows stay as they are."""
    x = some_rows(264)[0]
    with instructions(instruction_set):
        session = product([random_blocks(np.random.default_rng(0), (264, 20), grid)])
        (right,) = session.run(None, {"x": x[None]})
        for place in (0, 7, 100, 263):
            wrong = x.copy()
            wrong[3, place] = np.nan
            (out,) = session.run(None, {"x": wrong[None]})
            assert np.isnan(out[0, 3]).all()
            np.testing.assert_array_equal(np.delete(out, 3, 1), np.delete(right, 3, 1))


def test_a_norm_before_a_product(instruction_set: str) -> None:
    x, norm, blocks = some_rows(576)
    with instructions(instruction_set):
        (out,) = product([blocks], norm, epsilon=1e-5).run(None, {"x": x[None]})
    wide = x.astype(np.float64)
    normed = wide / np.sqrt((wide**2).mean(1, keepdims=True) + 1e-5) * norm
    assert_close_and_exact(out[0], product_in_words(normed.astype(np.float32), blocks))


@pytest.mark.parametrize("activation", [1, 2, 4])
def test_a_gated_activation_before_a_product_and_a_sum_after_it(instruction_set: str, activation: int) -> None:
    """And a norm in between, without a sum."""
    x, norm, blocks = some_rows(576)
    up, added = np.flip(x, 0).copy(), x[:, : blocks.level.shape[1]].copy()
    no_sum = {"x": x[None], "up": up[None]}
    feeds = {**no_sum, "added": added[None]}
    with instructions(instruction_set):
        session = product([blocks], more=("up", "added"), activation=activation)
        (out,) = session.run(None, feeds)
        for first in range(0, 20, 3):
            (part,) = session.run(None, {name: value[:, first : first + 3] for name, value in feeds.items()})
            np.testing.assert_array_equal(part, out[:, first : first + 3])
    wide = x.astype(np.float64)
    cubic = np.sqrt(2 / np.pi) * (wide + 0.044715 * wide**3)
    sigmoid = 1 / (1 + np.exp(-wide))
    active = {1: wide * sigmoid, 2: 0.5 * wide * (1 + np.tanh(cubic)), 4: sigmoid}
    gated = active[activation] * up
    assert_close_and_exact(out[0], product_in_words(gated.astype(np.float32), blocks) + added)
    with instructions(instruction_set):
        (out,) = product([blocks], norm, more=("up",), activation=activation, epsilon=1e-5).run(None, no_sum)
    normed = gated / np.sqrt((gated**2).mean(1, keepdims=True) + 1e-5) * norm
    assert_close_and_exact(out[0], product_in_words(normed.astype(np.float32), blocks))


def test_biases_after_a_product(instruction_set: str) -> None:
    """Added to the finished sums, before what else is added; of some of several products."""
    x, _, blocks = some_rows(576)
    bias = np.linspace(-3, 3, 50, dtype=np.float32)
    added = np.flip(x, 0)[:, :50].copy()
    with instructions(instruction_set):
        (bare,) = product([blocks]).run(None, {"x": x[None]})
        both = {"x": x[None], "added": added[None]}
        (out,) = product([blocks], more=("added",), biases=[bias]).run(None, both)
        several = product([blocks] * 3, biases=[None, bias]).run(None, {"x": x[None]})
        for first in range(0, 20, 3):
            (part,) = product([blocks], biases=[bias]).run(None, {"x": x[None, first : first + 3]})
            np.testing.assert_array_equal(part, (bare + bias)[:, first : first + 3])
    np.testing.assert_array_equal(out, (bare + bias) + added)
    for one, right in zip(several, (bare, bare + bias, bare), strict=True):
        np.testing.assert_array_equal(one, right)


@pytest.mark.parametrize(
    "grid", [Grid(4, 64, True), Grid(8, 64, True), Grid(4, 32, False), Grid(4, 32, True, sixteenths=True)]
)
def test_parts_of_one_weight_have_the_bits_of_the_whole(instruction_set: str, grid: Grid) -> None:
    x = some_rows(576)[0][None]
    blocks = random_blocks(np.random.default_rng(1), (576, 50), grid)
    with instructions(instruction_set):
        (whole,) = product([blocks]).run(None, {"x": x})
        (part,) = product([blocks], N_0=21, first_0=19).run(None, {"x": x})
    np.testing.assert_array_equal(part, whole[..., 19:40])


def test_norms_of_heads_and_of_rows(instruction_set: str) -> None:
    """Of every 64 values, with a sum after; a row's bits are those that it has alone."""
    rng = np.random.default_rng(0)
    x, added = (rng.normal(0, 3, (1, 20, 192)).astype(np.float32) for _ in range(2))
    factors = rng.random(64).astype(np.float32) + np.float32(0.5)
    with instructions(instruction_set):
        (out,) = norm(factors, added=True).run(None, {"x": x, "added": added})
        (part,) = norm(factors).run(None, {"x": x[:, 7:9]})
    heads = x.astype(np.float64).reshape(20, 3, 64)
    expected = (heads / np.sqrt((heads**2).mean(-1, keepdims=True) + 1e-5) * factors).reshape(1, 20, 192)
    np.testing.assert_allclose(out, expected + added, rtol=1e-5, atol=1e-5)
    np.testing.assert_array_equal(part + added[:, 7:9], out[:, 7:9])
    with instructions("plain"):
        np.testing.assert_array_equal(norm(factors, added=True).run(None, {"x": x, "added": added})[0], out)


def test_norms_refuse_what_does_not_fit() -> None:
    with pytest.raises(BackendError, match="multiple of 8"):
        norm(np.ones(12, np.float32))
    with pytest.raises(BackendError, match="epsilon is missing"):
        norm(np.ones(16, np.float32), epsilon=-1.0)
    session = norm(np.ones(16, np.float32), added=True)
    for x, added, said in (((1, 2, 24), (1, 2, 24), "multiple of the norm's width"), ((1, 2, 32), (1, 2, 16), "added")):
        with pytest.raises(Exception, match=said):
            session.run(None, {"x": np.zeros(x, np.float32), "added": np.zeros(added, np.float32)})
    assert norm(np.ones(16, np.float32)).run(None, {"x": np.zeros((1, 0, 32), np.float32)})[0].shape == (1, 0, 32)


@pytest.fixture(params=INSTRUCTION_SETS)
def instruction_set(request: pytest.FixtureRequest) -> str:
    return str(request.param)


def some_rows(k: int) -> tuple[Array, Array, Blocks]:
    rng = np.random.default_rng(k)
    factors = rng.random(k).astype(np.float32) + np.float32(0.5)
    return rng.normal(0, 3, (20, k)).astype(np.float32), factors, random_blocks(rng, (k, 50), Grid(4, 64, True))


def assert_close_and_exact(out: Array, expected: Array) -> None:
    """An input on the border of two levels may fall on either side, which moves a row by one step."""
    np.testing.assert_allclose(out, expected, atol=2e-3 * float(np.abs(expected).max()))
    assert np.median(np.abs(out - expected)) < 1e-5 * np.abs(expected).max()


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", [0, 5, 127, 130, 700])
def test_attention_has_the_same_bits_in_any_tree_and_on_every_instruction_set(heads: Heads, length: int) -> None:
    rng = np.random.default_rng(length)
    count = int(rng.choice([7, 33, 60]))
    past = heads.past(rng, length)
    parents = [-1, *(int(rng.integers(max(0, node - 4), node)) for node in range(1, count))]
    rows = heads.rows(rng, count)
    feeds = heads.feeds(rows, past, parents, spare=9)
    fast = heads.session()
    out, keys, values = fast.run(None, feeds)
    for name in INSTRUCTION_SETS:
        with instructions(name):
            for other, mine in zip(heads.session().run(None, feeds), (out, keys, values), strict=True):
                np.testing.assert_array_equal(bits(other), bits(mine))
    # A key between two numbers of fp16 may become either, and one between two bytes.
    atol = {"float32": 2e-5, "float16": 1e-3, "uint8": 5e-2}[heads.kept]
    expected = heads.in_words(feeds, past)
    np.testing.assert_allclose(out[0], expected, atol=atol)
    assert np.median(np.abs(out[0] - expected)) < 1e-4
    for node in (count - 1, count // 2):
        path = [node]
        while parents[path[0]] >= 0:
            path.insert(0, parents[path[0]])
        grown = tuple(np.concatenate([old, new[0, path[:-1]]]) for old, new in zip(past, (keys, values), strict=True))
        alone = {name: part[[node]] for name, part in rows.items()}
        one, *_ = fast.run(None, heads.feeds(alone, (grown[0], grown[1]), [-1], spare=64))
        np.testing.assert_array_equal(bits(one[0, 0]), bits(out[0, node]))


@pytest.mark.parametrize("heads", HEADS)
@pytest.mark.parametrize("length", [0, 1, 127, 300])
def test_columns_that_are_not_committed_are_not_read(heads: Heads, length: int, instruction_set: str) -> None:
    """A cache leaves in them what they held (HeadMajorCache)."""
    rng = np.random.default_rng(length)
    past = heads.past(rng, length)
    feeds = heads.feeds(heads.rows(rng, 5), past, [-1, 0, 0, 1, 3], spare=70)
    other = {name: feeds[name].copy() for name in ("keys", "values")}
    other["keys"].view(np.uint8)[:, length:], other["values"].view(np.uint8)[:, :, length:] = 255, 255  # NaN
    with instructions(instruction_set):
        session = heads.session()
        for mine, same in zip(session.run(None, {**feeds, **other}), session.run(None, feeds), strict=True):
            np.testing.assert_array_equal(bits(mine), bits(same))
        assert np.isfinite(session.run(None, {**feeds, **other})[0]).all()


@pytest.mark.parametrize("heads", [heads for heads in HEADS if heads.kept != "float32"])
def test_numbers_that_are_none_stay_in_their_row(heads: Heads, instruction_set: str) -> None:
    """NaN in a query is in what the row gets; of its key and its value the rows before it see nothing."""
    rng = np.random.default_rng(0)
    past, rows = heads.past(rng, 40), heads.rows(rng, 5)
    with instructions(instruction_set):
        session = heads.session()
        right = session.run(None, heads.feeds(rows, past, range(-1, 4), spare=9))[0]
        for name, number in (("q", np.nan), ("k", np.nan), ("v", np.nan), ("v", np.inf)):
            wrong = {**rows, name: rows[name].copy()}
            wrong[name][4, 0] = number
            out = session.run(None, heads.feeds(wrong, past, range(-1, 4), spare=9))[0]
            np.testing.assert_array_equal(bits(out[0, :4]), bits(right[0, :4]))
            assert name != "q" or np.isnan(out[0, 4, : heads.width]).all()


@pytest.mark.parametrize("heads", [Heads(4, 2, 16, 16), Heads(4, 2, 16, 16, window=9, sinks=True)])
def test_a_row_that_sees_nothing_is_zeros(heads: Heads, instruction_set: str) -> None:
    """No tree has one; others stay as they are."""
    feeds = heads.feeds(heads.rows(np.random.default_rng(0), 3), heads.past(np.random.default_rng(1), 0), [-1, 0, 1], 1)
    blind = {**feeds, "mask": feeds["mask"].copy()}
    blind["mask"][0, 0, 1] = HIDDEN
    with instructions(instruction_set):
        session = heads.session()
        (whole, *_), (out, *_) = (session.run(None, each) for each in (feeds, blind))
    np.testing.assert_array_equal(bits(out[0, [0, 2]]), bits(whole[0, [0, 2]]))
    assert not out[0, 1].any()


@pytest.mark.parametrize("heads", [heads for heads in HEADS if not heads.window and heads.kept == "float32"])
@pytest.mark.parametrize("length", [0, 1, 127, 300])
def test_attention_over_rows_has_the_bits_of_the_whole_tree(heads: Heads, length: int, instruction_set: str) -> None:
    rng = np.random.default_rng(length)
    past = heads.past(rng, length)
    parents = [-1, -1, 0, 1, 1, 2, 4, 4, 6]
    feeds = heads.feeds(heads.rows(rng, len(parents)), past, parents, spare=9)
    with instructions(instruction_set):
        whole = heads.session().run(None, feeds)
        session = heads.session(by_rows=True)
    for first, last in ((0, 9), (0, 2), (2, 5), (5, 8), (8, 9)):
        until = {name: value[:, :last] for name, value in feeds.items() if name not in ("keys", "values")}
        until["mask"] = feeds["mask"][:, :, :last, :last]
        grown = tuple(np.concatenate([old, new[0, :first]]) for old, new in zip(past, whole[1:], strict=True))
        level = session.run(None, heads.level(until, (grown[0], grown[1]), first))
        for mine, all_rows in zip(level, whole, strict=True):
            np.testing.assert_array_equal(mine, all_rows[:, first:last])


def test_attention_over_rows_refuses_what_does_not_fit() -> None:
    heads, rng = Heads(9, 3, 64, 16), np.random.default_rng(0)
    past = np.zeros((5, 3, 64), np.float32)
    feeds = heads.feeds(heads.rows(rng, 3), (past, past), [-1, 0, 1], spare=0)
    level, session = heads.level(feeds, (past, past), 1), heads.session(by_rows=True)
    assert session.run(None, level)[0].shape == (1, 2, 576)
    for change, said in (
        ({"mask": np.zeros((1, 1, 2, 8), np.float32)}, "position_ids or tree_mask"),
        ({"mask": np.zeros((1, 1, 2, 1), np.float32)}, "position_ids or tree_mask"),
        ({"values": np.zeros((1, 4, 3, 64), np.float32)}, "past keys or values"),
        ({"keys": np.zeros((1, 5, 3, 32), np.float32)}, "past keys or values"),
        ({"keys": np.zeros((2, 5, 3, 64), np.float32)}, "past keys or values"),
    ):
        with pytest.raises(Exception, match=said):
            session.run(None, {**level, **change})
    windowed = dataclasses.replace(heads, window=4).session(by_rows=True)
    with pytest.raises(Exception, match="past keys or values"):
        windowed.run(None, level)


def test_a_prompt_has_the_same_bits_in_chunks_of_any_size() -> None:
    heads, rng = Heads(6, 3, 32, 16), np.random.default_rng(0)
    past = tuple(rng.standard_normal((150, 3, 32)).astype(np.float32) for _ in range(2))
    rows, session = heads.rows(rng, 120), heads.session()
    whole = session.run(None, heads.feeds(rows, (past[0], past[1]), range(-1, 119), spare=1))[0]
    for size in (1, 7, 33, 64):
        read = past
        for first in range(0, 120, size):
            chunk = {name: part[first : first + size] for name, part in rows.items()}
            count = len(chunk["q"])
            feeds = heads.feeds(chunk, (read[0], read[1]), range(-1, count - 1), spare=3)
            out, keys, values = session.run(None, feeds)
            np.testing.assert_array_equal(out[0], whole[0, first : first + count])
            read = tuple(np.concatenate([old, new[0]]) for old, new in zip(read, (keys, values), strict=True))


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"q": np.zeros((1, 2, 60), np.float32)}, "q, k or v"),
        ({"keys": np.zeros((3, 0, 64), np.float32)}, "past keys or values"),
        ({"keys": np.zeros((3, 7, 64), np.float32)}, "past keys or values"),
        ({"values": np.zeros((3, 4, 10, 15), np.float32)}, "past keys or values"),
        ({"positions": np.array([[11, 12]])}, "first position"),
        ({"positions": np.array([[-1, 12]])}, "first position"),
        ({"positions": np.array([[3]])}, "position_ids or tree_mask"),
        ({"mask": np.zeros((1, 1, 2, 3), np.float32)}, "position_ids or tree_mask"),
        ({"cosine": np.zeros((1, 2, 16), np.float32)}, "cosine or sine"),
        ({name: np.zeros((1, 2, 12), np.float32) for name in ("cosine", "sine")}, "cosine or sine"),
        ({name: np.zeros((1, 2, 40), np.float32) for name in ("cosine", "sine")}, "cosine or sine"),
    ],
)
def test_attention_refuses_what_does_not_fit(change: dict[str, Array], said: str) -> None:
    heads, rng = Heads(9, 3, 64, 16), np.random.default_rng(0)
    past = np.zeros((1, 3, 64), np.float32)
    feeds = heads.feeds(heads.rows(rng, 2), (past, past), [-1, 0], spare=9)
    session = heads.session()
    assert session.run(None, feeds)[0].shape == (1, 2, 576)
    with pytest.raises(Exception, match=said):
        session.run(None, {**feeds, **change})


def test_attention_refuses_what_ended_the_process() -> None:
    """Found by tests/operator_fuzz.py: nothing that any row sees, and positions whose distance overflows."""
    heads, nothing = Heads(4, 2, 16, 16, window=9), np.zeros((0, 2, 16), np.float32)
    feeds = heads.feeds(heads.rows(np.random.default_rng(0), 2), (nothing, nothing), [-1, 0], 4)
    session = heads.session()
    with pytest.raises(Exception, match="no row sees a column"):
        session.run(None, {**feeds, "mask": np.full_like(feeds["mask"], HIDDEN)})
    for position in (-1, -(2**63), 2**63 - 1):
        with pytest.raises(Exception, match="a position is negative or too large"):
            session.run(None, {**feeds, "positions": np.array([[0, position]])})


@pytest.mark.parametrize("other", [{"heads": 8}, {"kv_heads": 0}, {"width": 4}, {"window": -1}, {"width": 1 << 40}])
def test_attributes_of_attention_are_checked(other: dict[str, int]) -> None:
    with pytest.raises(BackendError, match=r"heads, kv_heads, width, scale, window or softcap"):
        Heads(9, 3, 64, 16).session(False, **other)


@pytest.mark.parametrize(
    ("other", "said"),
    [
        ({"bits_0": 5}, "bits must be 4 or 8"),
        ({"block_0": 48}, "a power of two"),
        ({"N_0": 33}, "another shape"),
        ({"first_0": 1}, "another shape"),
        ({"first_0": -1}, "power of two"),
        ({"K": 300}, "another shape"),
        ({"K": 0}, "K must be"),
        ({"K": 1 << 40}, "K must be"),
        ({"activation": 3}, "activation, alpha or limit"),
        ({"activation": 5}, "activation, alpha or limit"),
    ],
)
def test_products_refuse_weights_that_do_not_fit(other: dict[str, Any], said: str) -> None:
    blocks = random_blocks(np.random.default_rng(0), (256, 32), Grid(4, 64, True))
    with pytest.raises(BackendError, match=said):
        product([blocks], **other)
    with pytest.raises(BackendError, match="norm, epsilon or activation do not fit"):
        product([blocks], np.ones(255, np.float32), epsilon=1e-5)
    with pytest.raises(BackendError, match="a bias has another shape"):
        product([blocks], biases=[np.ones(31, np.float32)])
    for feeds, match in (
        ({"x": (1, 2, 256), "up": (1, 2, 255)}, "up has another shape"),
        ({"x": (1, 2, 256), "added": (1, 2, 31)}, "added has another shape"),
    ):
        more = tuple(name for name in feeds if name != "x")
        session = product([blocks], more=more, activation=int("up" in feeds))
        with pytest.raises(Exception, match=match):
            session.run(None, {name: np.zeros(shape, np.float32) for name, shape in feeds.items()})
    with pytest.raises(Exception, match="K as its last dimension"):
        product([blocks]).run(None, {"x": np.zeros((1, 2, 255), np.float32)})


@pytest.mark.skipif(sys.platform != "linux", reason="pages are let go on Linux alone")
def test_mapped_weights_leave_memory_once_they_are_packed(tmp_path: Path) -> None:
    blocks = random_blocks(np.random.default_rng(0), (2048, 2048), Grid(8, 64, True))
    in_memory = product([blocks])
    path = tmp_path / "one.onnx"
    onnx.save_model(onnx.load_from_string(in_memory.model), path, save_as_external_data=True, location="weights")
    mapped = open_graph(path, threads=1, operators=library())
    smaps = Path("/proc/self/smaps").read_text(encoding="utf-8").split(f"{tmp_path / 'weights'}\n")
    resident = [int(kilobytes) for said in smaps[1:] for kilobytes in re.findall(r"^Rss: +(\d+) kB", said, re.M)[:1]]
    assert resident and sum(resident) < blocks.level.size / 1024 / 8
    x = np.random.default_rng(1).normal(0, 1, (1, 3, 2048)).astype(np.float32)
    np.testing.assert_array_equal(mapped.run(None, {"x": x})[0], in_memory.run(None, {"x": x})[0])
    assert_close_and_exact(in_memory.run(None, {"x": x})[0][0], product_in_words(x[0], blocks))


def test_no_rows_give_no_rows() -> None:
    blocks = random_blocks(np.random.default_rng(0), (256, 32), Grid(4, 64, True))
    assert product([blocks]).run(None, {"x": np.zeros((1, 0, 256), np.float32)})[0].shape == (1, 0, 32)


def test_an_unknown_instruction_set_is_refused() -> None:
    with pytest.raises(ValueError, match="no abacus here"), instructions("abacus"):
        pass


def test_the_library_is_small_and_that_of_the_package() -> None:
    library = native_operators().library
    assert library is not None and library.parent.name == "eagle_edge_kernels"
    assert Path(library).stat().st_size < 1 << 20


def test_pyinstaller_collects_the_library() -> None:
    hook = Path(eagle_runtime.__path__[0]) / "_pyinstaller" / "hook-eagle_runtime.py"
    assert (str(native_operators().library), "eagle_edge_kernels") in runpy.run_path(str(hook))["binaries"]
