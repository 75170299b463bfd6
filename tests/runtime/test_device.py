"""Rows and caches on a fake GPU against the same on the host, and padding, which changes shapes alone."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_fake import FakeDriver
from eagle_runtime.base.tree import additive_mask
from eagle_runtime.core.cache import KVCache
from eagle_runtime.trt.device import Device, DeviceCache, DeviceRows, Staged, empty_rows, joined_rows, runs
from eagle_runtime.trt.fixed_shapes import (
    HEAD_ROWS,
    PAST_STEP,
    TARGET_ROWS,
    TREE_ROWS,
    Steps,
    pass_shape,
    past_steps,
    round_up,
    shapes_of,
    write_ids,
    write_masks,
    write_seen,
)
from eagle_runtime.trt.inputs import GAP, merged

WIDTH = 3


def on_device(device: Device, values: npt.NDArray[np.floating]) -> DeviceRows:
    rows = empty_rows(device, len(values), values.shape[1], values.dtype)
    device.driver.upload(rows.address, values.ctypes.data, values.nbytes, device.stream)
    device.wait()
    return rows


@pytest.fixture
def device() -> Device:
    return Device(FakeDriver())


# Rows.


def test_rows_are_indexed_as_in_numpy(device: Device) -> None:
    values = np.arange(30, dtype=np.float32).reshape(10, WIDTH)
    rows = on_device(device, values)
    assert len(rows) == 10 and np.array_equal(rows, values)
    for part in (slice(2, 5), slice(-1, None), slice(0, 0), slice(4, 100), slice(None)):
        assert np.array_equal(rows[part], values[part]) and len(rows[part]) == len(values[part])
    for index in ([0, 0, 0], [3, 1, 2], [4, 5, 6, 9], [], [9]):
        picked = np.array(index, np.int64)
        assert np.array_equal(rows[picked], values[picked])
        assert np.array_equal(rows[2:][picked[picked < 8]], values[2:][picked[picked < 8]])
    with pytest.raises(AssertionError, match="no such row"):
        rows[np.array([10])]
    assert np.asarray(rows, np.float64).dtype == np.float64


def test_indexed_rows_are_a_copy_and_slices_share_memory(device: Device) -> None:
    values = np.arange(12, dtype=np.float32).reshape(4, WIDTH)
    rows = on_device(device, values)
    picked, part = rows[np.array([1, 2])], rows[1:3]
    device.driver.clear(rows.address, rows.nbytes, device.stream)
    assert np.array_equal(picked, values[1:3]) and not np.asarray(part).any()


def test_joined_rows_are_a_copy(device: Device) -> None:
    values = np.arange(30, dtype=np.float16).reshape(10, WIDTH)
    rows = on_device(device, values)
    joined = joined_rows(device, [rows[7:], rows[:0], rows[np.array([1, 1])], rows])
    assert np.array_equal(joined, np.concatenate([values[7:], values[[1, 1]], values]))
    assert joined.dtype == np.float16


def test_memory_is_reused_once_no_slice_needs_it(device: Device) -> None:
    first = empty_rows(device, 4, WIDTH, np.float32)
    address, part = first.address, first[1:2]
    del first
    assert empty_rows(device, 4, WIDTH, np.float32).address != address
    del part
    taken = {empty_rows(device, 4, WIDTH, np.float32).address for _ in range(8)}
    assert len(taken) <= 2, "rows without references are reused"


@given(st.lists(st.integers(0, 12), max_size=12))
def test_runs_cover_the_index_in_order(index: list[int]) -> None:
    rows = np.array(index, np.int64)
    pieces = runs(rows)
    assert [first + i for _, first, count in pieces for i in range(count)] == index
    assert [place for place, _, _ in pieces] == np.cumsum([0, *(count for *_, count in pieces)])[:-1].tolist()


# The cache.


@given(
    length=st.integers(0, 5),
    path=st.sets(st.integers(1, 9), max_size=6).map(lambda nodes: [0, *sorted(nodes)]),
    layers=st.integers(1, 3),
)
def test_a_cache_keeps_the_rows_of_a_host_cache(length: int, path: list[int], layers: int) -> None:
    rng = np.random.default_rng(length)
    device = Device(FakeDriver())
    host = KVCache(layers, 20, 2, 8)
    written = empty_rows(device, 2 * layers, 16 * 2 * 8, np.float32)  # T padded to 16
    cache = DeviceCache(device, layers, 20, 2 * 8 * 4, Staged(written.address, written.row_bytes))
    host.rows[:] = 0
    for committed, count in ((0, length), (length, 10)):
        new = rng.standard_normal((2 * layers, 16, 2, 8)).astype(np.float32)
        host.rows[:, committed : committed + count] = new[:, :count]
        device.driver.upload(written.address, new.ctypes.data, new.nbytes, device.stream)
        device.wait()
        host.length = cache.length = committed
        host.advance(count)
        cache.advance(count)
    host.truncate(length)
    cache.truncate(length)
    kept = np.array(path, np.int64)
    host.keep(kept)
    cache.keep(kept)
    device.wait()
    for array in range(2 * layers):
        stored = device.driver.device(cache.address(array), 20 * cache.row_bytes).view(np.float32).reshape(20, 2, 8)  # type: ignore[attr-defined]
        assert np.array_equal(stored[: host.length], host.rows[array, : host.length])


def test_keeping_a_path_takes_one_copy_per_run_of_rows() -> None:
    driver = FakeDriver()
    device = Device(driver)
    cache = DeviceCache(device, 32, 100, 256, Staged.reserve(device, 64, 16, 256))
    cache.advance(7)
    before = len(driver.calls)
    cache.keep(np.array([0, 1, 4, 5, 9]))
    assert [call[0] for call in driver.calls[before:]] == ["copy_2d"] * 3


def test_the_memory_of_a_cache_is_freed_with_it() -> None:
    driver = FakeDriver()
    device = Device(driver)
    used = driver.used
    cache = DeviceCache(device, 2, 100, 256, Staged(0, 0))
    assert driver.used - used == 4 * round_up(100 + 64, PAST_STEP) * 256
    assert cache.address(3) % 256 == 0
    del cache
    assert driver.used == used
    device.release()


# Padding.


@given(st.integers(1, 40_000))
def test_padded_pasts_double(capacity: int) -> None:
    steps = past_steps(capacity)
    assert steps[0] == PAST_STEP and steps[-1] == round_up(capacity, PAST_STEP)
    assert all(2 * short == long for short, long in itertools.pairwise(steps[:-1]))
    assert len(steps) == 1 or steps[-2] < steps[-1] <= 2 * steps[-2]


@given(rows=st.integers(1, 40), past=st.integers(0, 700), causal=st.booleans(), seed=st.integers(0, 9))
def test_padding_changes_nothing_that_a_row_sees(rows: int, past: int, causal: bool, seed: int) -> None:
    """Masks cover the padded past and the padded rows; every row sees the whole past."""
    visible = np.random.default_rng(seed).random((rows, rows)) < 0.5
    visible[np.arange(rows), np.arange(rows)] = True
    shape = pass_shape(Steps(TARGET_ROWS, past_steps(700), 128), rows, past, rows).sizes
    padded, padded_past = shape["T"], shape["P"]
    assert padded in TARGET_ROWS and rows <= padded and padded_past >= max(past, 1)
    mask, past_mask = np.empty((padded, padded), np.float16), np.empty(padded_past, np.float16)
    write_masks(None if causal else additive_mask(visible, np.float16), past, mask, past_mask)
    assert np.array_equal(past_mask == 0, np.arange(padded_past) < past)
    sees = mask == 0
    assert np.array_equal(sees[:rows, :rows], np.tri(rows, dtype=np.bool_) if causal else visible)
    spare = np.arange(rows, padded)
    assert sees[spare, spare].all() and not sees[:rows, rows:].any()
    seen = np.empty(padded, np.float16)
    write_seen(rows, seen)
    assert np.array_equal(seen == 0, np.arange(padded) < rows)


def test_shapes_repeat_while_the_past_grows() -> None:
    """All shapes of a generation up to a context of 4096 tokens are among those that are specialised at load."""
    target, head = Steps(TARGET_ROWS, past_steps(4096), 128), Steps(HEAD_ROWS, past_steps(4096))
    pasts = range(4096 - 64)
    verifying = {pass_shape(target, rows, past, rows) for past in pasts for rows in (1, 16, 30, 60)}
    reading = {pass_shape(target, rows, past, 1) for past in range(0, 4096, 512) for rows in (7, 60, 100, 512)}
    drafting = {pass_shape(head, rows, past) for past in pasts for rows in (1, 6, 17, 64)}
    assert verifying | reading == set(shapes_of(target)) and len(shapes_of(target)) == 25
    assert drafting == set(shapes_of(head)) and len(shapes_of(head)) == 10
    wide = pass_shape(target, TREE_ROWS + 1, 300, TREE_ROWS + 1)
    assert wide.sizes == {"T": 512, "P": 512, "R": 128} and wide not in shapes_of(target)


@given(st.lists(st.tuples(st.integers(0, 20_000), st.integers(1, 5000)), max_size=6))
def test_copies_of_inputs_cover_what_was_written(lengths: list[tuple[int, int]]) -> None:
    """In order, and with gaps of less than a page alone."""
    pieces, end = [], 0
    for gap, size in lengths:
        pieces.append((end + gap, end + gap + size))
        end += gap + size
    joined = merged(pieces)
    assert all(any(start <= first and last <= stop for start, stop in joined) for first, last in pieces)
    assert all(later[0] - earlier[1] > GAP for earlier, later in itertools.pairwise(joined))
    assert sum(stop - start for start, stop in joined) <= sum(size for _, size in lengths) + GAP * len(pieces)


def test_ids_are_padded_with_zeros() -> None:
    out = np.full(6, -1, np.int64)
    write_ids(np.array([5, 6, 7]), out)
    assert out.tolist() == [5, 6, 7, 0, 0, 0]
