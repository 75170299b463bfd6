"""Recipes with a calibration: smoothing keeps the function, and ranges and levels have smaller errors."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import onnxruntime
import pytest
import torch

from conftest import GOLDEN, HEADS, load_trace
from eagle_calib.calibrate import calibrate
from eagle_calib.calibration import Observed, read_calibration
from eagle_calib.scoring import divergence, log_softmax
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.graphs.pair import build_graphs, open_pair
from eagle_export.recipes import smooth
from eagle_export.recipes.blocks import Grid, rounded
from eagle_export.recipes.compensation import _Tile, compensated
from eagle_export.recipes.graph import fed_by_product, is_lm_head, linears
from eagle_export.recipes.input_products import Dense, FewRows, damped_gram, products_of
from eagle_export.recipes.plan import apply, plan
from eagle_export.recipes.qdq import Int8Static, best_range, simulated_static
from eagle_export.recipes.smooth import FACTORS, Smooth, channel_sizes, factors_of, groups, inputs_of
from eagle_export.recipes.weight_blocks import WeightBlocks
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.base.tree import Tree
from eagle_runtime.bundle.manifest import Manifest, read_manifest
from eagle_runtime.core.generate import Cycle
from onnx_session import open_model

Array = npt.NDArray[Any]


@pytest.fixture(scope="module")
def calibrations(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Kind of head -> calibration on text like that which the model was trained on."""
    data = tmp_path_factory.mktemp("text") / "ids.jsonl"
    rows = [row["prompt_ids"] + row["first_64"] for row in load_trace("eagle2_tt16_d3_k4")["prompts"]]
    data.write_text("".join(json.dumps({"ids": row}) + "\n" for row in rows[3:]), encoding="utf-8")
    folders = {}
    for kind in HEADS:
        bundle = tmp_path_factory.mktemp(kind) / "bundle"
        shutil.copytree(bundle_of(kind), bundle)
        folders[kind] = bundle.parent / "calibration"
        calibrate(bundle, folders[kind], data=data, threads=1)
    return folders


@pytest.fixture(scope="module")
def calibrated(
    calibrations: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str, str], tuple[Path, Manifest]]:
    """Kind of head, precision -> the pair exported with its calibration, and its manifest."""

    @cache
    def bundle(kind: str, precision: str) -> tuple[Path, Manifest]:
        folder, calibration = tmp_path_factory.mktemp(kind) / precision, calibrations[kind]
        target, head = GOLDEN / "target", GOLDEN / HEADS[kind]
        done = export(target, head, folder, Settings(precision=precision, calibration=calibration, certify=False))
        return folder, done.manifest

    return bundle


def collect(trees: list[Tree]) -> Callable[[Cycle], None]:
    return lambda cycle: trees.append(cycle.tree)


def target_graph(kind: str) -> ir.Model:
    return build_graphs(open_pair(GOLDEN / "target", GOLDEN / HEADS[kind]), "fp32", 10)["target"]


def text_logits(folder: Path, prompts: Sequence[Sequence[int]]) -> Array:
    """Logits [rows, V] of the prompts' tokens."""
    with EagleModel.load(folder, threads=1) as model:
        return np.concatenate([piece.copy() for prompt in prompts for piece in model.score(prompt)])


def test_every_layer_after_a_norm_attention_or_up_can_be_scaled() -> None:
    model = target_graph("eagle1")
    scalable = groups(model)
    names = sorted(layer.name.split(".")[-2] for group in scalable for layer in group.layers)
    assert len(scalable) == 4 * 8 and len(names) == 7 * 8 and "lm_head" not in names
    assert {group.repeats for group in scalable} == {1, 2}  # o_proj: two query heads read one value head


def test_scaling_alone_keeps_the_function(
    calibrations: dict[str, Path],
    bundle_of: Callable[..., Path],
    tmp_path: Path,
    prompts: list[list[int]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """All 32 groups are scaled by random factors, and run by the engine."""
    from eagle_export.graphs.weights import save

    observed = read_calibration(calibrations["eagle1"]).target
    model = target_graph("eagle1")
    rng = np.random.default_rng(0)
    used: list[Array] = []

    def any_sizes(absmax: Array, weight: Array) -> Array:
        used.append(rng.uniform(0.3, 3, len(absmax)).astype(np.float32))
        return used[-1]

    def worse_without(x: Array, weight: Array) -> Array:  # the search takes the largest exponent offered
        return np.asarray(x @ weight + np.float32(1) / (1 + np.square(np.log(np.abs(x).mean()))), np.float32)

    monkeypatch.setattr("eagle_export.recipes.smooth.channel_sizes", any_sizes)
    Smooth(observed, worse_without).apply(model)
    assert len(used) == 32 and sum(factors_of(one) is not None for one in linears(model)) > 50
    bundle = tmp_path / "scaled"
    shutil.copytree(bundle_of("eagle1"), bundle)
    (bundle / "target" / "model.onnx.data").unlink()
    save(model, bundle / "target" / "model.onnx")
    from eagle_runtime.base.files import file_sha256
    from eagle_runtime.bundle.manifest import MANIFEST_NAME

    manifest = read_manifest(bundle)
    files = {name: file_sha256(bundle / name) for name in manifest.files}
    (bundle / MANIFEST_NAME).write_text(replace(manifest, files=files).to_json(), encoding="utf-8")
    np.testing.assert_allclose(
        text_logits(bundle, prompts[:2]), text_logits(bundle_of("eagle1"), prompts[:2]), atol=2e-4
    )


@pytest.fixture(scope="module")
def layer() -> tuple[Array, Array]:
    """Inputs [256, 64] of which two channels are thirty times the others, and a weight [64, 48]."""
    rng = np.random.default_rng(3)
    x = rng.normal(size=(256, 64)).astype(np.float32)
    x[:, [5, 40]] *= 30
    return x, rng.normal(size=(64, 48)).astype(np.float32)


def test_sizes_follow_the_inputs(layer: tuple[Array, Array]) -> None:
    x, weight = layer
    sizes = channel_sizes(np.abs(x).max(0), weight)
    assert sizes[[5, 40]].min() > 5 * np.delete(sizes, [5, 40]).max()
    silent = x.copy()
    silent[:, 7] = 0
    assert channel_sizes(np.abs(silent).max(0), weight).min() > 0


def test_best_range_clips_rare_large_values_only() -> None:
    rng = np.random.default_rng(4)
    x = rng.normal(size=(400, 64)).astype(np.float32)
    plain = best_range(x, np.abs(x).max(0))
    assert 0.7 * np.abs(x).max() < plain <= np.abs(x).max()
    uniform = rng.uniform(-1, 1, size=(400, 64)).astype(np.float32)
    assert best_range(uniform, np.abs(uniform).max(0)) > 0.99


@pytest.fixture(scope="module")
def correlated() -> Array:
    """Inputs [512, 80] whose channels are mixtures of twelve factors; one channel is always zero."""
    rng = np.random.default_rng(6)
    x = rng.normal(size=(512, 12)) @ rng.normal(size=(12, 80)) + 0.3 * rng.normal(size=(512, 80))
    x[:, 33] = 0
    return x.astype(np.float32)


@pytest.mark.parametrize("asymmetric", [True, False])
def test_compensated_errors_are_smaller_on_inputs_that_were_not_recorded(asymmetric: bool, correlated: Array) -> None:
    """Also with fewer recorded inputs than channels; the last block is half a block."""
    weight = np.random.default_rng(7).normal(size=(80, 48)).astype(np.float32)
    unseen = correlated[256:]

    def error(stored: Array) -> float:
        return float(np.square(unseen @ (stored - weight)).sum())

    plain = error(rounded(weight, Grid(4, 32, asymmetric)).values())
    for rows, share in ((256, 0.4), (40, 0.7)):
        blocks = compensated(weight, correlated[:rows], Grid(4, 32, asymmetric))
        assert error(blocks.values()) < share * plain
        assert blocks.level.max() == 15 and np.isfinite(blocks.step).all()
        assert asymmetric or (blocks.zero == 8).all()


@pytest.mark.parametrize("kind", [Dense, FewRows])
def test_levels_move_there_and_back(kind: type[Dense | FewRows]) -> None:
    """As where each block's slope is computed anew from all errors; in three groups of blocks, of which the last is
    shorter."""
    rng = np.random.default_rng(8)
    x, weight = rng.normal(size=(1500, 1100)) @ rng.normal(size=(1100, 1100)), rng.normal(size=(1100, 24))
    inputs = (x / 30).astype(np.float32)
    gram, products = damped_gram(inputs), kind.of(inputs)
    fast, slow = (_Tile(weight.astype(np.float32), Grid(4, 128, True), products) for _ in range(2))
    for tile in (fast, slow):
        tile.feed_back()
    started = float((fast.error * (gram @ fast.error)).sum())
    fast.descend()
    for index, block in [*slow.blocks, *reversed(slow.blocks)]:
        slow._move(index, block, gram[block, block], gram[block] @ slow.error)
    assert np.mean(fast.lines != slow.lines) < 0.02  # of near ties
    ends = [float((tile.error * (gram @ tile.error)).sum()) for tile in (fast, slow)]
    assert ends[0] < 0.96 * started and abs(ends[0] / ends[1] - 1) < 0.01
    np.testing.assert_allclose(fast.error, (fast.lines * fast.step[np.arange(1100) // 128]) - weight, atol=1e-4)


@pytest.mark.parametrize(("rows", "channels"), [(40, 80), (90, 700)])
def test_products_through_few_rows_are_those_of_all_channels(rows: int, channels: int) -> None:
    """The factor, what errors feed back, slopes before and after a change, and in the end the levels; 700 channels are
    a group and a part of one."""
    rng = np.random.default_rng(9)
    x = rng.normal(size=(rows, 12)) @ rng.normal(size=(12, channels)) + 0.3 * rng.normal(size=(rows, channels))
    x[:, 33] = 0
    inputs, weight = x.astype(np.float32), rng.normal(size=(channels, 48)).astype(np.float32)
    dense, few = Dense.of(inputs), FewRows.of(inputs)
    below = np.tril(dense.lower, -1)
    np.testing.assert_allclose(np.tril((few.outer @ few.rows).T, -1), below, atol=1e-5 * np.abs(below).max())
    last = slice(channels - 20, channels)
    np.testing.assert_allclose(few.lower_of(last, last), dense.lower_of(last, last), atol=1e-5)
    np.testing.assert_allclose(few.within(last, last), dense.within(last, last), rtol=1e-4, atol=1e-4)
    errors = [np.zeros_like(weight) for _ in range(2)]
    spreads: tuple[Any, ...] = dense.on(errors[0]), few.on(errors[1])
    for block in (last, slice(16, 48)):
        feedback = [each.feedback(block) for each in spreads]
        np.testing.assert_allclose(feedback[1], feedback[0], atol=1e-4)
        for error, each in zip(errors, spreads, strict=True):
            error[block] = weight[block]
            each.changed(block, weight[block])
    slopes = [each.slope(slice(0, min(channels, 512))) for each in spreads]
    np.testing.assert_allclose(slopes[1], slopes[0], atol=1e-4 * np.abs(slopes[0]).max())
    levels = [compensated(weight, each, Grid(4, 32, True)).level for each in (dense, few)]
    assert np.mean(levels[0] != levels[1]) < 0.01  # of near ties


def test_products_go_through_rows_where_these_are_few() -> None:
    x = np.random.default_rng(10).normal(size=(20, 100)).astype(np.float32)
    assert isinstance(products_of(x), FewRows)
    assert isinstance(products_of(x[:, :59]), Dense)


@pytest.mark.parametrize("rows", [700, 150])
def test_products_have_the_same_bits_on_any_number_of_threads(rows: int) -> None:
    """Of two processes that write an export, one may have more threads: two exports of a model are the same files."""
    x = np.random.default_rng(11).normal(size=(rows, 576)).astype(np.float32)
    found, threads = [], torch.get_num_threads()
    try:
        for count in (1, 2):
            torch.set_num_threads(count)
            found.append(products_of(x))
    finally:
        torch.set_num_threads(threads)
    one, two = found
    assert isinstance(one, Dense | FewRows) and type(one) is type(two)
    for field in fields(one):
        assert getattr(one, field.name).tobytes() == getattr(two, field.name).tobytes(), field.name


def test_a_small_sample_raises_the_squares(correlated: Array) -> None:
    for x, raised in ((correlated, 1 + 80 / 512), (correlated[:20], 5)):
        gram = damped_gram(x)
        np.testing.assert_allclose(gram[0, 0], raised * np.square(x[:, 0]).mean(), rtol=1e-3)
        np.testing.assert_allclose(gram[0, 1], (x[:, 0] * x[:, 1]).mean(), rtol=1e-4)
        assert np.linalg.eigvalsh(gram).min() > 0


@pytest.mark.parametrize("kind", sorted(HEADS))
@pytest.mark.parametrize("precision", ["int8-static", "int4"])
def test_calibrated_bundles_decode_losslessly_and_close_to_the_source(
    kind: str,
    precision: str,
    calibrated: Callable[[str, str], tuple[Path, Manifest]],
    bundle_of: Callable[..., Path],
    prompts: list[list[int]],
) -> None:
    bundle, manifest = calibrated(kind, precision)
    done_to = set(manifest.target.graph.recipe.values())
    assert any("smoothed" in what or "compensated" in what for what in done_to)
    exact, quantised = (log_softmax(text_logits(folder, prompts[:3])) for folder in (bundle_of(kind), bundle))
    assert divergence(exact, quantised).mean() < (0.02 if precision == "int8-static" else 0.2)
    with EagleModel.load(bundle, threads=1) as model:
        for prompt in prompts[:3]:
            eagle = model.generate(prompt, tree="dynamic", max_new_tokens=40)
            assert eagle.token_ids == model.generate(prompt, max_new_tokens=40, method="vanilla").token_ids
            assert eagle.usage.tau > 1.3


@pytest.mark.parametrize(("backend", "precision"), [("cpu", "int8-static"), ("tensorrt", "int8")])
def test_static_int8_smooths_o_proj_on_every_backend(
    backend: str, precision: str, calibrations: dict[str, Path]
) -> None:
    """Its input is traced back through the Attention node, which the CPU's exact attention replaces."""
    calibration = read_calibration(calibrations["eagle1"])
    model = target_graph("eagle1")
    Smooth(calibration.target, simulated_static).apply(model)
    static = [one for one in linears(model) if not (fed_by_product(one) or is_lm_head(one))]
    expected = [one.name for one in static if factors_of(one) is not None]
    done = apply(plan(backend, precision, None, calibration).passes["target"], target_graph("eagle1"))
    smoothed = {name for name, what in done.items() if what.endswith(", smoothed")}
    assert smoothed == set(expected)
    assert any(name.endswith("o_proj.weight") for name in smoothed)


@pytest.mark.parametrize("graph", ["target/model.onnx", "draft/model.onnx"])
def test_onnxruntime_fuses_every_product_of_a_static_graph(
    graph: str, calibrated: Callable[[str, str], tuple[Path, Manifest]], tmp_path: Path
) -> None:
    """Into int8 products; down in eight parts and the LM head in two have a scale for each row."""
    bundle, optimised = calibrated("eagle1", "int8-static")[0], tmp_path / "optimised.onnx"
    options = onnxruntime.SessionOptions()
    options.optimized_model_filepath = str(optimised)
    onnxruntime.InferenceSession(str(bundle / graph), options, providers=["CPUExecutionProvider"])
    counts = Counter(node.op_type for node in onnx.load(optimised, load_external_data=False).graph.node)
    layers, more = (
        (8, 0) if graph.startswith("target") else (1, 1)
    )  # the head has fc too, and computes q for the wanted rows only
    assert counts["MatMulIntegerToFloat"] == (6 + 8) * layers + more + 2
    assert counts["QuantizeLinear"] == (3 + 1) * layers + 2 * more + 1 and counts["DequantizeLinear"] == 0


def normed_linear(weight: Array, gain: Array) -> ir.Model:
    """A model of RMSNormalization of x [1, T, K], then @ weight."""
    k, n = weight.shape
    fp32 = ir.TensorType(ir.DataType.FLOAT)
    x = ir.Value(name="x", type=fp32, shape=ir.Shape([1, "T", k]))
    g, w = (
        ir.Value(name=name, const_value=ir.tensor(array), type=fp32, shape=ir.Shape(array.shape))
        for name, array in (("g", gain), ("w", weight))
    )
    norm = ir.node("RMSNormalization", [x, g], {"axis": -1})
    norm.outputs[0].type = fp32
    product = ir.node("MatMul", [norm.outputs[0], w])
    (y,) = product.outputs
    y.name, y.type, y.shape = "y", fp32, ir.Shape([1, "T", n])
    graph = ir.Graph([x], [y], nodes=[norm, product], initializers=[g, w], opset_imports={"": 24}, name="normed")
    return ir.Model(graph, ir_version=10)


def outputs(model: ir.Model, x: Array) -> Array:
    y: Array = open_model(model).run(None, {"x": x})[0]
    return y


def test_searched_scales_are_folded_into_the_norm_and_help(layer: tuple[Array, Array]) -> None:
    """Inputs with two very large channels, on rows that were not recorded; compared with the recipe without scales."""
    rng = np.random.default_rng(8)
    weight, size = layer[1], np.ones(64, np.float32)
    size[[5, 40]] = 30
    rows = rng.normal(size=(1, 512, 64)).astype(np.float32)
    normed = outputs(normed_linear(np.eye(64, dtype=np.float32), size), rows)[0]
    observed = {"w": Observed(256, np.abs(normed[:256]).max(0), normed[:256])}
    exact = normed[256:] @ weight
    searched = normed_linear(weight, size)
    apply((Smooth(observed, simulated_static), Int8Static(observed, np.int8(0))), searched)
    error = np.square(outputs(searched, rows)[0, 256:] - exact).mean()
    unscaled = normed_linear(weight, size)
    (norm,) = (node for node in unscaled.graph if node.op_type == "RMSNormalization")
    aside = ir.node("Identity", [norm.outputs[0]])  # hides the norm, so that no weight can absorb the factors
    unscaled.graph.insert_after(norm, aside)
    for use in [use for use in norm.outputs[0].uses() if use.node is not aside]:
        use.node.replace_input_with(use.idx, aside.outputs[0])
    aside.outputs[0].type = ir.TensorType(ir.DataType.FLOAT)
    Int8Static(observed, np.int8(0)).apply(unscaled)
    plain = np.square(outputs(unscaled, rows)[0, 256:] - exact).mean()
    assert error < 0.5 * plain


def test_trimmed_vocabulary_is_lossless_and_listed(
    calibrations: dict[str, Path], bundle_of: Callable[..., Path], tmp_path: Path, prompts: list[list[int]]
) -> None:
    for kind, size in (("eagle1", 40), ("eagle3", 30)):
        bundle = tmp_path / kind
        done = export(
            GOLDEN / "target",
            GOLDEN / HEADS[kind],
            bundle,
            Settings(calibration=calibrations[kind], draft_vocab=size, certify=False),
        )
        head = done.manifest.head
        assert head is not None and head.draft_vocab_size == size
        (trimmed,) = (spec for name, spec in head.graph.weights.items() if name.endswith(".kept"))
        assert trimmed.shape[1] == size
        assert f"the {size} most frequent tokens" in " ".join(head.graph.recipe.values())
        kept = np.argsort(-read_calibration(calibrations[kind]).token_counts, kind="stable")[:size]
        trees: list[Tree] = []
        with EagleModel.load(bundle, threads=1) as model, EagleModel.load(bundle_of(kind), threads=1) as whole:
            for prompt in prompts[:3]:
                eagle = model.generate(prompt, tree="dynamic", max_new_tokens=40, on_cycle=collect(trees))
                assert eagle.token_ids == whole.generate(prompt, max_new_tokens=40, method="vanilla").token_ids
                assert eagle.usage.tau > 1.5
        drafted = {token for tree in trees for token in tree.tokens[1:].tolist()}
        assert len(drafted) > 10
        if kind == "eagle1":
            assert drafted <= set(kept.tolist())


@pytest.mark.skipif(sys.platform != "linux", reason="other systems have no fork that this may use")
@pytest.mark.parametrize("copy_fails", [False, True])
def test_two_processes_find_the_factors_of_one(
    copy_fails: bool, calibrations: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    observed = read_calibration(calibrations["eagle1"]).target
    parent = os.getpid()

    def simulate(x: Array, weight: Array) -> Array:
        if copy_fails and os.getpid() != parent:
            raise ValueError
        return simulated_static(x, weight)

    found = []
    for threads in (1, 2):
        monkeypatch.setattr(smooth, "LEAST", 0)
        monkeypatch.setattr(smooth, "threads_allowed", lambda threads=threads: threads)
        model = target_graph("eagle1")
        done = Smooth(observed, simulate).apply(model)
        found.append((done, {linear.name: factors_of(linear) for linear in linears(model)}))
    (done, factors), (done_again, again) = found
    assert done == done_again and factors.keys() == again.keys()
    assert len({name.split(".")[2] for name in done}) > 1, "several layers, of which the copy searches some"
    for name, each in factors.items():
        np.testing.assert_array_equal(each, again[name])


@pytest.mark.parametrize(
    ("size", "top_k", "words"),
    [
        (9, 10, "from 10 to 255"),
        (256, None, "from 64 to 255"),
        (0, None, "vocabulary is 0"),
        (-3, 4, "vocabulary is -3"),
    ],
)
def test_vocabulary_of_a_wrong_size(
    size: int, top_k: int | None, words: str, calibrations: dict[str, Path], tmp_path: Path
) -> None:
    with pytest.raises(ExportError, match=words):
        export(
            GOLDEN / "target",
            GOLDEN / HEADS["eagle1"],
            tmp_path / "b",
            Settings(calibration=calibrations["eagle1"], draft_vocab=size, draft_top_k=top_k, certify=False),
        )
    assert not list(tmp_path.iterdir())


def test_errors_name_eagle_calib_where_a_calibration_is_needed(tmp_path: Path) -> None:
    for settings in (
        {"precision": "int8-static"},
        {"draft_vocab": 40},
        {"backend": "tensorrt-rtx", "precision": "int8"},
    ):
        with pytest.raises(ExportError, match="eagle-calib"):
            export(GOLDEN / "target", GOLDEN / HEADS["eagle1"], tmp_path / "b", Settings(certify=False, **settings))
    with pytest.raises(ExportError, match="tensorrt does not run fp32"):
        export(GOLDEN / "target", GOLDEN / HEADS["eagle1"], tmp_path / "b", Settings(backend="tensorrt", certify=False))
    assert not list(tmp_path.iterdir())


def test_a_calibration_of_another_pair_is_refused(calibrations: dict[str, Path]) -> None:
    observed = dict(read_calibration(calibrations["eagle1"]).target)
    name = "model.layers.3.self_attn.o_proj.weight"
    seen = observed[name]
    observed[name] = Observed(seen.rows, seen.channel_absmax[:-1], seen.sample[:, :-1])
    width = len(seen.channel_absmax)
    with pytest.raises(ExportError, match=rf"{name}.* is {width - 1} wide, the layer {width}"):
        Int8Static(observed, np.uint8(128)).apply(target_graph("eagle1"))
    del observed[name]
    with pytest.raises(ExportError, match=f"lacks layer '{name}'"):
        WeightBlocks(Grid(4, 32, asymmetric=True), observed).apply(target_graph("eagle1"))


def test_inputs_are_those_after_scaling(calibrations: dict[str, Path]) -> None:
    observed = read_calibration(calibrations["eagle1"]).target
    (linear,) = (one for one in linears(target_graph("eagle1")) if one.name.endswith("layers.2.mlp.up_proj.weight"))
    plain, absmax = inputs_of(linear, observed)
    factors = np.full(plain.shape[1], 2, np.float32)
    linear.node.meta[FACTORS] = factors
    halved, half = inputs_of(linear, observed)
    np.testing.assert_array_equal(halved * 2, plain)
    np.testing.assert_array_equal(half * 2, absmax)


def test_levels_do_not_depend_on_the_number_of_threads() -> None:
    """Tiles are taken by one thread or by four; the libraries' own threads are one or as many as processors."""
    script = (
        "import hashlib, numpy as np; from eagle_export.recipes import tiles\n"
        "from eagle_export.recipes.blocks import Grid; from eagle_export.recipes.compensation import compensated\n"
        "tiles._processors = lambda: COUNT\n"
        "random = np.random.default_rng(0)\n"
        "weight, inputs = (random.normal(size=(n, k)).astype('f') for n, k in ((96, 2500), (64, 96)))\n"
        "blocks = compensated(weight, inputs, Grid(4, 32, True))\n"
        "parts = (blocks.level, blocks.step, blocks.zero)\n"
        "print(hashlib.sha256(b''.join(part.tobytes() for part in parts)).hexdigest())\n"
    )
    digests = set()
    for count in ("1", "4"):
        limits = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"} if count == "1" else {}
        command = [sys.executable, "-c", script.replace("COUNT", count)]
        digests.add(subprocess.run(command, env=os.environ | limits, check=True, capture_output=True, text=True).stdout)
    assert len(digests) == 1
