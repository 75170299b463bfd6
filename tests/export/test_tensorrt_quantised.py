"""The quantised fp16 graphs as TensorRT-RTX builds them without a GPU: every product runs on int8, or on int4 or int8
weights, and attention stays one kernel."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from conftest import GOLDEN, HEADS, put_tokenizer
from eagle_calib.calibrate import calibrate
from eagle_export.bundle import export
from eagle_export.tensorrt.kernels import Kernel
from eagle_runtime.bundle.manifest import read_manifest
from trt_network import CAPABILITIES, DRAFT_SIZES, TARGET_SIZES, Network

KINDS = sorted(HEADS)


@pytest.fixture(scope="module")
def calibrations(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for kind in KINDS:
        bundle = tmp_path_factory.mktemp(kind) / "bundle"
        shutil.copytree(bundle_of(kind), bundle)
        put_tokenizer(bundle)
        folders[kind] = bundle.parent / "calibration"
        calibrate(bundle, folders[kind], threads=1, max_tokens=300)
    return folders


def products(kernels: list[Kernel]) -> list[Kernel]:
    """Matrix products, attention's own aside: TensorRT calls them gemm, or Fc where it fuses a weight's unpacking."""
    return [kernel for kernel in kernels if kernel.kind == "gemm" or "Fc" in kernel.name]


def kind(kernel: Kernel) -> str:
    """How a product is quantised."""
    if kernel.reads == {"Int8"} and "Int8" in kernel.holds:
        return "int8"
    if kernel.reads == {"Half"} and kernel.holds & {"Int4", "Int8"}:
        return "int4 weights" if "Int4" in kernel.holds else "int8 weights"
    return "halves"


def expected(precision: str, layers: int, fc: int, draft: bool) -> dict[str, int]:
    """How many products of each kind a graph has: q, k, v as one and gate, up as another where they are of one kind,
    o, down, fc where it is in this graph, and the LM head. In a head q is apart, being of the wanted rows alone.

    A target's q, k and v read a norm's output: then int4 takes q, and k and v stay int8."""
    if precision == "int8":  # down and the LM head in weights only
        return {"int8": 3 * layers + fc + draft, "int8 weights": layers + 1}
    if precision == "int8-weight":
        return {"int8 weights": 4 * layers + fc + draft + 1}
    return {"int4 weights": (1 + (not draft)) * layers, "int8 weights": 3 * layers + fc + draft + 1}


@pytest.mark.parametrize("precision", ["int8", "int8-weight", "int4"])
@pytest.mark.parametrize("head", KINDS)
def test_every_product_is_quantised(head: str, precision: str, calibrations: dict[str, Path], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    export(
        GOLDEN / "target",
        GOLDEN / HEADS[head],
        bundle,
        precision=precision,
        backend="tensorrt-rtx",
        calibration=calibrations[head],
        certify=False,
    )
    manifest = read_manifest(bundle)
    assert manifest.head is not None
    layers, eagle3 = manifest.target.num_layers, head == "eagle3"
    graphs = (
        (manifest.target.graph.file, layers, expected(precision, layers, int(eagle3), False), TARGET_SIZES),
        (manifest.head.graph.file, 1, expected(precision, 1, int(not eagle3), True), DRAFT_SIZES),
    )
    for file, attentions, counts, sizes in graphs:
        network = Network(bundle / file, sizes)
        for capability in CAPABILITIES:
            kernels = network.build(capability)
            assert Counter(map(kind, products(kernels))) == counts, (file, capability, products(kernels))
            assert sum(kernel.is_fused_attention for kernel in kernels) == attentions


def test_halves_are_seen(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    """Control: a graph whose weights stayed in halves does not pass."""
    bundle = bundle_of("eagle1", "fp16")
    found = products(Network(bundle / "draft/model.onnx", DRAFT_SIZES).build("8.6"))
    assert Counter(map(kind, found)) == {"halves": 7}


@pytest.mark.parametrize("precision", ["int8", "int8-weight", "int4"])
def test_initializers_are_of_the_types_that_tensorrt_takes(
    precision: str, calibrations: dict[str, Path], tmp_path: Path
) -> None:
    """An fp32 weight would become an fp32 product without a word."""
    bundle = tmp_path / "bundle"
    export(
        GOLDEN / "target",
        GOLDEN / HEADS["eagle3"],
        bundle,
        precision=precision,
        backend="tensorrt-rtx",
        calibration=calibrations["eagle3"],
        certify=False,
    )
    for file in ("target/model.onnx", "draft/model.onnx"):
        model = ir.load(bundle / file)
        types = {
            value.dtype for name, value in model.graph.initializers.items() if not name.endswith("rotary_emb.inv_freq")
        }
        allowed = {ir.DataType.FLOAT16, ir.DataType.INT64, ir.DataType.INT8}
        assert types <= allowed | ({ir.DataType.INT4} if precision == "int4" else set())
        assert not any(node.domain for node in model.graph)
