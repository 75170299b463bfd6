"""Quantised graphs as TensorRT for RTX builds them without a GPU: every product reads int8, or int4 or int8 weights,
and attention stays one kernel."""

from __future__ import annotations

import shutil
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import onnx_ir as ir
import pytest

from conftest import HEADS
from eagle_export.commands.cli import main
from eagle_export.tensorrt.build import Built, build_engines
from eagle_export.tensorrt.network import Kernel
from eagle_export.tensorrt.precision import check_capabilities, default_capabilities
from eagle_runtime.base.tree import additive_mask
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.ort.session import OrtSession
from trt_graphs import bytes_in_fp32, faults, scaled_in_fp16
from trt_network import CAPABILITIES, DRAFT_SIZES, TARGET_SIZES, Network

pytest_plugins = ("trt_bundles",)

PRECISIONS = ("int8", "int8-weight", "fp8", "int4", "int4-int8")


def products(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Returns the matrix products outside of attention. TensorRT calls them gemm, or Fc where it fuses the unpacking of
    a weight or the operators after it."""
    return [kernel for kernel in kernels if kernel.kind == "gemm" or "Fc" in kernel.name]


def storing_fp16(kernels: Iterable[Kernel]) -> list[Kernel]:
    """Returns the products of bytes that write the sums before they are scaled, in fp16, where those beyond 65504
    become infinite."""
    return [each for each in products(kernels) if each.reads & {"Int8", "FP8"} and "Half" in each.writes]


def kind(kernel: Kernel) -> str:
    """Returns how a product is quantised."""
    for name in ("Int8", "FP8"):
        if kernel.reads == {name} and name in kernel.holds:
            return name.lower()
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
    if precision == "fp8":  # the LM head in weights only
        return {"fp8": 4 * layers + fc + draft, "int8 weights": 1}
    if precision in ("int8-weight", "int4"):
        return {f"{precision.removesuffix('-weight')} weights": 4 * layers + fc + draft + 1}
    return {"int4 weights": (1 + (not draft)) * layers, "int8 weights": 3 * layers + fc + draft + 1}


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("head", sorted(HEADS))
def test_every_product_is_quantised(head: str, precision: str, quantised_bundle_of: Callable[[str, str], Path]) -> None:
    """For the three compute capabilities at once, and fp8 for 8.9."""
    bundle = quantised_bundle_of(head, precision)
    manifest = read_manifest(bundle)
    assert manifest.head is not None
    layers, eagle3 = manifest.target.num_layers, head == "eagle3"
    graphs = (
        (manifest.target.graph.file, layers, expected(precision, layers, int(eagle3), False), TARGET_SIZES),
        (manifest.head.graph.file, 1, expected(precision, 1, int(not eagle3), True), DRAFT_SIZES),
    )
    for file, attentions, counts, sizes in graphs:
        kernels = Network(bundle / file, sizes).build(["8.9"] if precision == "fp8" else CAPABILITIES)
        assert Counter(map(kind, products(kernels))) == counts, (file, products(kernels))
        assert sum(kernel.is_fused_attention for kernel in kernels) == attentions
        assert not storing_fp16(kernels)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["int8", "int8-weight", "fp8", "int4"])
def test_block_heads(precision: str, quantised_bundle_of: Callable[[str, str], Path], tmp_path: Path) -> None:
    """Every product of the head is quantised too; in int4 but for down, whose 48 inputs are no whole blocks."""
    bundle = Path(shutil.copytree(quantised_bundle_of("reads_state", precision), tmp_path / "bundle"))
    target, draft, _ = build_engines(bundle, "tensorrt-rtx", ["8.9"], context=600).built
    for engine in (target, draft):
        kernels = [kernel for kernel in engine.kernels if kernel.profile == 0]
        assert sum(kernel.is_fused_attention for kernel in kernels) == engine.layers
        assert not storing_fp16(kernels)
        unquantised = [kernel for kernel in products(kernels) if kind(kernel) == "fp16"]
        assert len(unquantised) == (2 if (precision, engine.name) == ("int4", "draft") else 0), unquantised


@pytest.mark.parametrize("head", sorted(HEADS))
def test_fp8_for_compute_capability_12_0(head: str, quantised_bundle_of: Callable[[str, str], Path]) -> None:
    """There TensorRT for RTX multiplies every weight on its own, q, k and v and gate and up too."""
    bundle = quantised_bundle_of(head, "fp8")
    for model, sizes in zip(read_manifest(bundle).models.values(), (TARGET_SIZES, DRAFT_SIZES), strict=True):
        weights = [name for name, weight in model.graph.weights.items() if weight.dtype == "float8_e4m3fn"]
        matrices = [name for name in weights if name.endswith(".fp8")]
        for capabilities in (["12.0"], ["8.9", "12.0"]):
            kernels = Network(bundle / model.graph.file, sizes).build(capabilities)
            assert Counter(map(kind, products(kernels))) == {"fp8": len(matrices), "int8 weights": 1}
            assert not storing_fp16(kernels)
            assert sum(kernel.is_fused_attention for kernel in kernels) == model.num_layers


@pytest.mark.parametrize("precision", ["int8", "fp8"])
@pytest.mark.parametrize(("graph", "sizes"), [("target", TARGET_SIZES), ("draft", DRAFT_SIZES)])
def test_sums_of_bytes_that_are_stored_in_fp16_are_noticed(
    graph: str,
    sizes: dict[str, tuple[int, int]],
    precision: str,
    quantised_bundle_of: Callable[[str, str], Path],
    tmp_path: Path,
) -> None:
    """Control: the same graph with scales in fp16, as older exports wrote it, has as many kernels, and those of its
    products of bytes write sums in fp16."""
    bundle = quantised_bundle_of("eagle3", precision)
    wide = Network(bundle / graph / "model.onnx", sizes).build(["8.9"])
    model = ir.load(bundle / graph / "model.onnx")
    assert scaled_in_fp16(model) > 0
    ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")
    narrow = Network(tmp_path / "model.onnx", sizes).build(["8.9"])
    assert len(narrow) == len(wide) > 0
    counted = Counter(map(kind, products(wide)))
    assert counted == Counter(map(kind, products(narrow)))
    assert len(storing_fp16(narrow)) == counted[precision] > 0


def test_fp16_products_are_counted_as_such(engines_of: Callable[[str], tuple[Path, Built]]) -> None:
    """Control: a graph whose weights are in fp16 does not pass."""
    _, built = engines_of("eagle3")
    draft = next(engine for engine in built.built if engine.name == "draft")
    of_trees = [kernel for kernel in draft.kernels if kernel.profile == 0]
    assert set(map(kind, products(of_trees))) == {"fp16"} and len(products(of_trees)) >= 7 * 5


@pytest.mark.parametrize("precision", PRECISIONS)
def test_graphs_have_nothing_that_tensorrt_rejects_or_builds_in_fp32(
    precision: str, quantised_bundle_of: Callable[[str, str], Path]
) -> None:
    """But for products of bytes, which are scaled in fp32 and cast to fp16."""
    for file in ("target/model.onnx", "draft/model.onnx"):
        model = ir.load(quantised_bundle_of("eagle3", precision) / file)
        assert faults(model) == set()
        scaled = [node for node in model.graph if node.op_type == "MatMul" and bytes_in_fp32(node)]
        assert bool(scaled) == (precision in ("int8", "fp8"))
        for node in scaled:  # control: one that is not cast to fp16 is reported
            cast = next(iter(node.outputs[0].uses())).node
            cast.attributes.add(ir.AttrInt64("to", ir.DataType.FLOAT))
            assert "FLOAT input of MatMul" in faults(model)
            cast.attributes.add(ir.AttrInt64("to", ir.DataType.FLOAT16))


def test_fp8_is_refused_for_cards_that_lack_it(
    quantised_bundle_of: Callable[[str, str], Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """In a line, before a build; by default engines are for the others."""
    bundle = quantised_bundle_of("eagle3", "fp8")
    engines = ["engines", str(bundle), "--backend", "tensorrt-rtx", "--compute-capability"]
    assert main([*engines, "8.9", "8.6", "8.0"]) == 2
    assert capsys.readouterr().err == (
        f"eagle-export engines: {bundle} multiplies in fp8, which GPUs of compute capability 8.0 and 8.6 lack; build "
        "for 8.9 and 12.0, or export it in int8\n"
    )
    assert not (bundle / "engines").exists()
    manifest = read_manifest(bundle)
    assert default_capabilities(manifest) == ("8.9", "12.0")
    assert default_capabilities(read_manifest(quantised_bundle_of("eagle3", "int8"))) == CAPABILITIES
    check_capabilities(bundle, manifest, ["8.9", "9.0", "12.0"])


def test_fp8_runs_on_a_cpu_close_to_fp32(
    quantised_bundle_of: Callable[[str, str], Path], bundle_of: Callable[..., Path]
) -> None:
    """As the certificate runs it: ONNX Runtime dequantises fp8."""
    rows = np.arange(16)
    feeds = {"input_ids": rows + 60, "position_ids": rows, "logit_rows": rows}
    logits: list[npt.NDArray[Any]] = []
    for bundle in (bundle_of("eagle3"), quantised_bundle_of("eagle3", "fp8")):
        graph = read_manifest(bundle).target.graph
        mask = additive_mask(np.tri(16, dtype=np.bool_), graph.inputs["tree_mask"].dtype)
        with OrtSession(bundle / graph.file, graph, 1) as session:
            logits.append(session.run({**feeds, "tree_mask": mask}, session.new_cache(16))["logits"].copy())
    error = np.linalg.norm(logits[1] - logits[0]) / np.linalg.norm(logits[0])
    assert 0 < error < 0.1


@pytest.mark.parametrize("precision", ["int8", "fp8", "int4", pytest.param("int8-weight", marks=pytest.mark.slow)])
def test_heads_with_small_weights_draft_in_one_call(
    precision: str, quantised_bundle_of: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """TensorRT for RTX 1.7 fails where the levels' products share a weight of int8 or int4 (compose.Writer.copy). Each
    has a name of its own there, and none is stored twice in the graph's files."""
    bundle = tmp_path / "bundle"
    shutil.copytree(quantised_bundle_of("eagle3", precision), bundle)
    built = {engine.name: engine for engine in build_engines(bundle, "tensorrt-rtx", ["8.9"], context=512).built}
    depth = read_manifest(bundle).tree_defaults.depth
    assert built["draft"].spec.fused_attention == depth + 1
    for engine in built.values():
        assert engine.kernels and not storing_fp16(engine.kernels)
    assert not list(bundle.glob("engines/*/*.data"))
