"""Caches of key/value rows against a list of rows."""

from __future__ import annotations

import itertools
import math
import os
import sys
from abc import abstractmethod
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from eagle_runtime import EagleModel
from eagle_runtime.base.tree import root_only
from eagle_runtime.core import cache as cache_module
from eagle_runtime.core.cache import ALIGNMENT, FIRST, KEPT, STEP, Cache, HeadMajorCache, KVCache, aligned_empty
from eagle_runtime.core.mixed_cache import MixedCache
from eagle_runtime.core.state_cache import StateCache
from eagle_runtime.core.target import Target
from insides import sessions_of

LAYERS, CAPACITY, HEADS, WIDTH = 2, 12, 2, 4
HELD = 3
MANY = 3 * STEP - 10
PIECES = 2


class TightRows(KVCache):
    """Gives back all that a text does not need, as somebody watches its growth."""

    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.watch_growth(lambda _: None)


class TightHeads(HeadMajorCache):
    """As TightRows."""

    def __init__(self, *sizes: Any, **layout: Any) -> None:
        super().__init__(*sizes, **layout)
        self.watch_growth(lambda _: None)


@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=4).map(tuple), st.sampled_from([np.float32, np.float16, np.int64])
)
@settings(deadline=None)
def test_aligned_empty_starts_on_a_boundary(shape: tuple[int, ...], dtype: npt.DTypeLike) -> None:
    array = aligned_empty(shape, dtype)
    assert array.ctypes.data % ALIGNMENT == 0
    assert array.shape == shape and array.dtype == dtype
    assert array.flags.c_contiguous and array.flags.writeable


class CacheMachine(RuleBasedStateMachine):
    """After any order of forward passes and truncations the cache holds the rows that a list would hold."""

    cache: Cache

    def __init__(self) -> None:
        super().__init__()
        self.expected: list[int] = []
        self.tags = itertools.count(1)

    @abstractmethod
    def write(self, count: int) -> list[int]:
        """Write `count` new rows as a session does, each with its own tag in every layer. Returns the tags."""

    @abstractmethod
    def check_rows(self) -> None:
        """Assert that the committed rows are those of `expected`."""

    @precondition(lambda self: self.cache.room > 0)
    @rule(data=st.data())
    def advance(self, data: st.DataObject) -> None:
        written = self.write(data.draw(st.integers(1, self.cache.room)))
        count = data.draw(st.integers(0, len(written)))
        self.cache.advance(count)
        self.expected += written[:count]

    @precondition(lambda self: self.cache.room > 0)
    @rule(data=st.data())
    def keep(self, data: st.DataObject) -> None:
        written = self.write(data.draw(st.integers(1, min(self.cache.room, CAPACITY))))
        path = [0, *sorted(data.draw(st.sets(st.integers(1, len(written) - 1))))] if len(written) > 1 else [0]
        self.cache.keep(np.array(path))
        self.expected += [written[node] for node in path]

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        length = data.draw(st.integers(0, self.cache.length))
        self.cache.truncate(length)
        del self.expected[length:]

    @rule(data=st.data())
    def fit(self, data: st.DataObject) -> None:
        self.cache.fit(data.draw(st.integers(self.cache.length, self.cache.capacity)))

    @invariant()
    def rows_are_those_of_the_list(self) -> None:
        assert self.cache.length == len(self.expected)
        assert self.cache.room == self.cache.capacity - len(self.expected)
        self.check_rows()


class StatesMachine(CacheMachine):
    """A state is a number that depends on each tag of the text so far, in their order."""

    def __init__(self) -> None:
        super().__init__()
        self.cache: StateCache = StateCache(LAYERS, CAPACITY, HELD, 1, (1,))

    def write(self, count: int) -> list[int]:
        tags = [next(self.tags) for _ in range(count)]
        self.cache.make_room(count)
        before, after = self.cache._states
        end = self.cache.count
        after[:, 0] = folded(self.cache.rows[0, HELD:end, 0].tolist(), int(before[0, 0]))
        self.cache.rows[:, end : end + count, 0] = tags
        self.cache.computed()
        return tags

    @rule()
    def mark(self) -> None:
        self.cache.mark()

    @rule(data=st.data())
    def truncate(self, data: st.DataObject) -> None:
        length = self.cache.reach(data.draw(st.integers(0, self.cache.length)))
        self.cache.truncate(length)
        del self.expected[length:]

    @precondition(lambda self: self.cache.length > 0)
    @rule(data=st.data())
    def copy(self, data: st.DataObject) -> None:
        """To a new cache, which goes on; the text may lose its end."""
        length = self.cache.reach(data.draw(st.integers(0, self.cache.length)))
        arrays = self.cache.read(length)
        self.cache = StateCache(LAYERS, CAPACITY, HELD, 1, (1,))
        self.cache.write(arrays)
        del self.expected[length:]

    def check_rows(self) -> None:
        cache, text = self.cache, [0] * HELD + self.expected
        cache.make_room(0)
        assert (cache._states[0] == folded(self.expected[: cache.base])).all()
        assert (cache.rows[:, : cache.count, 0] == text[cache.base :]).all()
        assert cache.nbytes >= cache.rows.nbytes


def folded(tags: list[int], state: int = 0) -> int:
    for tag in tags:
        state = (3 * state + tag) % 65521
    return state


class RowsMachine(CacheMachine):
    def __init__(self) -> None:
        super().__init__()
        self.cache: KVCache = KVCache(LAYERS, CAPACITY, HEADS, WIDTH, np.float64)

    def write(self, count: int) -> list[int]:
        tags = [next(self.tags) for _ in range(count)]
        self.cache.rows[:, self.cache.length : self.cache.length + count] = marks(tags)
        return tags

    def check_rows(self) -> None:
        np.testing.assert_array_equal(self.cache.rows[:, : self.cache.length], marks(self.expected))


class HeadMajorMachine(CacheMachine):
    """With many rows, so that the layout grows."""

    dtype: npt.DTypeLike = np.float32
    native = False

    def __init__(self) -> None:
        super().__init__()
        shape = LAYERS, MANY, HEADS, WIDTH, PIECES
        self.cache: HeadMajorCache = HeadMajorCache(*shape, self.dtype, native=self.native)

    def write(self, count: int) -> list[int]:
        tags = [next(self.tags) for _ in range(count)]
        self.cache.expect(count)
        for array, content in zip(self.cache.written, self.contents(tags), strict=True):
            assert array.flags.c_contiguous and array.ctypes.data % ALIGNMENT == 0
            array[:] = content
        return tags

    def contents(self, tags: list[int]) -> list[npt.NDArray[np.generic]]:
        """Returns what each array holds of rows, [layers, rows, heads, width]: keys, values and, of bytes, scales."""
        rows = marks(tags)
        return [rows[0::2], rows[1::2]]

    def check_rows(self) -> None:
        for array, content in zip(self.cache.arrays, self.contents(self.expected), strict=True):
            held = np.moveaxis(array[:, :, :, : self.cache.length], 3, 1)
            np.testing.assert_array_equal(held.reshape(content.shape), content)

    @invariant()
    def arrays_are_where_the_cache_says(self) -> None:
        assert self.cache.columns >= max(1, self.cache.length) and self.cache.columns % STEP == 0
        for array in self.cache.arrays:
            assert all(layer.flags.c_contiguous for layer in array)
            assert array.ctypes.data % ALIGNMENT == 0
            assert self.native or not array[:, :, :, self.cache.length :].any()
        assert self.cache.past == place_of(self.cache)
        written = self.cache.written
        assert self.cache.new == (*(array.ctypes.data for array in written), written[0].shape[1])


class NativeMachine(HeadMajorMachine):
    """For native operators, which read committed columns alone, so that the others hold what they held, and put rows
    where they belong."""

    native = True

    @invariant()
    def the_layout_grows_alone(self) -> None:
        assert self.cache.columns >= getattr(self, "most", 0)
        self.most = self.cache.columns

    def write(self, count: int) -> list[int]:
        tags = [next(self.tags) for _ in range(count)]
        self.cache.expect(count)
        self.cache.make_room(count)
        end = self.cache.length + count
        for array, content in zip(self.cache.arrays, self.contents(tags), strict=True):
            heads, pieces, width = array.shape[1], array.shape[2], array.shape[4]
            rows = content.reshape(LAYERS, count, heads, pieces, width)
            array[:, :, :, self.cache.length : end] = np.moveaxis(rows, 1, 3)
        return tags


class Int8Machine(HeadMajorMachine):
    """With bytes and scales."""

    dtype = np.int8

    def contents(self, tags: list[int]) -> list[npt.NDArray[np.generic]]:
        rows = marks(tags)
        whole = (64 * rows % 251 - 125).astype(np.int8)
        return [whole[0::2], whole[1::2], rows[0::2, ..., :1], rows[1::2, ..., :1]]


class MixedMachine(CacheMachine):
    """Two caches of rows, of one and of two heads, that are one."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [KVCache(LAYERS, CAPACITY, heads, WIDTH, np.float64) for heads in (HEADS, 1)]
        self.cache: MixedCache = MixedCache(self.parts)

    def write(self, count: int) -> list[int]:
        tags = [next(self.tags) for _ in range(count)]
        self.cache.make_room(count)
        for part in self.parts:
            heads = part.rows.shape[2]
            part.rows[:, self.cache.length : self.cache.length + count] = marks(tags)[:, :, :heads]
        return tags

    def check_rows(self) -> None:
        for rows, heads in zip(self.cache.read(), (HEADS, 1), strict=True):
            np.testing.assert_array_equal(rows, marks(self.expected)[:, :, :heads])


class MixedHeadMajorMachine(CacheMachine):
    """The same with caches that keep heads apart, as a portable graph writes them."""

    def __init__(self) -> None:
        super().__init__()
        self.parts = [HeadMajorCache(LAYERS, MANY, heads, WIDTH, PIECES) for heads in (HEADS, 1)]
        self.cache: MixedCache = MixedCache(self.parts)

    def write(self, count: int) -> list[int]:
        tags = [next(self.tags) for _ in range(count)]
        self.cache.make_room(count)
        for part, heads in zip(self.cache.each(), (HEADS, 1), strict=True):
            assert isinstance(part, HeadMajorCache)
            part.expect(count)
            for array, content in zip(part.written, (marks(tags)[0::2], marks(tags)[1::2]), strict=True):
                array[:] = content[:, :, :heads]
        return tags

    def check_rows(self) -> None:
        read = iter(self.cache.read())
        for heads in (HEADS, 1):
            for content in (marks(self.expected)[0::2], marks(self.expected)[1::2]):
                rows = next(read)
                np.testing.assert_array_equal(rows.reshape(*rows.shape[:2], heads, WIDTH), content[:, :, :heads])
        assert next(read, None) is None


def marks(tags: list[int]) -> npt.NDArray[np.float64]:
    """Returns the content of rows [2 * layers, rows, heads, width]: every number of every row is different."""
    places = np.arange(2 * LAYERS * HEADS * WIDTH).reshape(2 * LAYERS, 1, HEADS, WIDTH) / 64
    return places + np.array(tags, np.float64)[:, None, None]


TestRows, TestHeadMajor, TestInt8 = RowsMachine.TestCase, HeadMajorMachine.TestCase, Int8Machine.TestCase
TestNative = NativeMachine.TestCase
TestStates = StatesMachine.TestCase
TestMixed, TestMixedHeadMajor = MixedMachine.TestCase, MixedHeadMajorMachine.TestCase
TestRows.settings = TestHeadMajor.settings = TestInt8.settings = TestNative.settings = settings(
    max_examples=40, stateful_step_count=15, deadline=None
)
TestMixed.settings = TestMixedHeadMajor.settings = TestStates.settings = TestRows.settings


def test_rows_of_a_mixed_cache_are_read_and_written() -> None:
    """Rows of another model change nothing; an interrupt between two parts neither."""
    parts = [[KVCache(LAYERS, CAPACITY, heads, WIDTH) for heads in (HEADS, 1)] for _ in range(2)]
    first, second = map(MixedCache, parts)
    for part in parts[0]:
        part.rows[:] = np.arange(CAPACITY, dtype=np.float32)[:, None, None]
    first.advance(5)
    second.write(first.read())
    assert second.length == 5 and second.token_bytes == sum(part.token_bytes for part in second.parts)
    for mine, other in zip(second.read(), first.read(), strict=True):
        np.testing.assert_array_equal(mine, other)
    with pytest.raises(ValueError, match="do not fit a cache"):
        second.write(first.read()[:1])
    assert second.length == 5
    second.parts[1].length = 2  # as an interrupt between two parts would leave it
    second.truncate(4)
    assert [part.length for part in second.parts] == [4, 4]
    second.pretend(7)
    assert (second.length, second.room) == (7, CAPACITY - 7)


def test_a_head_major_cache_shrinks_when_it_is_emptied() -> None:
    cache = HeadMajorCache(LAYERS, 20 * STEP, HEADS, WIDTH, PIECES)
    assert cache.columns == STEP
    cache.pretend(18 * STEP)
    assert (cache.length, cache.columns) == (18 * STEP, 20 * STEP)
    cache.truncate(0)
    assert (cache.length, cache.columns) == (0, STEP)


@pytest.mark.parametrize("native", [False, True])
def test_an_interrupt_while_rows_move_leaves_none(native: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Half of them would be of another place, and a text that goes on would read them."""
    cache = HeadMajorCache(LAYERS, 20 * STEP, HEADS, WIDTH, PIECES, native=native)
    cache.pretend(STEP)
    show = cache._show

    def interrupted(columns: int) -> None:
        show(columns)
        raise KeyboardInterrupt

    monkeypatch.setattr(cache, "_show", interrupted)
    with pytest.raises(KeyboardInterrupt):
        cache._lay_out(15 * STEP)
    assert cache.length == 0


def test_a_layout_stays_where_columns_that_are_not_committed_are_not_read() -> None:
    """Sessions bind it anew for every number of rows where it changes."""
    cache = HeadMajorCache(LAYERS, 20 * STEP, HEADS, WIDTH, PIECES, native=True)
    place = cache.past
    for length in (1, 3 * STEP, 0, 2 * STEP):
        cache.pretend(length)
        assert cache.past is place
    cache.pretend(4 * STEP)
    assert cache.columns == 8 * STEP
    cache.truncate(0)
    cache.shrink()
    assert cache.columns == cache.nbytes == 0


@pytest.mark.parametrize("native", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.int8])
def test_memory_that_a_shorter_text_does_not_need_is_freed(native: bool, dtype: npt.DTypeLike) -> None:
    """Otherwise a server's conversations all come to hold as much as the longest text that each of them ever had."""
    cache = TightHeads(LAYERS, 20 * STEP, HEADS, WIDTH, PIECES, dtype, native=native)
    cache.pretend(18 * STEP)
    for number, array in enumerate(cache.arrays):
        array[:] = np.arange(array.size, dtype=np.int64).reshape(array.shape) % 120 + number
    cache.truncate(STEP + 3)
    before, most = cache.read(), cache.nbytes
    cache.fit(11 * STEP)
    assert cache.nbytes == most
    cache.fit(8 * STEP)
    assert cache.nbytes == most * 8 // 20
    cache.fit(STEP + 3)
    assert cache.nbytes == most * FIRST // (20 * STEP)
    for array, kept in zip(cache.read(), before, strict=True):
        np.testing.assert_array_equal(array, kept)
    assert cache.past == place_of(cache)
    assert cache.columns <= FIRST and (native or not any(a[:, :, :, cache.length :].any() for a in cache.arrays))
    with pytest.raises(AssertionError):
        cache.fit(STEP)


def test_rows_of_memory_that_a_shorter_text_does_not_need_are_freed() -> None:
    cache = TightRows(LAYERS, 4 * FIRST, HEADS, WIDTH)
    cache.make_room(4 * FIRST)
    cache.rows[:] = np.arange(4 * FIRST, dtype=np.float32)[:, None, None]
    cache.advance(5)
    cache.fit(3 * FIRST)
    assert cache.rows.shape[1] == 4 * FIRST
    cache.fit(6)
    assert cache.rows.shape[1] == FIRST and cache.addresses[0] == cache.rows.ctypes.data
    np.testing.assert_array_equal(cache.rows[0, :5, 0, 0], range(5))


def test_memory_that_is_soon_needed_again_is_kept() -> None:
    """Taking it anew takes as long as some tokens."""
    cache = HeadMajorCache(LAYERS, 20 * STEP, HEADS, WIDTH, PIECES, native=True)
    cache.pretend(18 * STEP)
    cache.truncate(0)
    place = cache.past
    cache.fit(1)
    assert cache.past is place
    rows = 1 + KEPT // cache.token_bytes // STEP * STEP
    large = HeadMajorCache(LAYERS, 2 * rows, HEADS, WIDTH, PIECES, native=True)
    large.pretend(rows)
    large.truncate(0)
    large.fit(1)
    assert large.nbytes == FIRST * large.token_bytes


def test_caches_of_a_session_share_the_place_of_new_rows() -> None:
    first = HeadMajorCache(LAYERS, 20 * STEP, HEADS, WIDTH, PIECES)
    second = HeadMajorCache(LAYERS, 20 * STEP, HEADS, WIDTH, PIECES, new_rows=first.new_rows)
    for tag, cache in enumerate((first, second), 1):
        cache.expect(2)
        for array in cache.written:
            array[:] = tag
        cache.advance(2)
    assert first.new == second.new
    assert (first.read()[0] == 1).all() and (second.read()[1] == 2).all()


@pytest.mark.skipif(sys.platform != "linux", reason="another system does not tell")
def test_the_system_has_the_memory_of_a_large_array_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")

    size = 16 << 20  # which malloc keeps once it has seen some
    kept = []
    before = resident()
    for _ in range(4):
        array = aligned_empty((size,), np.uint8)
        array[:] = 1
        kept.append(aligned_empty((64,), np.uint8))  # after it in malloc's memory, which it would hold
        del array
    assert resident() - before < size // 2


def test_keys_and_values_are_contiguous_arrays() -> None:
    """Sessions bind them by address."""
    cache = KVCache(LAYERS, CAPACITY, HEADS, WIDTH)
    assert cache.rows.shape == (2 * LAYERS, CAPACITY, HEADS, WIDTH)
    assert cache.rows.flags.c_contiguous and cache.rows.dtype == np.float32
    assert cache.rows.ctypes.data % ALIGNMENT == 0
    assert (cache.length, cache.room) == (0, CAPACITY)


def test_keep_leaves_other_rows_alone() -> None:
    cache = KVCache(LAYERS, CAPACITY, HEADS, WIDTH)
    cache.rows[:] = np.arange(CAPACITY, dtype=np.float32)[:, None, None]
    cache.advance(4)
    before = cache.rows.copy()
    cache.keep(np.array([0, 2, 5]))
    assert cache.length == 7
    np.testing.assert_array_equal(cache.rows[0, :, 0, 0], [0, 1, 2, 3, 4, 6, 9, 7, 8, 9, 10, 11])
    np.testing.assert_array_equal(cache.rows[:, 7:], before[:, 7:])


@pytest.mark.parametrize(
    "step",
    [
        lambda cache: cache.advance(CAPACITY - 5 + 1),
        lambda cache: cache.advance(-1),
        lambda cache: cache.truncate(6),
        lambda cache: cache.truncate(-1),
        lambda cache: cache.keep(np.arange(CAPACITY - 5 + 1)),
        lambda cache: cache.keep(np.array([1, 2])),
    ],
    ids=["past the end", "backwards", "longer than it is", "below zero", "a path past the end", "without the root"],
)
def test_lengths_out_of_bounds_are_refused(step: Callable[[KVCache], Any]) -> None:
    cache = KVCache(LAYERS, CAPACITY, HEADS, WIDTH)
    cache.advance(5)
    with pytest.raises(AssertionError):
        step(cache)
    assert cache.length == 5


def test_the_whole_capacity_is_usable() -> None:
    cache = KVCache(LAYERS, CAPACITY, HEADS, WIDTH)
    cache.advance(CAPACITY)
    assert cache.room == 0
    cache.truncate(CAPACITY)
    cache.truncate(0)
    cache.keep(np.arange(CAPACITY))
    assert cache.room == 0


def place_of(cache: HeadMajorCache) -> tuple[int, ...]:
    """Where its arrays begin, their columns, and the bytes from one layer to the next."""
    starts = [array.ctypes.data for array in cache.arrays]
    steps = [array.strides[0] for array in cache.arrays]
    return (*starts, cache.columns, *steps)


def test_memory_of_another_size_at_the_same_address_is_bound_anew(
    bundle_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that was freed comes back smaller where it was: its first layer lies where it lay, the others do not."""
    stores = [np.zeros(1 << 24, np.uint8) for _ in range(2)]  # keys and values
    turn = itertools.cycle(stores)

    def same(shape: tuple[int, ...], dtype: npt.DTypeLike) -> npt.NDArray[np.generic]:
        if len(shape) != 2:
            return aligned_empty(shape, dtype)
        return next(turn)[: math.prod(shape) * np.dtype(dtype).itemsize].view(dtype).reshape(shape)

    monkeypatch.setattr(cache_module, "aligned_empty", same)
    rng = np.random.default_rng(0)
    with EagleModel.load(bundle_of("eagle1", "int8"), threads=1, backend="cpu") as model:
        target = Target(sessions_of(model)[0], 600)
        target.prefill(rng.integers(0, 100, 2 * FIRST).tolist())
        text, seen = rng.integers(0, 100, 40).tolist(), []
        for _ in range(2):
            target.prefill(text)
            logits, _ = target.verify(root_only(7))
            assert isinstance(target.cache, HeadMajorCache)
            seen.append((np.array(logits), target.cache.past))
            target.cache.truncate(0)
            target.cache.shrink()
        assert seen[0][1][:3] == seen[1][1][:3]
        np.testing.assert_array_equal(seen[0][0], seen[1][0])
