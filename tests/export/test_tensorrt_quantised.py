"""Quantised graphs as TensorRT for RTX builds them without a GPU: every product reads int8, or int4 or int8 weights,
and attention stays one kernel."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from conftest import HEADS
from eagle_export.tensorrt.build import Built
from eagle_export.tensorrt.kernels import Kernel
from eagle_runtime.bundle.manifest import read_manifest
from trt_network import DRAFT_SIZES, TARGET_SIZES, Network

pytest_plugins = ("trt_bundles",)

PRECISIONS = ("int8", "int8-weight", "int4", "int4-int8")


def products(kernels: list[Kernel]) -> list[Kernel]:
    """Returns the matrix products outside of attention. TensorRT calls them gemm, or Fc where it fuses a weight's
    unpacking."""
    return [kernel for kernel in kernels if kernel.kind == "gemm" or "Fc" in kernel.name]


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


def test_fp16_products_are_counted_as_such(engines_of: Callable[[str], tuple[Path, Built]]) -> None:
    """Control: a graph whose weights are in fp16 does not pass."""
    _, built = engines_of("eagle1")
    draft = next(engine for engine in built.built if engine.name == "draft")
    of_trees = [kernel for kernel in draft.kernels if kernel.profile == 0]
    assert Counter(map(kind, products(of_trees))) == {"fp16": 7}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_initializers_have_types_that_tensorrt_takes(
    precision: str, quantised_bundle_of: Callable[[str, str], Path]
) -> None:
    """TensorRT would build an fp32 product for an fp32 weight, without a warning."""
    for file in ("target/model.onnx", "draft/model.onnx"):
        model = ir.load(quantised_bundle_of("eagle3", precision) / file)
        types = {
            value.dtype for name, value in model.graph.initializers.items() if not name.endswith("rotary_emb.inv_freq")
        }
        allowed = {ir.DataType.FLOAT16, ir.DataType.INT64, ir.DataType.INT8}
        assert types <= allowed | ({ir.DataType.INT4} if precision.startswith("int4") else set())
        assert not any(node.domain for node in model.graph)
