"""Recipes: what they change, the error of quantised layers, and that a row does not depend on the others."""

from __future__ import annotations

import itertools
import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from conftest import GOLDEN, HEADS
from eagle_calib.calibration import Calibration
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.recipes.attention import ExactAttention
from eagle_export.recipes.blocks import Grid, rounded
from eagle_export.recipes.compensation import compensated
from eagle_export.recipes.embedding import EmbeddingBlocks
from eagle_export.recipes.int8 import Int8PerToken, per_column
from eagle_export.recipes.int8_cache import LEVELS, MOST
from eagle_export.recipes.keep import KeepLayers
from eagle_export.recipes.plan import PLACES, RECIPES, apply, plan
from eagle_export.recipes.qdq import Int8Weights
from eagle_export.recipes.smooth import Smooth
from eagle_export.recipes.vocabulary import TrimVocabulary
from eagle_export.recipes.weight_blocks import StoredBlocks, WeightBlocks, packed
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import read_manifest
from onnx_session import open_model

Array = npt.NDArray[Any]


def linear_model(weight: Array, fed_by: str | None = None, output: str = "y") -> ir.Model:
    """A model of x [1, T, K] @ weight. fed_by: an operator that is applied to x and x first."""
    k, n = weight.shape
    x = ir.Value(name="x", type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([1, "T", k]))
    w = ir.Value(name="w", const_value=ir.tensor(weight), type=ir.TensorType(ir.DataType.FLOAT), shape=ir.Shape([k, n]))
    before = [] if fed_by is None else [ir.node(fed_by, [x, x])]
    node = ir.node("MatMul", [before[0].outputs[0] if before else x, w])
    (y,) = node.outputs
    y.name, y.type, y.shape = output, x.type, ir.Shape([1, "T", n])
    graph = ir.Graph([x], [y], nodes=[*before, node], initializers=[w], opset_imports={"": 24}, name="linear")
    return ir.Model(graph, ir_version=10)


def dynamic_quantize_matmul(model: ir.Model) -> None:
    """Replaces the MatMul by the fast operator whose rows depend on each other."""
    (node,) = model.graph
    x, weight = node.inputs
    assert x is not None and weight is not None and weight.const_value is not None
    values, scale = per_column(weight.const_value.numpy())
    stored = [ir.Value(name=name, const_value=ir.tensor(array)) for name, array in (("q", values), ("s", scale))]
    for value in stored:
        model.graph.register_initializer(value)
    new = ir.node("DynamicQuantizeMatMul", [x, *stored], domain="com.microsoft")
    model.graph.insert_before(node, new)
    ir.convenience.replace_all_uses_with(node.outputs[0], new.outputs[0], replace_graph_outputs=True)
    node.outputs[0].name, new.outputs[0].name = None, "y"
    new.outputs[0].type, new.outputs[0].shape = node.outputs[0].type, node.outputs[0].shape
    model.graph.remove(node, safe=True)
    model.opset_imports["com.microsoft"] = 1


def session(model: ir.Model, threads: int = 1) -> Callable[[Array], Array]:
    run = open_model(model, threads)

    def outputs(x: Array) -> Array:
        y: Array = run.run(None, {"x": x})[0]
        return y

    return outputs


@pytest.fixture(scope="module")
def weight() -> Array:
    return np.random.default_rng(0).normal(size=(192, 160)).astype(np.float32)


@pytest.fixture(scope="module")
def rows() -> Array:
    """[1, 16, 192], rows of very different magnitudes, one of them zero."""
    rng = np.random.default_rng(1)
    sizes = np.array([0.01, 1, 50], np.float32)
    x: Array = rng.normal(size=(1, 16, 192)).astype(np.float32) * rng.choice(sizes, size=(1, 16, 1))
    x[0, 3] = 0
    return x


@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize(
    ("fed_by", "output", "parts"),
    [(None, "y", 1), (None, "logits", 2), ("Mul", "y", 8)],
    ids=["one", "lm_head", "down"],
)
def test_an_int8_row_is_the_same_to_the_bit_with_any_other_rows(
    fed_by: str | None, output: str, parts: int, weight: Array, rows: Array, threads: int
) -> None:
    model = linear_model(weight, fed_by, output)
    description = "int8 per column, activations int8 per token" + (f", each in {parts} parts" if parts > 1 else "")
    assert Int8PerToken().apply(model) == {"w": description}
    assert sum(node.op_type == "MatMulIntegerToFloat" for node in model.graph) == parts
    run = session(model, threads)
    together = run(rows)
    for count, first in itertools.product((1, 2, 5), range(11)):
        np.testing.assert_array_equal(run(rows[:, first : first + count]), together[:, first : first + count])
    exact = (rows * rows if fed_by else rows) @ weight
    assert np.abs(together - exact).max() < 0.02 * np.abs(exact).max()
    assert not together[0, 3].any()


def test_parts_are_finer_where_few_values_are_large(weight: Array) -> None:
    """A layer that reads a product is cut into parts; the same layer on the squared input is not."""
    rows = np.random.default_rng(2).normal(size=(1, 64, 192)).astype(np.float32)
    rows[0, np.arange(64), np.arange(64) * 3] *= 12
    model = linear_model(weight)
    Int8PerToken().apply(model)
    uncut = np.square(session(model)(np.square(rows)) - np.square(rows) @ weight).mean()
    cut = linear_model(weight, "Mul")
    Int8PerToken().apply(cut)
    assert np.square(session(cut)(rows) - np.square(rows) @ weight).mean() < 0.4 * uncut


def test_an_input_that_cannot_be_divided_has_one_part(weight: Array) -> None:
    model = linear_model(weight[:188], "Mul")
    assert Int8PerToken().apply(model) == {"w": "int8 per column, activations int8 per token"}


def test_one_scale_for_all_rows_would_not_be_lossless(weight: Array, rows: Array) -> None:
    model = linear_model(weight)
    dynamic_quantize_matmul(model)
    run = session(model)
    assert np.abs(run(rows[:, :1]) - run(rows)[:, :1]).max() > 1e-3 * np.abs(rows[:, :1] @ weight).max()


def test_int4_follows_the_weight_as_four_bits_can(weight: Array, rows: Array) -> None:
    model = linear_model(weight)
    assert WeightBlocks(Grid(4, 32, asymmetric=True), accuracy=1).apply(model) == {"w": "int4 in blocks of 32"}
    blocks = rounded(weight, Grid(4, 32, asymmetric=True))
    assert blocks.level.min() == 0 and blocks.level.max() == 15 and len(np.unique(blocks.zero)) > 3
    np.testing.assert_allclose(
        session(model)(rows), rows @ blocks.values(), atol=1.0
    )  # steps in fp16; unpacked as it was packed
    error = np.square(blocks.values() - weight).mean() / np.square(weight).mean()
    assert error < 0.0075  # 16 levels over 2.1 standard deviations either way: 0.0075
    middle = rounded(weight, Grid(4, 32, asymmetric=False))
    assert (middle.zero == 8).all()
    assert error < np.square(middle.values() - weight).mean() / np.square(weight).mean() < 0.009


def test_the_scale_search_beats_the_scale_of_the_largest_value(weight: Array) -> None:
    rows = weight.T.reshape(160, 6, 32)
    plain = np.abs(rows).max(-1, keepdims=True) / 7
    plain_error = np.square(np.rint(rows / plain) * plain - rows).mean()
    assert np.square(rounded(weight, Grid(4, 32, asymmetric=False)).values() - weight).mean() < 0.85 * plain_error


@pytest.mark.parametrize("asymmetric", [True, False])
def test_blocks_are_filled_up_and_zeros_stay_zero(asymmetric: bool) -> None:
    weight = np.zeros((72, 2), np.float32)
    weight[:, 1] = np.linspace(-1, 1, 72)
    blocks = rounded(weight, Grid(4, 32, asymmetric))
    assert not blocks.values()[:, 0].any()
    level, step, zero = packed(blocks)
    assert level.shape == (2, 3, 16) and zero.shape == (2, 2) and step.shape == (2, 3)
    np.testing.assert_array_equal(step, blocks.step.T.astype(np.float16))
    unpacked = np.stack([level & 15, level >> 4], -1).reshape(2, 96)
    np.testing.assert_array_equal(unpacked[:, :72], blocks.level.T)
    zeros = np.stack([zero & 15, zero >> 4], -1).reshape(2, 4)[:, :3]
    np.testing.assert_array_equal(zeros, blocks.zero.T)
    assert (unpacked[:, 72:] == zeros[:, 2:]).all()


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("grid", [Grid(4, 32, asymmetric=True), Grid(8, 32, asymmetric=False)])
def test_a_column_whose_weights_have_decayed_is_one_of_zeros(grid: Grid, weight: Array, rows: Array) -> None:
    """1 / step would be beyond fp32, and 0 times that no number."""
    decayed = weight.copy()
    decayed[:, 3] *= np.float32(1e-39)
    decayed[::5, 3] = 0
    for blocks in (rounded(decayed, grid), compensated(decayed, rows[0], grid)):
        assert not blocks.values()[:, 3].any()


def test_values_beyond_the_steps_of_blocks_are_refused(weight: Array) -> None:
    model = linear_model(weight * np.float32(1e8))
    WeightBlocks(Grid(4, 32, asymmetric=True)).apply(model)
    with pytest.raises(ExportError, match=r"w holds values that are too large for blocks of 4 bits; export in fp32"):
        model.graph.initializers["w.int4"].const_value.numpy()  # type: ignore[union-attr]


def test_a_column_of_zeros_has_a_scale() -> None:
    values, scale = per_column(np.array([[0, 1], [0, -2]], np.float32))
    assert values.tolist() == [[0, 64], [0, -127]] and scale.tolist() == [1, np.float32(2 / 127)]


def test_a_layer_may_feed_another_directly(weight: Array, rows: Array) -> None:
    """As fc does in a head without biases."""
    model = linear_model(weight)
    (first,) = model.graph
    again = ir.Value(
        name="again",
        const_value=ir.tensor(np.ascontiguousarray(weight[:160].T)),
        type=ir.TensorType(ir.DataType.FLOAT),
        shape=ir.Shape([160, 160]),
    )
    model.graph.register_initializer(again)
    second = ir.node("MatMul", [first.outputs[0], again])
    model.graph.append(second)
    (y,) = second.outputs
    first.outputs[0].name, y.name = "between", "y"
    y.type, y.shape = model.graph.outputs[0].type, ir.Shape([1, "T", 160])
    model.graph.outputs[0] = y
    assert list(Int8PerToken().apply(model)) == ["w", "again"]
    exact = rows @ weight @ weight[:160].T
    assert np.abs(session(model)(rows) - exact).max() < 0.03 * np.abs(exact).max()


def test_a_pass_that_finds_nothing_is_an_error(weight: Array) -> None:
    model = linear_model(weight)
    apply((Int8PerToken(),), model)
    with pytest.raises(ExportError, match="pass 'int8 per token' found nothing to change"):
        apply((Int8PerToken(),), model)


@pytest.mark.parametrize("precision", ["int8", "int4", "int4-int8"])
@pytest.mark.parametrize("kind", sorted(HEADS))
def test_every_large_weight_is_changed_and_listed(kind: str, precision: str, bundle_of: Callable[..., Path]) -> None:
    manifest = read_manifest(bundle_of(kind, precision))
    assert manifest.precision == {
        "target": precision,
        "draft": "int4",
    }  # the default head of an int8 target is int4 too
    for name, layers in (("target", 8), ("draft", 1)):
        graph = manifest.models[name].graph
        kept = {name for name, spec in graph.weights.items() if spec.dtype == "float32" and len(spec.shape) > 1}
        assert kept == set(), "a matrix stayed in fp32"
        linears = [name for name, done in graph.recipe.items() if "int" in done]
        assert len(linears) >= 7 * layers + 1
        by_block = {weight.split(".")[-2] for weight, done in graph.recipe.items() if "blocks" in done}
        every = {"q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"}
        every |= {"fc"} if kind == "eagle1" else set()  # EAGLE-3's fc is part of the target's graph
        if name == "draft":
            assert by_block == {*every, "lm_head", "embed_tokens"}
        elif precision == "int4-int8":
            assert by_block == {"q_proj", "gate_proj", "up_proj"}
        else:
            bits = {name: done.split(" in blocks")[0] for name, done in graph.recipe.items() if "blocks" in done}
            assert by_block >= {*every - {"fc"}, "lm_head", "embed_tokens"}
            finer = {name for name in bits if name.endswith(("k_proj.weight", "v_proj.weight"))}  # 2 heads of 4
            assert {bits[name] for name in bits.keys() - finer} == {precision}
            assert {bits[name] for name in finer} == {"int8"} and len(finer) == 2 * layers


@pytest.mark.parametrize("precision", ["int8-static", "int8-weight"])
def test_dequantised_weights_have_zero_points(precision: str, bundle_of: Callable[..., Path]) -> None:
    """One for each column. Without them no processor with AVX2 alone can run the graph (recipes/qdq.py)."""
    bundle = bundle_of("eagle3", precision)
    for spec in read_manifest(bundle).models.values():
        graph = ir.load(bundle / spec.graph.file).graph
        weights = [node for node in graph if node.op_type == "DequantizeLinear" and node.inputs[0] in weights_of(graph)]
        assert len(weights) >= 4
        for node in weights:
            _, scale, zero = node.inputs
            assert scale is not None and zero is not None and zero.shape == scale.shape
            assert zero.const_value is not None and not zero.const_value.numpy().any()


def weights_of(graph: ir.Graph) -> set[ir.Value]:
    return set(graph.initializers.values())


def test_int8_takes_a_quarter_of_the_bytes(bundle_of: Callable[..., Path]) -> None:
    sizes = [
        sum(path.stat().st_size for path in bundle_of("eagle1", precision).rglob("*.data"))
        for precision in ("fp32", "int8", "int4")
    ]
    assert sizes[1] < 0.35 * sizes[0] and sizes[2] < sizes[1]


def test_head_and_target_may_differ_in_precision(tmp_path: Path, prompts: list[list[int]]) -> None:
    bundle = tmp_path / "mixed"
    done = export(
        GOLDEN / "target", GOLDEN / HEADS["eagle3"], bundle, Settings(precision="fp32", draft_precision="int8")
    )
    assert done.manifest.precision == {"target": "fp32", "draft": "int8"}
    with EagleModel.load(bundle, threads=1) as model:
        eagle = model.generate(prompts[0], tree="dynamic", max_new_tokens=40)
        assert eagle.token_ids == model.generate(prompts[0], max_new_tokens=40, method="vanilla").token_ids
        assert eagle.usage.tau > 1.5


def test_an_fp16_target_and_a_quantised_head_do_not_mix(tmp_path: Path) -> None:
    with pytest.raises(ExportError, match="fp16 features"):
        export(
            GOLDEN / "target",
            GOLDEN / HEADS["eagle3"],
            tmp_path / "b",
            Settings(precision="fp16", draft_precision="int8"),
        )
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("backend", "precision"),
    [("cpu", "fp32"), ("cpu", "fp16"), ("cuda", "int4"), ("tensorrt", "int4"), ("tensorrt-rtx", "fp16")],
)
def test_only_quantised_targets_for_cpus_have_an_int8_cache(backend: str, precision: str, tmp_path: Path) -> None:
    says = f"a target in {precision} for backend {backend} keeps keys and values as it computes them; .* backend cpu"
    with pytest.raises(ExportError, match=says):
        export(
            GOLDEN / "target",
            None,
            tmp_path / "b",
            Settings(precision=precision, backend=backend, cache_precision="int8"),
        )
    with pytest.raises(ExportError, match="no cache is kept in int4; choose int8"):
        export(GOLDEN / "target", None, tmp_path / "b", Settings(precision="int8", cache_precision="int4"))
    assert not list(tmp_path.iterdir())


def test_an_int8_cache_for_a_context_whose_sums_may_overflow_is_refused(tmp_path: Path) -> None:
    shutil.copytree(GOLDEN / "target", tmp_path / "target")
    config = json.loads((tmp_path / "target/config.json").read_text(encoding="utf-8"))
    (tmp_path / "target/config.json").write_text(json.dumps({**config, "max_position_embeddings": MOST + 1}))
    with pytest.raises(ExportError, match=f"context of {MOST + 1} tokens, and an int8 cache holds {MOST} at most"):
        export(tmp_path / "target", None, tmp_path / "b", Settings(precision="int8", cache_precision="int8"))
    assert LEVELS * LEVELS * MOST < 2**31 <= LEVELS * LEVELS * (MOST + 1)


def planned() -> Iterator[tuple[str, list[type]]]:
    """Backend, precision and graph -> classes of its passes in order, with every optional pass."""
    calibration = Calibration({}, {}, np.zeros(1, np.float32))
    for backend, recipes in RECIPES.items():
        for precision in recipes:
            kept = ("*",) if precision not in ("fp32", "fp16") else ()
            for graph, passes in plan(backend, precision, precision, calibration, 10, kept).passes.items():
                yield f"{backend} {precision} {graph}", [type(step) for step in passes]


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"precision": "int3"}, "backend cpu does not run int3; choose one of fp32, fp16"),
        ({"draft_precision": "int3"}, "backend cpu does not run int3; choose one of fp32, fp16"),
        ({"backend": "gpu"}, "there is no backend gpu; choose one of cpu, tensorrt-rtx, tensorrt, cuda"),
    ],
)
def test_what_there_is_not_is_refused(given: dict[str, Any], says: str, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=says):
        export(GOLDEN / "target", GOLDEN / "head_eagle1", tmp_path / "bundle", Settings(**given))


def test_passes_stand_where_their_reasons_say() -> None:
    for name, classes in planned():
        assert set(classes) <= set(PLACES) and len(classes) == len(set(classes)), name
        assert KeepLayers not in classes[1:], name
        assert TrimVocabulary not in classes[1:], name
        if Smooth in classes:
            assert classes.index(Smooth) <= 1, name
        if EmbeddingBlocks in classes:
            blocks = StoredBlocks if StoredBlocks in classes else WeightBlocks
            assert classes.index(blocks) < classes.index(EmbeddingBlocks), name
        for last in (Int8PerToken, Int8Weights):
            assert last not in classes[:-1], name
        quantised = name.startswith("cpu") and name.endswith("target") and len(classes) > 0
        assert (ExactAttention in classes) == quantised, name


def test_every_recipe_is_offered_by_the_command() -> None:
    from eagle_export.commands.cli import BACKENDS, PRECISIONS

    assert tuple(RECIPES) == BACKENDS
    assert {name for recipes in RECIPES.values() for name in recipes} == set(PRECISIONS)
