"""Sessions with rows in device memory against OrtSession. The device is "cpu", or one that copies what is bound on the
host, as a GPU does (copying_device.py)."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from copying_device import copying_sessions
from eagle_runtime import BackendError, EagleModel
from eagle_runtime.base.errors import EagleError
from eagle_runtime.base.tree import Tree, hiding
from eagle_runtime.bundle.manifest import GraphSpec, TensorSpec, read_manifest
from eagle_runtime.core.accept import accept
from eagle_runtime.core.cache import KVCache
from eagle_runtime.core.row_padding import pad_rows
from eagle_runtime.core.target import Target
from eagle_runtime.opening.opened import bundle_of_sessions
from eagle_runtime.ort.buffers import SPARE, Block, OrtCache, OrtMemory, OrtRows
from eagle_runtime.ort.device_session import KEYS, OrtDeviceSession, check_rows
from eagle_runtime.ort.library import open_graph
from eagle_runtime.ort.logits import COUNT, LogitMemory
from eagle_runtime.sampling.candidates import GREEDY_COUNT, DeviceLogits
from eagle_runtime.sampling.params import SamplingParams
from eagle_runtime.sampling.sampler import Sampler
from insides import sessions_of

KINDS = ("eagle1", "eagle3")


def device_model(bundle: Path, context: int = 512) -> EagleModel:
    """Returns a model with sessions on the device "cpu"."""
    manifest = read_manifest(bundle)
    memory = OrtMemory()
    target, head = (
        OrtDeviceSession(open_graph(bundle / graph.file, threads=1), bundle / graph.file, graph, memory)
        for graph in (model.graph for model in manifest.models.values())
    )
    return EagleModel(bundle_of_sessions(bundle, manifest, (target, head), context))


def copying_model(bundle: Path) -> EagleModel:
    """Returns a model with sessions on a device that copies what is bound on the host."""
    return EagleModel(bundle_of_sessions(bundle, read_manifest(bundle), copying_sessions(bundle), 512))


@pytest.fixture(scope="module")
def on_device(bundle_of: Callable[..., Path]) -> Iterator[Callable[[str, str], EagleModel]]:
    """Returns a function: kind, precision -> loaded model, shared by the tests of this file."""
    models: dict[tuple[str, str], EagleModel] = {}

    def model(kind: str, precision: str) -> EagleModel:
        if (kind, precision) not in models:
            models[kind, precision] = device_model(bundle_of(kind, precision))
        return models[kind, precision]

    yield model
    for loaded in models.values():
        loaded.close()


@pytest.mark.parametrize("precision", ["fp32", "fp16"])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_tokens_equal_those_of_the_host(
    kind: str,
    precision: str,
    temperature: float,
    on_device: Callable[[str, str], EagleModel],
    model_of: Callable[..., EagleModel],
    prompts: list[list[int]],
) -> None:
    """With all kinds of trees and without drafts, so that forward passes have many sizes, with and without padding."""
    device, host = on_device(kind, precision), model_of(kind, precision)
    accepted = 0
    for seed, prompt in enumerate(prompts[:2]):
        settings: dict[str, Any] = {"max_new_tokens": 24, "temperature": temperature, "seed": seed, "ignore_eos": True}
        expected = host.generate(prompt, method="vanilla", **settings).token_ids
        assert device.generate(prompt, method="vanilla", **settings).token_ids == expected
        for tree in ("dynamic", "static", "chain"):
            ours, theirs = (model.generate(prompt, tree=tree, **settings) for model in (device, host))
            assert ours.token_ids == expected
            assert ours.usage.accepted_per_depth == theirs.usage.accepted_per_depth
            accepted += sum(ours.usage.accepted_per_depth)
    assert accepted > 20, "the test needs accepted drafts"


@pytest.mark.parametrize("kind", KINDS)
def test_a_device_that_copies_inputs_when_they_are_bound_reads_those_of_this_pass(
    kind: str, bundle_of: Callable[..., Path], model_of: Callable[..., EagleModel], prompts: list[list[int]]
) -> None:
    """Passes of one row repeat their shapes, so that inputs bound in an earlier pass would serve, and be stale."""
    host = model_of(kind)
    accepted = 0
    with copying_model(bundle_of(kind)) as device:
        for seed, temperature in enumerate((0.0, 0.9)):
            settings: dict[str, Any] = {"max_new_tokens": 16, "temperature": temperature, "seed": seed}
            expected = host.generate(prompts[seed], method="vanilla", ignore_eos=True, **settings).token_ids
            drafts: list[dict[str, Any]] = [{"method": "vanilla"}, {"tree": "dynamic"}, {"tree": "chain"}]
            for draft in drafts:
                result = device.generate(prompts[seed], ignore_eos=True, **settings, **draft)
                assert result.token_ids == expected
                accepted += sum(result.usage.accepted_per_depth)
    assert accepted > 10, "the test needs accepted drafts"


@pytest.mark.parametrize("nodes", [9, 10, 11, 12])
def test_padding_rows_overwrite_no_other_layer(
    nodes: int, on_device: Callable[[str, str], EagleModel], model_of: Callable[..., EagleModel]
) -> None:
    """Padding rows are written after the capacity here. A second forward pass would read rows that they overwrote."""
    rng = np.random.default_rng(nodes)
    prompt = rng.integers(0, 256, 30).tolist()
    tree = Tree(rng.integers(0, 256, nodes), np.arange(-1, nodes - 1), np.zeros(nodes, np.float32))
    rows = []
    for model in (on_device("eagle1", "fp32"), model_of("eagle1")):
        target = Target(sessions_of(model)[0], len(prompt) + nodes)
        target.prefill(prompt)
        passes = [
            (np.array(logits), np.array(features)) for logits, features in (target.verify(tree) for _ in range(2))
        ]
        rows.append([np.concatenate(parts) for parts in zip(*passes, strict=True)])
    for ours, theirs in zip(*rows, strict=True):
        np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_the_context_is_used_to_its_last_row(
    bundle_of: Callable[..., Path], model_of: Callable[..., EagleModel], prompts: list[list[int]]
) -> None:
    with device_model(bundle_of("eagle1"), 61) as model:
        result = model.generate(prompts[0], max_new_tokens=100, ignore_eos=True)
    assert len(result.token_ids) == 61 - len(prompts[0])
    expected = model_of("eagle1").generate(prompts[0], max_new_tokens=len(result.token_ids), ignore_eos=True)
    assert result.token_ids == expected.token_ids


def test_a_prompt_of_several_chunks_is_joined_on_the_device(
    on_device: Callable[[str, str], EagleModel], model_of: Callable[..., EagleModel], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("eagle_runtime.core.target.PREFILL_CHUNK", 30)
    prompt = np.random.default_rng(3).integers(0, 256, 101).tolist()
    ours, theirs = (
        model.generate(prompt, tree="dynamic", max_new_tokens=24)
        for model in (on_device("eagle3", "fp32"), model_of("eagle3"))
    )
    assert ours.token_ids == theirs.token_ids
    assert ours.usage.accepted_per_depth == theirs.usage.accepted_per_depth


def test_scores_equal_those_of_the_host(
    on_device: Callable[[str, str], EagleModel], model_of: Callable[..., EagleModel]
) -> None:
    tokens = np.random.default_rng(4).integers(0, 256, 150).tolist()
    ours, theirs = (
        np.concatenate([piece.copy() for piece in model.score(tokens)])
        for model in (on_device("eagle1", "fp32"), model_of("eagle1"))
    )
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_log_probabilities_of_a_prompt_equal_those_of_the_host(
    on_device: Callable[[str, str], EagleModel], model_of: Callable[..., EagleModel]
) -> None:
    tokens = np.random.default_rng(4).integers(0, 256, 150).tolist()
    ours, theirs = (
        [token.logprob or 0.0 for token in model.generate(tokens, prompt_logprobs=0, max_new_tokens=1).prompt[1:]]
        for model in (on_device("eagle1", "fp32"), model_of("eagle1"))
    )
    np.testing.assert_allclose(ours, theirs, atol=2e-4)


def test_passes_of_several_rows_have_a_multiple_of_four_keys(
    on_device: Callable[[str, str], EagleModel], prompts: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    passes = []
    bind = OrtDeviceSession._bind_cache

    def recorded(self: Any, device: str, layers: Any, addresses: Any, length: int, rows: int) -> None:
        passes.append((length, rows))
        bind(self, device, layers, addresses, length, rows)

    monkeypatch.setattr(OrtDeviceSession, "_bind_cache", recorded)
    on_device("eagle1", "fp32").generate(prompts[1], max_new_tokens=20, ignore_eos=True)
    on_device("eagle1", "fp32").generate(prompts[1], max_new_tokens=20, ignore_eos=True, tree="chain")  # single rows
    assert {(length + rows) % KEYS for length, rows in passes if rows > 1} == {0}
    assert any(rows == 1 for _, rows in passes)


def rows_on(memory: OrtMemory, values: npt.NDArray[Any]) -> OrtRows:
    """Returns the rows of an array, copied to the device, without spare rows after them."""
    value = memory.allocate(values.nbytes)
    host = np.ctypeslib.as_array((ctypes.c_uint8 * values.nbytes).from_address(value.data_ptr()))
    host[:] = np.frombuffer(values.tobytes(), np.uint8)
    return OrtRows(memory, value, len(values), values.shape[1], values.dtype, 0, 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_rows_are_indexed_as_in_numpy(dtype: npt.DTypeLike) -> None:
    values = np.random.default_rng(1).standard_normal((9, 8)).astype(dtype)
    rows = rows_on(OrtMemory(), values)
    np.testing.assert_array_equal(np.asarray(rows), values)
    assert np.asarray(rows, np.float64).dtype == np.float64
    for index in (slice(2, 5), slice(-1, None), slice(3, None), np.array([8, 0, 0, 3]), np.array([-1]), np.arange(9)):
        picked = rows[index]
        assert len(picked) == len(values[index])
        np.testing.assert_array_equal(np.asarray(picked), values[index])
        np.testing.assert_array_equal(
            np.asarray(picked[1:][np.array([0])]) if len(picked) > 1 else 0,
            values[index][1:2] if len(picked) > 1 else 0,
        )


def test_indexed_rows_are_a_copy_and_slices_share_memory() -> None:
    values = np.zeros((4, 8), np.float32)
    rows = rows_on(OrtMemory(), values)
    copy, shared = rows[np.array([1])], rows[1:2]
    assert shared.address == rows.address + 32 and copy.address != shared.address
    np.ctypeslib.as_array((ctypes.c_float * 32).from_address(rows.address))[:] = 5
    assert np.asarray(copy).max() == 0 and np.asarray(shared).min() == 5


def test_spare_rows_exist_and_are_finite() -> None:
    memory = OrtMemory()
    values = np.arange(24, dtype=np.float32).reshape(3, 8)
    rows = rows_on(memory, values)
    with_spare = rows.with_spare(2)
    assert with_spare is not rows and rows[:1].with_spare(2).address == rows.address
    with_spare_rows = OrtRows(memory, with_spare._value, 3 + SPARE, 8, np.float32, 0, 0)
    np.testing.assert_array_equal(np.asarray(with_spare_rows), values[[0, 1, 2, *[2] * SPARE]])
    assert with_spare[:2].with_spare(SPARE + 1).address == with_spare.address


def test_parts_are_concatenated() -> None:
    memory = OrtMemory()
    arrays = [np.full((count, 8), count, np.float16) for count in (3, 1, 5)]
    joined = OrtRows.joined([rows_on(memory, array) for array in arrays])
    assert len(joined) == 9 and joined.with_spare(SPARE) is joined
    np.testing.assert_array_equal(np.asarray(joined), np.concatenate(arrays))


@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_a_path_is_gathered_as_in_a_host_cache(dtype: npt.DTypeLike) -> None:
    memory = OrtMemory()
    layers, capacity, heads, width = 3, 20, 2, 8
    cache, host = (
        OrtCache(memory, layers, capacity, heads, width, dtype),
        KVCache(layers, capacity, heads, width, dtype),
    )
    stored = np.ctypeslib.as_array(
        (ctypes.c_uint8 * (2 * layers * (capacity + SPARE) * cache.row_bytes)).from_address(cache.addresses[0])
    ).view(dtype).reshape(2 * layers, capacity + SPARE, heads, width)  # fmt: skip
    assert not stored.any()
    rng = np.random.default_rng(2)
    stored[:] = rng.standard_normal(stored.shape)
    host.rows[:] = stored[:, :capacity]
    spare = stored[:, capacity:].copy()
    for path in ([0, 2, 3], [0], [0, 1], [0, 5, 6, 7, 11]):
        for each in (cache, host):
            each.keep(np.array(path))
        np.testing.assert_array_equal(stored[:, :capacity], host.rows)
    assert cache.length == host.length == 11
    np.testing.assert_array_equal(stored[:, capacity:], spare)


def test_padding_rows_see_the_past_and_themselves() -> None:
    lowest = hiding(np.float16)
    feeds: dict[str, Any] = {
        "input_ids": np.array([7, 8]),
        "position_ids": np.array([3, 4]),
        "tree_mask": np.array([[0, 0, lowest], [lowest, 0, 0]], np.float16),
        "features": np.arange(8, dtype=np.float16).reshape(2, 4),
        "logit_rows": np.array([1]),
    }
    assert pad_rows(feeds, 0) == feeds
    padded = pad_rows(feeds, 2)
    assert padded["input_ids"].tolist() == [7, 8, 8, 8] and padded["position_ids"].tolist() == [3, 4, 4, 4]
    assert (
        padded["logit_rows"].tolist() == [1] and padded["features"].tolist() == feeds["features"][[0, 1, 1, 1]].tolist()
    )
    visible = (padded["tree_mask"] == 0).astype(int)
    assert visible.tolist() == [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 0, 0, 1, 0], [0, 0, 0, 0, 1]]
    assert padded["tree_mask"].dtype == np.float16 and (padded["tree_mask"][visible == 0] == lowest).all()


def test_rows_of_unaligned_sizes_are_refused() -> None:
    def spec(heads: int, width: int) -> GraphSpec:
        past = TensorSpec("float16", (1, "P", heads, width))
        return GraphSpec("g", {"past_key_values.0.key": past}, {"hidden": TensorSpec("float16", (1, "T", 24))}, {}, {})

    check_rows(Path("g"), spec(1, 8))
    with pytest.raises(BackendError, match=r"g: a row of past_key_values.0.key takes 12 bytes, and .* multiple of 16"):
        check_rows(Path("g"), spec(1, 6))


def test_the_error_for_full_memory_gives_size_and_advice(capfd: pytest.CaptureFixture[str]) -> None:
    """ONNX Runtime raises it, when asked for more memory than any machine has."""
    with pytest.raises(BackendError) as error:
        OrtMemory().allocate(1 << 50)
    assert "the memory is full (1125899906.8 MB more were asked for)" in str(error.value)
    assert all(advice in str(error.value) for advice in ("smaller context", "int4", "close the process"))
    assert capfd.readouterr() == ("", "")


def test_closing_frees_the_rows(bundle_of: Callable[..., Path]) -> None:
    model = device_model(bundle_of("eagle1"), 64)
    caches = [cache for session in sessions_of(model) for cache in session._caches]  # type: ignore[attr-defined]
    assert len(caches) == 2
    model.close()
    assert [cache._value for cache in caches] == [None, None]


@pytest.mark.parametrize("nodes", [1, 6, 11])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_logits_stay_on_the_device(
    nodes: int, temperature: float, bundle_of: Callable[..., Path], prompts: list[list[int]]
) -> None:
    """Candidates are those of the rows on the host, and rows are fetched as they are."""
    rng = np.random.default_rng(nodes)
    tree = Tree(rng.integers(0, 256, nodes), np.arange(-1, nodes - 1), np.zeros(nodes, np.float32))
    with device_model(bundle_of("eagle1"), 128) as model:
        target = Target(sessions_of(model)[0], 128)
        target.prefill(prompts[0][:-1])
        params = SamplingParams(temperature=temperature, seed=3)
        sampler, on_host = (Sampler(params, prompts[0], 256) for _ in range(2))
        first, wanted = np.array(target.verify(tree)[0]), target.verify(tree, sampler)[0]
        assert isinstance(wanted, DeviceLogits) and len(wanted) == nodes
        np.testing.assert_array_equal(np.array(wanted), first)
        watched = sampler.on_device.watched(sampler.position + np.arange(nodes), COUNT)
        count = COUNT if temperature else GREEDY_COUNT
        step = accept(tree, wanted, sampler)
        assert step.tokens.tolist() == accept(tree, first, on_host).tokens.tolist()
        for row in range(nodes):
            known = wanted[row].candidates
            np.testing.assert_array_equal(wanted[row].whole(), first[row])
            np.testing.assert_array_equal(known.logits, np.sort(first[row])[::-1][:count])
            np.testing.assert_array_equal(known.logits, first[row][known.ids])
            np.testing.assert_array_equal(known.watched_logits, first[row][known.watched_ids])
            assert not temperature or known.watched_ids.tolist() == watched[row].tolist()
            scores = first[row].astype(np.float64) * sampler.on_device.inverse_temperature
            assert known.log_sum_exp == pytest.approx(np.log(np.exp(scores).sum()), abs=5e-5)


@pytest.mark.parametrize("row", [[0.0, np.nan], [0.0, np.inf], [-np.inf, -np.inf]])
def test_a_row_that_is_not_finite_is_seen(row: list[float]) -> None:
    logits = np.full((2, 300), -3, np.float32)
    logits[1] = np.resize(np.array(row, np.float32), 300)
    block = Block(logits.ctypes.data, logits.shape)
    watched = np.zeros((2, 4), np.int64)
    read = LogitMemory(OrtMemory(), 300).read(block, watched, np.ones(1, np.float32))
    assert np.isfinite(read[0].candidates.log_sum_exp)
    assert not np.isfinite(read[1].candidates.log_sum_exp)
    with pytest.raises(EagleError, match="not finite"):
        Sampler(SamplingParams(), [0], 300).next(read[1])
