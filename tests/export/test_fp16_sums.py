"""Sums that may leave the range of fp16 on their way to a small result: the pass that scales their weights, run with
products that add up in fp16, term by term."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx
import onnx_ir as ir
import pytest
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

from eagle_calib.calibration import Observed
from eagle_export.graphs.trace import OPSET
from eagle_export.recipes import fp16_sums
from eagle_export.recipes.fp16_sums import HEADROOM, LIMIT, NOTE, Fp16Sums, largest_sum
from eagle_export.recipes.graph import Pass, linears
from eagle_export.recipes.qdq import Int8Weights
from eagle_export.recipes.weight_blocks import Int4Dequantized
from eagle_runtime.bundle.manifest import read_manifest

pytest_plugins = ("trt_bundles",)

K, N, ROWS = 256, 8, 3
Array = npt.NDArray[Any]


class MatMul(OpRun):
    """A product whose sums are rounded to fp16 after every term."""

    op_domain = ""

    def _run(self, x: Array, weight: Array) -> tuple[Array]:
        total = np.zeros((*x.shape[:-1], weight.shape[1]), np.float16)
        with np.errstate(over="ignore", invalid="ignore"):
            for k in range(x.shape[-1]):
                total = total + x[..., k, None].astype(np.float16) * weight[k].astype(np.float16)
        return (total,)


def layer(weight: Array, norm: Array | None) -> ir.Model:
    """A graph of one layer, with a norm before it or without."""
    half = ir.DataType.FLOAT16
    x = ir.val("x", half, [1, ROWS, K])
    w = ir.val("layer.weight", half, [K, N], const_value=ir.tensor(weight.astype(np.float16), name="layer.weight"))
    nodes, weights, value = [], [w], x
    if norm is not None:
        g = ir.val("norm.weight", half, [K], const_value=ir.tensor(norm.astype(np.float16), name="norm.weight"))
        nodes, weights = [ir.node("RMSNormalization", [x, g], {"axis": -1})], [w, g]
        value = nodes[0].outputs[0]
        value.type, value.shape = ir.TensorType(half), x.shape
    nodes.append(ir.node("MatMul", [value, w]))
    (y,) = nodes[-1].outputs
    y.name, y.type, y.shape = "y", ir.TensorType(half), ir.Shape([1, ROWS, N])
    return ir.Model(ir.Graph([x], [y], nodes=nodes, initializers=weights, opset_imports={"": OPSET}), ir_version=11)


def run(model: ir.Model, x: Array) -> Array:
    """Returns y [ROWS, N] of x [ROWS, K], with sums in fp16."""
    proto = ir.to_proto(model)
    assert isinstance(proto, onnx.ModelProto)
    (y,) = ReferenceEvaluator(proto, new_ops=[MatMul]).run(None, {"x": x[None].astype(np.float16)})
    result: Array = np.asarray(y)[0].astype(np.float64)
    return result


QUANTISED: dict[str, Callable[[], Pass[Any]]] = {"int4": lambda: Int4Dequantized(32), "int8": Int8Weights}


@pytest.mark.parametrize("precision", sorted(QUANTISED))
def test_a_sum_that_passes_the_range_of_fp16_stays_in_range(precision: str) -> None:
    """Half of the terms add up to 131,072 in the last row, and the other half take that away again. Control: without
    the pass the sum is infinite on the way."""
    weight = np.broadcast_to(np.repeat([1.0, -1.0], K // 2)[:, None], (K, N)) * 0.5 ** (np.arange(N) % 2)
    x = np.full((ROWS, K), 256.0) * 2 ** np.arange(ROWS)[:, None]
    x[:, 0] += 8192
    exact = x @ weight
    assert np.abs(exact).max() < 10_000 and (x[-1, : K // 2] @ weight[: K // 2, 0]) > 131_072
    observed = {"layer.weight": Observed(ROWS, np.abs(x).max(0).astype(np.float32), x.astype(np.float32))}
    plain, safe = layer(weight, None), layer(weight, None)
    QUANTISED[precision]().apply(plain)
    assert not np.isfinite(run(plain, x)[-1, 0])
    note = Fp16Sums(observed).apply(safe)[NOTE]
    QUANTISED[precision]().apply(safe)
    assert note.startswith("at most ") and "layer.weight by 1/" in note and note.endswith(" scaled")
    assert [value.name for value in safe.graph.outputs] == ["y"]
    np.testing.assert_allclose(run(safe, x), exact, rtol=0.02)


def test_a_layer_after_a_norm_is_bounded_for_every_input() -> None:
    """Inputs along a column reach the bound, and no other passes it, whatever was recorded."""
    rng = np.random.default_rng(0)
    norm, weight = rng.uniform(0.5, 4, K), rng.normal(0, 1, (K, N))
    model = layer(weight, norm)
    bound = largest_sum(linears(model)[0], None)
    assert bound is not None
    stored = weight.astype(np.float16).astype(np.float64), norm.astype(np.float16).astype(np.float64)

    def largest(x: Array) -> float:
        normalised = x / np.sqrt(np.square(x).mean(-1, keepdims=True)) * stored[1]
        partial = np.cumsum(normalised[:, :, None] * stored[0], axis=1)
        return float(np.abs(partial).max())

    along = (stored[1][:, None] * stored[0]).T * 1e3
    assert 0.999 * bound < largest(along) <= bound * (1 + 1e-6)
    assert largest(rng.standard_t(2, (64, K))) < bound


def test_a_layer_that_needs_no_factor_is_left_alone() -> None:
    """Just below the limit; just above it, it is scaled."""
    weight = np.ones((K, N))
    for size, changed in ((0.99, False), (1.01, True)):
        absmax = np.full(K, np.float32(size * LIMIT / K / HEADROOM))
        model = layer(weight, None)
        note = Fp16Sums({"layer.weight": Observed(1, absmax, absmax[None])}).apply(model)[NOTE]
        assert ("layer.weight by 1/2 scaled" in note) == changed
        assert ("no layer scaled" in note) != changed
        assert [node.op_type for node in model.graph] == ["MatMul", "Mul"][: 1 + changed]


def test_layers_of_which_nothing_is_known_are_named() -> None:
    model = layer(np.ones((K, N)), None)
    assert Fp16Sums(None).apply(model) == {NOTE: "at most 0; no layer scaled; not bounded: layer.weight"}
    assert [node.op_type for node in model.graph] == ["MatMul"]


@pytest.mark.parametrize("precision", ["int4", "int8"])
def test_no_layer_of_the_golden_pair_needs_a_factor(
    precision: str, quantised_bundle_of: Callable[[str, str], Path]
) -> None:
    for model in read_manifest(quantised_bundle_of("eagle3", precision)).models.values():
        note = model.graph.recipe[NOTE]
        assert note.startswith("at most ") and note.endswith("; no layer scaled")
        assert 0 < float(note.removeprefix("at most ").partition(";")[0]) < LIMIT
        assert not [name for name in model.graph.weights if name.startswith("sums_")]


def test_factors_add_no_kernel(bundle_of: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All layers after a norm are scaled here, as if their sums were too large."""
    from trt_network import DRAFT_SIZES, Network

    monkeypatch.setattr(fp16_sums, "LIMIT", 1.0)
    counts = []
    for passes in ((Int4Dequantized(32),), (Fp16Sums(None), Int4Dequantized(32))):
        model = ir.load(bundle_of("eagle3", "fp16") / "draft/model.onnx")
        notes = [step.apply(model).get(NOTE, "") for step in passes]
        ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")
        kernels = Network(tmp_path / "model.onnx", DRAFT_SIZES).build()
        counts.append((len(kernels), sum("Int4" in kernel.holds for kernel in kernels)))
    assert counts[0] == counts[1] and counts[0][1] > 0
    assert notes[0].count("weight by 1/") >= 2
