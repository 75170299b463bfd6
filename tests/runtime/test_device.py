"""Rows and caches on a fake GPU against the same on the host, and padding, which changes shapes alone."""

from __future__ import annotations

import itertools

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuda_fake import FakeDriver
from eagle_runtime.cache import KVCache
from eagle_runtime.session.trt.device import Device, DeviceCache, DeviceRows, empty_rows, in_place, joined_rows, runs
from eagle_runtime.session.trt.padding import (
    HEAD_ROWS,
    PAST_STEP,
    TARGET_ROWS,
    TREE_ROWS,
    PassShape,
    Steps,
    pass_shape,
    past_steps,
    round_up,
    shapes_of,
    write_ids,
    write_mask,
)
from eagle_runtime.tree import Bool, additive_mask

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
    cache = DeviceCache(device, layers, 20, 2 * 8 * 4)
    host.rows[:] = 0
    for committed, count in ((0, length), (length, 10)):
        new = rng.standard_normal((2 * layers, 16, 2, 8)).astype(np.float32)  # T padded to 16
        host.rows[:, committed : committed + count] = new[:, :count]
        written = on_device(device, new.reshape(2 * layers, -1))
        cache.append(written.address, written.row_bytes, count)
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


def test_keeping_a_path_takes_one_copy_per_moved_row() -> None:
    driver = FakeDriver()
    cache = DeviceCache(Device(driver), 32, 100, 256)
    cache.advance(7)
    before = len(driver.calls)
    cache.keep(np.array([0, 1, 4, 5, 9]))
    assert [call[0] for call in driver.calls[before:]] == ["copy_2d"] * 3
    cache.keep(np.array([0, 1, 2]))
    assert len(driver.calls) == before + 3, "rows that are already adjacent are not copied"


def test_the_memory_of_a_cache_is_freed_with_it() -> None:
    driver = FakeDriver()
    device = Device(driver)
    used = driver.used
    cache = DeviceCache(device, 2, 100, 256)
    assert driver.used - used == 4 * round_up(100 + 64, PAST_STEP) * 256
    assert cache.address(3) % 256 == 0 and in_place(256) and not in_place(128)
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


@given(
    rows=st.integers(1, 40),
    past=st.integers(0, 700),
    seen=st.integers(0, 60),
    steady=st.booleans(),
    data=st.data(),
)
def test_padding_changes_nothing_that_a_row_sees(
    rows: int, past: int, seen: int, steady: bool, data: st.DataObject
) -> None:
    """A mask covers the last columns of all keys; every row sees those before."""
    seen = min(seen, past)
    rng = np.random.default_rng(data.draw(st.integers(0, 9)))
    visible = rng.random((rows, seen + rows)) < 0.5
    visible[np.arange(rows), seen + np.arange(rows)] = True
    shape = pass_shape(Steps(TARGET_ROWS, past_steps(700) if steady else (), 128), rows, past, seen + rows, rows)
    padded, padded_past, columns = shape["T"], shape["P"], shape["L"]
    assert padded in TARGET_ROWS and rows <= padded <= columns <= padded_past + padded and padded_past >= max(past, 1)
    mask = np.empty((padded, columns), np.float16)
    write_mask(additive_mask(visible, np.float16), past, shape, mask)
    sees = visibility(mask, shape)
    expected = np.zeros((rows, padded_past + padded), np.bool_)
    expected[:, : past - seen] = True
    expected[:, past - seen : past] = visible[:, :seen]
    expected[:, padded_past : padded_past + rows] = visible[:, seen:]
    assert np.array_equal(sees[:rows], expected)
    spare = np.arange(rows, padded)
    assert sees[spare, padded_past + spare].all() and sees[rows:, padded_past:].sum() == len(spare)


def visibility(mask: npt.NDArray[np.floating], shape: PassShape) -> Bool:
    """Returns which keys each row sees [T, P + T], from mask [T, L]."""
    return np.concatenate([np.ones((shape["T"], shape["P"] + shape["T"] - shape["L"])), mask == 0], axis=1) > 0


def test_shapes_repeat_while_the_past_grows() -> None:
    """All shapes of a generation up to a context of 4096 tokens are among those that are specialised at load."""
    target, head = Steps(TARGET_ROWS, past_steps(4096), 128), Steps(HEAD_ROWS, past_steps(4096 + 512), 128)
    pasts = range(4096 - 64)
    verifying = {pass_shape(target, rows, past, rows, rows) for past in pasts for rows in (1, 16, 30, 60)}
    reading = {pass_shape(target, rows, past, rows, 1) for past in range(0, 4096, 512) for rows in (7, 60, 100, 512)}
    growing = {pass_shape(head, 10, past + 10 * i, 10 * i + 10, 10) for past in pasts for i in range(20)}
    catching_up = {pass_shape(head, rows, past, rows, 1) for past in range(4352) for rows in (1, 60, 256)}
    assert verifying | reading == set(shapes_of(target)) and len(shapes_of(target)) == 25
    assert growing | catching_up == set(shapes_of(head)) and len(shapes_of(head)) == 18
    wide = pass_shape(target, TREE_ROWS + 1, 300, TREE_ROWS + 1, TREE_ROWS + 1)
    assert wide.sizes == {"T": 512, "P": 512, "L": 1024, "R": 128} and wide not in shapes_of(target)


def test_ids_are_padded_with_zeros() -> None:
    out = np.full(6, -1, np.int64)
    write_ids(np.array([5, 6, 7]), out)
    assert out.tolist() == [5, 6, 7, 0, 0, 0]
