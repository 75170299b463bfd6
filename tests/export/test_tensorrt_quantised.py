"""Quantised graphs as TensorRT for RTX builds them without a GPU: every product reads int8, or int4 or int8 weights,
and attention stays one kernel."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from conftest import HEADS, put_listed
from eagle_export.errors import ExportError
from eagle_export.tensorrt.build import Built, build_engines
from eagle_export.tensorrt.kernels import Kernel
from eagle_export.tensorrt.precision import check_sums
from eagle_runtime.bundle.manifest import read_manifest
from trt_graphs import bytes_in_fp32, faults, scaled_in_fp16
from trt_network import DRAFT_SIZES, TARGET_SIZES, Network

pytest_plugins = ("trt_bundles",)

PRECISIONS = ("int8", "int8-weight", "int4", "int4-int8")


def products(kernels: list[Kernel]) -> list[Kernel]:
    """Returns the matrix products outside of attention."""
    return [kernel for kernel in kernels if kernel.is_product]


def kind(kernel: Kernel) -> str:
    """Returns how a product is quantised."""
    if kernel.reads == {"Int8"} and "Int8" in kernel.holds:
        return "int8"
    if kernel.reads == {"Half"} and kernel.holds & {"Int4", "Int8"}:
        return "int4 weights" if "Int4" in kernel.holds else "int8 weights"
    return "fp16"


def expected(precision: str, layers: int, fc: int, draft: bool) -> dict[str, int]:
    """Returns the number of products of each kind in a graph. q, k and v are one product, and gate and up another,
    where they are quantised alike; then o, down, fc where this graph has it, and the LM head. In a draft head q is
    separate, since it is computed for the wanted rows only.

    A target's q, k and v read a norm's output: there int4-int8 takes q, and k and v stay int8."""
    if precision == "int8":  # down and the LM head in weights only
        return {"int8": 3 * layers + fc + draft, "int8 weights": layers + 1}
    if precision in ("int8-weight", "int4"):
        return {f"{precision.removesuffix('-weight')} weights": 4 * layers + fc + draft + 1}
    return {"int4 weights": (1 + (not draft)) * layers, "int8 weights": 3 * layers + fc + draft + 1}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("head", sorted(HEADS))
def test_every_product_is_quantised(head: str, precision: str, quantised_bundle_of: Callable[[str, str], Path]) -> None:
    """For the three compute capabilities at once."""
    bundle = quantised_bundle_of(head, precision)
    manifest = read_manifest(bundle)
    assert manifest.head is not None
    layers, eagle3 = manifest.target.num_layers, head == "eagle3"
    graphs = (
        (manifest.target.graph.file, layers, expected(precision, layers, int(eagle3), False), TARGET_SIZES),
        (manifest.head.graph.file, 1, expected(precision, 1, int(not eagle3), True), DRAFT_SIZES),
    )
    for file, attentions, counts, sizes in graphs:
        kernels = Network(bundle / file, sizes).build()
        assert Counter(map(kind, products(kernels))) == counts, (file, products(kernels))
        assert sum(kernel.is_fused_attention for kernel in kernels) == attentions
        assert not [kernel for kernel in kernels if kernel.stores_sums_in_fp16]


@pytest.mark.parametrize(("graph", "sizes"), [("target", TARGET_SIZES), ("draft", DRAFT_SIZES)])
def test_sums_of_bytes_that_are_stored_in_fp16_are_noticed(
    graph: str, sizes: dict[str, tuple[int, int]], quantised_bundle_of: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """Control: the same graph with scales in fp16, as older exports wrote it, has as many kernels, and those of its
    products of bytes write sums in fp16."""
    bundle = quantised_bundle_of("eagle3", "int8")
    wide = Network(bundle / graph / "model.onnx", sizes).build()
    model = ir.load(bundle / graph / "model.onnx")
    assert scaled_in_fp16(model) > 0
    ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")
    narrow = Network(tmp_path / "model.onnx", sizes).build()
    assert len(narrow) == len(wide) > 0
    counted = Counter(map(kind, products(wide)))
    assert counted == Counter(map(kind, products(narrow)))
    assert sum(kernel.stores_sums_in_fp16 for kernel in narrow) == counted["int8"] > 0


def test_a_bundle_whose_sums_would_overflow_is_refused(
    quantised_bundle_of: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """Before a build."""
    bundle = Path(shutil.copytree(quantised_bundle_of("eagle3", "int8"), tmp_path / "bundle"))
    manifest = read_manifest(bundle)
    check_sums(bundle, manifest)
    model = ir.load(bundle / "draft/model.onnx")
    scaled_in_fp16(model)
    ir.save(model, bundle / "draft/older.onnx", external_data="older.onnx.data")
    (bundle / "draft/older.onnx").replace(bundle / "draft/model.onnx")
    put_listed(bundle, "draft/model.onnx", (bundle / "draft/model.onnx").read_bytes())
    put_listed(bundle, "draft/older.onnx.data", (bundle / "draft/older.onnx.data").read_bytes())
    with pytest.raises(
        ExportError, match=r"draft/model\.onnx scales products of bytes in fp16.*export the bundle again"
    ):
        build_engines(bundle, "tensorrt-rtx")
    assert not (bundle / "engines").exists()


def test_fp16_products_are_counted_as_such(engines_of: Callable[[str], tuple[Path, Built]]) -> None:
    """Control: a graph whose weights are in fp16 does not pass."""
    _, built = engines_of("eagle1")
    draft = next(engine for engine in built.built if engine.name == "draft")
    of_trees = [kernel for kernel in draft.kernels if kernel.profile == 0]
    assert Counter(map(kind, products(of_trees))) == {"fp16": 7}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_graphs_have_nothing_that_tensorrt_rejects_or_builds_in_fp32(
    precision: str, quantised_bundle_of: Callable[[str, str], Path]
) -> None:
    """But for products of bytes, which are scaled in fp32 and cast to fp16."""
    for file in ("target/model.onnx", "draft/model.onnx"):
        model = ir.load(quantised_bundle_of("eagle3", precision) / file)
        assert faults(model) == set()
        scaled = [node for node in model.graph if node.op_type == "MatMul" and bytes_in_fp32(node)]
        assert bool(scaled) == (precision == "int8")
        for node in scaled:  # control: one that is not cast to fp16 is reported
            cast = next(iter(node.outputs[0].uses())).node
            cast.attributes.add(ir.AttrInt64("to", ir.DataType.FLOAT))
            assert "FLOAT input of MatMul" in faults(model)
            cast.attributes.add(ir.AttrInt64("to", ir.DataType.FLOAT16))
