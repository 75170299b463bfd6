"""Bundles for ONNX Runtime's CUDA provider: fp16, and int4 in blocks with fp16 scales. ONNX Runtime runs both on CPUs
too, slowly."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest

from conftest import GOLDEN, HEADS
from eagle_calib.replay import forced_logits
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.recipes.plan import plan
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import GraphSpec, read_manifest
from eagle_runtime.ort.cuda import SHAPES

# What onnxruntime-gpu 1.31 computes on a GPU of the graphs in fp16 (compute capability 8.9).
ON_GPU = {
    "Add", "Attention", "Cast", "Concat", "ConstantOfShape", "Cos", "Gather", "LogSoftmax", "MatMul", "MatMulNBits",
    "Mul", "RMSNormalization", "Reshape", "RotaryEmbedding", "Shape", "Sigmoid", "Sin", "TopK", "Transpose",
    "Unsqueeze",
}  # fmt: skip


@pytest.fixture(scope="module")
def bundle_for_cuda(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Returns a function: kind of head, precision -> bundle of the golden pair."""
    base = tmp_path_factory.mktemp("cuda")

    def bundle(kind: str, precision: str) -> Path:
        folder = base / f"{kind}_{precision}"
        if not folder.exists():
            pair = GOLDEN / "target", GOLDEN / HEADS[kind]
            export(*pair, folder, Settings(precision=precision, backend="cuda", certify=False))
        return folder

    return bundle


def graphs(bundle: Path) -> list[tuple[GraphSpec, onnx.GraphProto]]:
    manifest = read_manifest(bundle)
    specs = [model.graph for model in manifest.models.values()]
    return [(spec, onnx.load(bundle / spec.file, load_external_data=False).graph) for spec in specs]


@pytest.mark.parametrize("precision", ["int4", "fp16"])
def test_every_operator_has_a_cuda_kernel(precision: str, bundle_for_cuda: Callable[[str, str], Path]) -> None:
    for _, graph in graphs(bundle_for_cuda("eagle3", precision)):
        assert {node.op_type for node in graph.node} <= ON_GPU | SHAPES


def test_int4_keeps_the_lm_head_and_computes_in_fp16(bundle_for_cuda: Callable[[str, str], Path]) -> None:
    for spec, graph in graphs(bundle_for_cuda("eagle3", "int4")):
        products = [node for node in graph.node if node.op_type == "MatMul"]
        packed = [node for node in graph.node if node.op_type == "MatMulNBits"]
        layers = 8 if "logits" in spec.outputs else 1
        # The target's graph contains the fc of an EAGLE-3 head.
        assert len(products) == 1 and len(packed) == 7 * layers + (layers == 8)
        scales = {spec.weights[node.input[2]].dtype for node in packed}
        assert scales == {"float16"} and {spec.weights[node.input[1]].dtype for node in packed} == {"uint8"}
        assert {tensor.dtype for tensor in spec.inputs.values()} == {"float16", "int64"}
        assert sum("int4" in done for done in spec.recipe.values()) == len(packed) == len(spec.recipe)


def test_int4_follows_the_source_and_is_lossless(
    bundle_for_cuda: Callable[[str, str], Path], model_of: Callable[..., EagleModel], prompts: list[list[int]]
) -> None:
    with EagleModel.load(bundle_for_cuda("eagle3", "int4"), backend="cpu", threads=1) as model:
        for prompt in prompts[:2]:
            eagle = model.generate(prompt, tree="dynamic", max_new_tokens=24)
            assert eagle.token_ids == model.generate(prompt, max_new_tokens=24, method="vanilla").token_ids
            assert eagle.usage.tau > 1.3
        tokens = prompts[0] + prompts[1]
        exact = forced_logits(model_of("eagle3"), tokens[:1], tokens[1:])
        rounded = forced_logits(model, tokens[:1], tokens[1:])
    assert (exact.argmax(-1) == rounded.argmax(-1)).mean() > 0.8
    assert 0.01 < np.abs(exact - rounded).mean() < 1


def test_fp16_is_one_bundle_for_all_engines(
    bundle_for_cuda: Callable[[str, str], Path], bundle_of: Callable[..., Path]
) -> None:
    """A bundle with TensorRT engines also runs on CUDA and on a CPU."""
    ours, theirs = (
        read_manifest(bundle) for bundle in (bundle_for_cuda("eagle3", "fp16"), bundle_of("eagle3", "fp16"))
    )
    assert ours.files == theirs.files
    assert plan("cuda", "fp16", "fp16", None) == plan("tensorrt-rtx", "fp16", "fp16", None)


def test_static_int8_is_not_offered() -> None:
    """ONNX Runtime's CUDA provider would convert the weights to fp16 in every forward pass."""
    for precision in ("int8", "int8-static", "int8-weight"):
        with pytest.raises(ExportError, match=f"backend cuda does not run {precision}; choose one of fp32, fp16, int4"):
            plan("cuda", precision, precision, None)
