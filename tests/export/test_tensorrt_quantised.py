"""The quantised fp16 graphs as TensorRT-RTX builds them without a GPU: every product runs on int8, or on int4 or int8
weights, and attention stays one kernel."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import onnx_ir as ir
import pytest

from conftest import GOLDEN, HEADS
from eagle_calib.calibrate import calibrate
from eagle_export.bundle import export
from eagle_export.kernels import Kernel
from eagle_runtime.manifest import read_manifest
from trt_network import CAPABILITIES, DRAFT_SIZES, TARGET_SIZES, Network

KINDS = sorted(HEADS)


@pytest.fixture(scope="module")
def calibrations(bundle_of: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folders = {}
    for kind in KINDS:
        bundle = tmp_path_factory.mktemp(kind) / "bundle"
        shutil.copytree(bundle_of(kind), bundle)
        shutil.copyfile(GOLDEN / "byte_tokenizer.json", bundle / "tokenizer.json")
        folders[kind] = bundle.parent / "calibration"
        calibrate(bundle, folders[kind], threads=1, max_tokens=300)
    return folders


def products(kernels: list[Kernel]) -> list[Kernel]:
    """Matrix products, attention's own aside: TensorRT calls them gemm, or Fc where it fuses a weight's unpacking."""
    return [kernel for kernel in kernels if kernel.kind == "gemm" or "Fc" in kernel.name]


def weight_types(precision: str, kernel: Kernel) -> bool:
    """Whether a product is of the precision's kind."""
    if precision == "int8":
        return kernel.reads == {"Int8"} and "Int8" in kernel.holds
    return kernel.reads == {"Half"} and bool(kernel.holds & ({"Int4", "Int8"} if precision == "int4" else {"Int8"}))


@pytest.mark.parametrize("precision", ["int8", "int8-weight", "int4"])
@pytest.mark.parametrize("kind", KINDS)
def test_every_product_is_quantised(kind: str, precision: str, calibrations: dict[str, Path], tmp_path: Path) -> None:
    bundle = tmp_path / "bundle"
    export(
        GOLDEN / "target",
        GOLDEN / HEADS[kind],
        bundle,
        precision=precision,
        backend="tensorrt-rtx",
        calibration=calibrations[kind],
        certify=False,
    )
    manifest = read_manifest(bundle)
    assert manifest.head is not None
    # q, k, v as one product and gate, up as another; then the LM head, and fc in the head's graph or EAGLE-3's target.
    eagle3 = kind == "eagle3"
    graphs = (
        (manifest.target.graph.file, manifest.target.num_layers, 1 + eagle3, TARGET_SIZES),
        (manifest.head.graph.file, 1, 2 - eagle3, DRAFT_SIZES),
    )
    for file, layers, more, sizes in graphs:
        network = Network(bundle / file, sizes)
        for capability in CAPABILITIES:
            kernels = network.build(capability)
            found = products(kernels)
            assert len(found) == 4 * layers + more, (file, capability, [kernel.name for kernel in kernels])
            wrong = [kernel for kernel in found if not weight_types(precision, kernel)]
            assert not wrong, (file, capability, wrong)
            assert sum("Int4" in kernel.holds for kernel in found) == (len(found) - 1 if precision == "int4" else 0)
            assert sum(kernel.is_fused_attention for kernel in kernels) == layers


def test_halves_are_seen(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    """Control: a graph whose weights stayed in halves does not pass."""
    bundle = bundle_of("eagle1", "fp16")
    found = products(Network(bundle / "draft/model.onnx", DRAFT_SIZES).build("8.6"))
    assert len(found) == 6 and not any(weight_types(name, kernel) for kernel in found for name in ("int8", "int4"))


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
