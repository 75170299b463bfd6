"""Precision "stored": weights of a file in four bits come out of the bundle as they are in the file."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest

from conftest import needs_operators
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.reading.families.target import open_target
from eagle_export.recipes.as_stored import STORED, as_stored, grid_of_source
from eagle_export.recipes.graph import Linear
from eagle_export.writing.pair_checks import rounded_again
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import read_manifest
from insides import bundle_in

gguf = pytest.importorskip("gguf")
from gguf_writer import write_gguf  # noqa: E402

K, N = 256, 96
TEXT = np.random.default_rng(5).integers(3, 200, 70).tolist()


def of_file(kind: str) -> np.ndarray[Any, Any]:
    """The values [K, N] of a matrix in a file."""
    values: np.ndarray[Any, Any]
    rng = np.random.default_rng(3)
    weight = rng.normal(0, 0.05, (N, K)).astype(np.float32)
    if kind != "Q4_K":
        form = gguf.GGMLQuantizationType[kind]
        values = gguf.dequantize(gguf.quantize(weight, form), form)
        return values.T
    # Eight blocks share two numbers in fp16; each has a scale and a minimum of six bits (ggml-quants.c of llama.cpp).
    blocks = weight.reshape(N, 8, 32)
    least = -blocks.min(2, keepdims=True)
    step = (blocks.max(2, keepdims=True) + least) / 15
    of_step, of_least = (
        (each.max(1, keepdims=True) / 63).astype(np.float16).astype(np.float32) for each in (step, least)
    )
    step, least = of_step * np.rint(step / of_step), of_least * np.rint(least / of_least)
    levels = np.clip(np.rint((blocks + least) / step), 0, 15)
    values = (levels * step - least).reshape(N, K)
    return values.T


def layer(weight: np.ndarray[Any, Any]) -> Linear:
    x = ir.val("x", ir.DataType.FLOAT, ["T", len(weight)])
    value = ir.val("w", const_value=ir.tensor(np.ascontiguousarray(weight)))
    ir.Graph([x], [], nodes=[node := ir.node("MatMul", [x, value])], initializers=[value])
    return Linear(node, value, False)


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q4_K"])
@pytest.mark.parametrize("rounded", [False, True], ids=["fp32", "bf16"])
def test_a_files_values_are_found(kind: str, rounded: bool) -> None:
    """Also in a checkpoint that holds them rounded to bf16."""
    weight = of_file(kind)
    if rounded:
        weight = ir.tensor(weight.astype(ir.DataType.BFLOAT16.numpy())).numpy().astype(np.float32)
    assert grid_of_source(layer(weight)) is STORED
    blocks = as_stored(weight)
    steps = np.repeat(blocks.step, 32, 0)
    limit = 0.001 if kind == "Q4_0" and not rounded else 1 / 32 + 0.001  # which has its zero at a level
    assert (np.abs(blocks.values() - weight) <= (limit + 0.05 * rounded) * steps).all()


@pytest.mark.parametrize("kind", ["Q5_1", "Q8_0", "F32"])
def test_other_values_are_left_to_eight_bits(kind: str) -> None:
    assert grid_of_source(layer(of_file(kind))) is None
    assert grid_of_source(layer(of_file("Q4_0")[:40])) is None  # not a whole number of blocks


def test_blocks_of_few_values() -> None:
    weight = np.zeros((32, 6), np.float32)
    weight[:, 1] = 0.3
    weight[:, 2] = -0.3
    weight[::2, 3] = 0.5
    weight[:, 4] = 0.25 + 0.25 * (np.arange(32) % 3)  # all above zero
    weight[:, 5] = np.linspace(-1, 1, 32)  # no sixteen values at equal distances: the nearest
    blocks = as_stored(weight)
    np.testing.assert_allclose(blocks.values()[:, :5], weight[:, :5], rtol=1e-6)
    assert np.abs(blocks.values() - weight).max() < 0.51 * 2 / 15 + 1 / 16


def test_an_export_in_int4_says_that_it_rounds_again(golden: Path, tmp_path: Path) -> None:
    for kind, warns in (("q4_1", True), ("q8_0", False)):
        write_gguf(golden / "target", tmp_path / f"{kind}.gguf", kind)
        checkpoint = open_target(tmp_path / f"{kind}.gguf")
        said = rounded_again(checkpoint, "cpu", "int4")
        assert len(said) == warns and all("four bits already (Q4_1)" in line for line in said)
        assert not rounded_again(checkpoint, "cpu", "stored")


def test_a_source_in_other_bits_is_refused(golden: Path, tmp_path: Path) -> None:
    with pytest.raises(ExportError, match=r"no weight of the source has the four bits .* choose int4 or int8"):
        export(golden / "target", None, tmp_path / "bundle", Settings(precision="stored", certify=False))
    assert not (tmp_path / "bundle").exists()


@pytest.fixture(scope="module")
def bundle(golden: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A pair whose target is a file in Q4_1."""
    folder = tmp_path_factory.mktemp("stored")
    write_gguf(golden / "target", folder / "model.gguf", "q4_1")
    settings = Settings(precision="stored", record=False)
    done = export(folder / "model.gguf", golden / "head_eagle1", folder / "bundle", settings)
    assert done.manifest.certificate is not None and done.manifest.certificate.kl < 0.005
    return folder / "bundle"


def test_the_manifest_says_what_is_as_in_the_source(bundle: Path) -> None:
    graph = read_manifest(bundle).target.graph
    assert graph.recipe["model.layers.0.mlp.up_proj.weight"] == "int4 in blocks of 32, as the source has them"
    assert graph.recipe["lm_head.weight"].startswith("int8 in blocks of")
    weights = graph.weights
    levels, zeros = (weights[f"model.layers.0.mlp.up_proj.weight.{part}"] for part in ("int4", "zero"))
    assert levels.shape[1:] == (zeros.shape[1], 16) and zeros.shape == (levels.shape[0], levels.shape[1], 1)


@pytest.mark.parametrize("backend", ["cpu", pytest.param("native", marks=needs_operators)])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_token(bundle: Path, backend: str, temperature: float) -> None:
    with EagleModel.load(bundle, backend=backend, threads=1, context=256) as model:
        settings: dict[str, Any] = {"max_new_tokens": 60, "ignore_eos": True, "temperature": temperature, "seed": 3}
        plain = model.generate(TEXT[:20], method="vanilla", **settings)
        for method in ("eagle", "lookup"):
            drafted = model.generate(TEXT[:20], method=method, **settings)
            assert drafted.token_ids == plain.token_ids
        assert drafted.usage.target_passes <= 60


def test_native_graphs_reshape_no_weight(bundle: Path) -> None:
    """ONNX Runtime would keep a copy; the same bytes of the file are listed under both shapes."""
    native, portable = (ir.load(bundle / "target" / name).graph for name in ("native.onnx", "model.onnx"))
    reshaped = {
        value.name for node in native if node.op_type == "Reshape" for value in node.inputs if value is not None
    }
    assert not reshaped & {name for name, value in native.initializers.items() if len(value.shape or ()) > 1}
    (reshape,) = portable.initializers["shape_lines"].consumers()
    assert reshape.inputs[0] is not None
    table = reshape.inputs[0].const_value
    lines = native.initializers[f"{reshape.inputs[0].name}.lines"].const_value
    assert isinstance(table, ir.ExternalTensor) and isinstance(lines, ir.ExternalTensor)
    assert Path(table.path) == Path(lines.path)
    assert (table.offset, table.length) == (lines.offset, lines.length)
    assert lines.numpy().tobytes() == table.numpy().tobytes()


@needs_operators
def test_both_graphs_compute_the_same(bundle: Path) -> None:
    logits = {}
    for backend in ("cpu", "native"):
        with EagleModel.load(bundle, backend=backend, threads=1) as model:
            logits[backend] = np.concatenate(list(bundle_in(model).target.score(TEXT)))
    assert np.abs(logits["native"] - logits["cpu"]).mean() < 0.02 * logits["cpu"].std()
    operators = {node.op_type for node in ir.load(bundle / "target/native.onnx").graph}
    assert not operators & {"MatMulNBits", "BitShift"}
