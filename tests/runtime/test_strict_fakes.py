"""The fake GPU and the fake library refuse what the real ones do not survive; otherwise a session that does it would
pass every test on them."""

from __future__ import annotations

import gc
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuda_fake import FakeDriver
from eagle_runtime.base.errors import BackendError
from eagle_runtime.bundle.manifest import read_manifest
from trt_fake import FakeConfig, FakeContext, FakeRuntime, Strategy, fake_library, write_fake_engines

SIZES = {"T": 1, "P": 256, "R": 1}


@pytest.fixture
def driver() -> FakeDriver:
    return FakeDriver()


# Memory, streams and graphs.


def test_device_memory_is_used_inside_one_live_allocation(driver: FakeDriver) -> None:
    stream, first, second = driver.create_stream(), driver.allocate(512), driver.allocate(512)
    host = driver.allocate_host(512)
    for address, nbytes in ((first + 256, 257), (second - 1, 2), (12345, 1)):
        with pytest.raises(BackendError, match="are not allocated on the device"):
            driver.upload(address, host, nbytes, stream)
    driver.free(first)
    uses: list[Callable[[], None]] = [
        lambda: driver.clear(first, 8, stream),
        lambda: driver.download(host, first, 8, stream),
        lambda: driver.copy(second, first, 8, stream),
    ]
    for use in uses:
        with pytest.raises(BackendError, match="are not allocated on the device"):
            use()
    with pytest.raises(BackendError, match="no device memory begins at"):
        driver.free(first)
    assert driver.allocate(512) != first, "or a stale address would point to new memory"


def test_memory_is_not_freed_while_work_is_queued(driver: FakeDriver) -> None:
    stream, place, host = driver.create_stream(), driver.allocate(512), driver.allocate_host(512)
    driver.upload(place, host, 512, stream)
    with pytest.raises(BackendError, match="device memory is freed while work is queued"):
        driver.free(place)
    with pytest.raises(BackendError, match="page-locked memory is freed while work is queued"):
        driver.free_host(host)


def test_page_locked_memory_is_not_used_after_it_was_freed(driver: FakeDriver) -> None:
    stream, place, host = driver.create_stream(), driver.allocate(1024), driver.allocate_host(512)
    with pytest.raises(BackendError, match="exceed their page-locked memory"):
        driver.upload(place, host, 513, stream)
    driver.free_host(host)
    with pytest.raises(BackendError, match="is used after it was freed"):
        driver.upload(place, host + 256, 8, stream)
    with pytest.raises(BackendError, match="is used after it was freed"):
        driver.download(host, place, 512, stream)
    with pytest.raises(BackendError, match="no page-locked memory begins at"):
        driver.free_host(host)


def test_a_graph_does_not_use_memory_that_was_freed_after_its_capture(driver: FakeDriver) -> None:
    stream, place = driver.create_stream(), driver.allocate(512)

    def queue() -> bool:
        driver.clear(place, 512, stream)
        return True

    graph = driver.capture(stream, queue)
    assert graph is not None
    driver.free(place)
    driver.launch(graph, stream)
    with pytest.raises(BackendError, match="are not allocated on the device"):
        driver.synchronize(stream)


def test_a_destroyed_graph_is_neither_launched_nor_destroyed(driver: FakeDriver) -> None:
    stream = driver.create_stream()
    graph = driver.capture(stream, lambda: True)
    assert graph is not None
    driver.launch(graph, stream)
    driver.destroy_graph(graph)
    with pytest.raises(BackendError, match=f"graph {graph} is launched, but no longer exists"):
        driver.launch(graph, stream)
    with pytest.raises(BackendError, match=f"graph {graph} is destroyed, but no longer exists"):
        driver.destroy_graph(graph)
    assert driver.capture(stream, lambda: True) != graph


def test_a_stream_exists_while_it_is_used_and_is_not_waited_for_while_it_is_captured(driver: FakeDriver) -> None:
    stream, place = driver.create_stream(), driver.allocate(512)

    def wait() -> bool:
        driver.synchronize(stream)
        return True

    with pytest.raises(BackendError, match="synchronised while it is captured"):
        driver.capture(stream, wait)
    driver.destroy_stream(stream)
    with pytest.raises(BackendError, match="there is no stream"):
        driver.clear(place, 8, stream)
    for use in (driver.synchronize, driver.destroy_stream):
        with pytest.raises(BackendError, match="there is no stream"):
            use(stream)
    with pytest.raises(BackendError, match="there is no stream 0; the default one is never used"):
        driver.synchronize(0)


def test_copies_do_not_overlap(driver: FakeDriver) -> None:
    stream, place = driver.create_stream(), driver.allocate(512)
    with pytest.raises(BackendError, match="a copy overlaps itself"):
        driver.copy(place, place + 8, 16, stream)
    with pytest.raises(BackendError, match="wider than their pitch"):
        driver.copy_2d(place, 8, place + 256, 16, 12, 2, stream)


# Engines.


class Bound:
    """An execution context of a fake target engine, with everything bound that a forward pass needs."""

    def __init__(self, bundle: Path, driver: FakeDriver) -> None:
        self.driver, self.stream = driver, driver.create_stream()
        library = fake_library(driver, "tensorrt-rtx")
        folder = write_fake_engines(bundle, "tensorrt-rtx", 300)
        self.runtime = FakeRuntime(driver, library, library.Logger())
        engine = self.runtime.deserialize_cuda_engine((folder.folder / "target.engine").read_bytes())
        assert engine is not None
        self.engine = engine
        config = FakeConfig(Strategy.USER_MANAGED)
        self.context: Any = FakeContext(engine, config)
        self.scratch = driver.allocate(engine.device_memory_size_v2)
        self.context.set_device_memory(self.scratch, engine.device_memory_size_v2)
        graph = read_manifest(bundle).target.graph
        self.addresses = {name: driver.allocate(engine.graph.nbytes(name, SIZES)) for name in engine.graph.tensors}
        for name, address in self.addresses.items():
            driver.clear(address, engine.graph.nbytes(name, SIZES), self.stream)
            assert self.context.set_tensor_address(name, address)
        for name in engine.graph.inputs:
            assert self.context.set_input_shape(name, tuple(engine.graph.shape(name, SIZES)))
        self.past, self.present = graph.past, graph.present

    @property
    def complaints(self) -> str:
        """What the library logged."""
        return "; ".join(self.runtime.logger.messages)


@pytest.fixture
def bound(bundle_of: Callable[..., Path], tmp_path: Path, driver: FakeDriver) -> Bound:
    return Bound(Path(shutil.copytree(bundle_of("eagle1"), tmp_path / "bundle")), driver)


def test_control_a_forward_pass_that_breaks_no_rule_runs(bound: Bound) -> None:
    assert bound.context.execute_async_v3(bound.stream)
    bound.driver.synchronize(bound.stream)
    logits = bound.driver.device(bound.addresses["logits"], 4).view(np.float32)
    assert np.isfinite(logits).all()


def test_every_address_and_shape_is_set(bound: Bound) -> None:
    context = FakeContext(bound.engine, FakeConfig(Strategy.STATIC))
    assert not context.execute_async_v3(bound.stream)
    assert "'embeds'" in bound.complaints.split("missing shapes of")[1].split("addresses of")[0]
    assert "'embeds'" in bound.complaints.split("addresses of")[1]
    assert not context.set_tensor_address("embeds", bound.addresses["embeds"] + 8)
    assert "is not aligned" in bound.complaints


def test_shapes_lie_in_the_profile(bound: Bound) -> None:
    for shape in ((1, 65), (1, 0), (2, 1), (1,)):
        assert not bound.context.set_input_shape("position_ids", shape), "more than the first profile serves"
    assert "is outside of profile" in bound.complaints
    assert bound.context.set_optimization_profile_async(1, bound.stream)
    assert bound.context.set_input_shape("position_ids", (1, 65))
    assert not bound.context.execute_async_v3(bound.stream), "a new profile has no shapes yet"
    with pytest.raises(RuntimeError, match="Error in set optimization profile async"):
        bound.context.set_optimization_profile_async(2, bound.stream)
    assert not bound.context.set_input_shape("no_such_input", (1, 1))


def test_new_rows_are_not_written_over_the_past_that_is_read(bound: Bound) -> None:
    """As a session would do that writes rows in place where they do not belong."""
    bound.context.set_tensor_address(bound.present[0], bound.addresses[bound.past[0]] + 256)
    with pytest.raises(BackendError, match="overlap, and a kernel writes one of them"):
        bound.context.execute_async_v3(bound.stream)
    bound.context.set_tensor_address(bound.present[0], bound.addresses["logits"])
    with pytest.raises(BackendError, match="overlap, and a kernel writes one of them"):
        bound.context.execute_async_v3(bound.stream)


def test_tensors_and_scratch_memory_are_not_freed_before_a_forward_pass(bound: Bound) -> None:
    bound.driver.synchronize(bound.stream)
    bound.driver.free(bound.scratch)
    with pytest.raises(BackendError, match="are not allocated on the device"):
        bound.context.execute_async_v3(bound.stream)
    with pytest.raises(BackendError, match="are not allocated on the device"):
        bound.context.set_device_memory(bound.scratch, 4096)
    other = bound.driver.allocate(4096)
    bound.context.set_device_memory(other, 4095)
    with pytest.raises(BackendError, match="4096 bytes of scratch memory are needed"):
        bound.context.execute_async_v3(bound.stream)
    bound.context.set_device_memory(other, 4096)
    bound.driver.free(bound.addresses["features"])
    with pytest.raises(BackendError, match="are not allocated on the device"):
        bound.context.execute_async_v3(bound.stream)


@pytest.mark.parametrize("captured", [False, True])
def test_a_context_is_not_freed_before_its_work_and_its_graphs(bound: Bound, captured: bool) -> None:
    assert bound.context.execute_async_v3(bound.stream)
    if captured:
        graph = bound.driver.capture(bound.stream, lambda: bool(bound.context.execute_async_v3(bound.stream)))
        bound.driver.synchronize(bound.stream)
        assert graph is not None
        bound.driver.launch(graph, bound.stream)
    bound.context = None
    gc.collect()
    with pytest.raises(BackendError, match="runs after its execution context was freed"):
        bound.driver.synchronize(bound.stream)


def test_the_budget_of_streamed_weights_is_set_before_a_context_exists(bound: Bound) -> None:
    with pytest.raises(RuntimeError, match="while there are execution contexts"):
        bound.engine.weight_streaming_budget_v2 = 0
    bound.driver.synchronize(bound.stream)
    bound.context = None
    gc.collect()
    bound.engine.weight_streaming_budget_v2 = 0
    with pytest.raises(RuntimeError, match="cannot be"):
        bound.engine.weight_streaming_budget_v2 = bound.engine.streamable_weights_size + 1


def test_a_damaged_cache_of_kernels_is_refused() -> None:
    cache = FakeConfig().create_runtime_cache()
    assert not cache.deserialize(b"\xff") and cache.deserialize(json.dumps([[["T", 1]]]).encode())
    assert cache.shapes == {(("T", 1),)} and cache.reset() and not cache.shapes
