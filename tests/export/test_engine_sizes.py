"""How large engines are next to the weights they are built from, at the shape of a model of 8 billion parameters."""

from __future__ import annotations

import json
import math
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from eagle_calib.calibration import Input, Observed, Source, Tokens, write_calibration
from eagle_export.bundle import export
from eagle_export.reading.checkpoint import EMBEDDING
from eagle_export.tensorrt.build import Built, build_engines
from eagle_export.tensorrt.precision import default_capabilities
from eagle_export.writing.settings import Settings
from eagle_runtime.bundle.graph import GraphSpec
from eagle_runtime.bundle.manifest import DTYPE_BITS, read_manifest
from grow import write_folder

pytest.importorskip("tensorrt_rtx")
pytest_plugins = ("trt_bundles",)

HIDDEN, INTERMEDIATE, HEADS, KV_HEADS, HEAD_DIM = 4096, 14336, 32, 8, 128
VOCAB = 32768  # a quarter of Llama-3's, so that the layers count
CONTEXT = 4096
LARGEST = 1.06  # of the weights
KERNEL = 150_000  # bytes, for three compute capabilities
PRECISIONS = ("fp16", "int8", "int8-weight", "fp8", "int4")
LAYER = {
    "self_attn.q_proj": (HEADS * HEAD_DIM, HIDDEN),
    "self_attn.k_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (KV_HEADS * HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HEADS * HEAD_DIM),
    "mlp.gate_proj": (INTERMEDIATE, HIDDEN),
    "mlp.up_proj": (INTERMEDIATE, HIDDEN),
    "mlp.down_proj": (HIDDEN, INTERMEDIATE),
}


def tensors(layers: int) -> Iterator[tuple[str, Tensor]]:
    """Random weights of a target."""
    for name in ("model.embed_tokens", "lm_head"):
        yield f"{name}.weight", torch.empty(VOCAB, HIDDEN, dtype=torch.float16).normal_(0, 0.02)
    yield "model.norm.weight", torch.ones(HIDDEN, dtype=torch.float16)
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name, shape in LAYER.items():
            yield f"{prefix}{name}.weight", torch.empty(shape, dtype=torch.float16).normal_(0, 0.02)
        for name in ("input_layernorm", "post_attention_layernorm"):
            yield f"{prefix}{name}.weight", torch.ones(HIDDEN, dtype=torch.float16)


def write_target(folder: Path, layers: int) -> Path:
    """Writes a Llama of the shape with random weights."""
    config = {
        "model_type": "llama",
        "hidden_size": HIDDEN,
        "intermediate_size": INTERMEDIATE,
        "num_hidden_layers": layers,
        "num_attention_heads": HEADS,
        "num_key_value_heads": KV_HEADS,
        "head_dim": HEAD_DIM,
        "vocab_size": VOCAB,
        "max_position_embeddings": CONTEXT,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "tie_word_embeddings": False,
        "eos_token_id": 1,
    }
    torch.manual_seed(0)
    write_folder(folder, config, tensors(layers), torch.float16, 1 << 30)
    return folder


def write_inputs(folder: Path, layers: int) -> Path:
    """Writes a calibration of a few random rows."""
    folder.mkdir()
    rng = np.random.default_rng(0)
    inputs = []
    for layer in range(layers):
        for name, (_, width) in LAYER.items():
            sample = rng.standard_normal((16, width)).astype(np.float32)
            observed = Observed(len(sample), np.abs(sample).max(0), sample)
            inputs.append(Input(f"{layer}.{name}", (f"model.layers.{layer}.{name}.weight",), observed))
    source = Source({}, "0" * 64, Tokens(16, 16))
    write_calibration(folder, source, {"target": inputs}, np.ones(VOCAB, np.float32))
    return folder


def stored_bytes(graph: GraphSpec) -> int:
    """Bytes of a graph's weights but for the embedding, which engines leave to the host."""
    weights = (weight for name, weight in graph.weights.items() if name != EMBEDDING)
    return sum(math.prod(map(int, weight.shape)) * DTYPE_BITS[weight.dtype] // 8 for weight in weights)


def check_engine(target: Path, calibration: Path, precision: str, folder: Path) -> None:
    """The engine for all cards that have the precision is no larger than LARGEST times the bundle's weights. Prints
    sizes, the time and the memory of the build."""
    calibrated = precision in ("int8", "fp8")
    done = export(
        target,
        None,
        folder / "bundle",
        Settings(
            precision=precision,
            backend="tensorrt-rtx",
            calibration=calibration if calibrated else None,
            record=False,
            certify=False,
        ),
    )
    shutil.rmtree(target)  # room on the disk
    stored = stored_bytes(done.manifest.target.graph)
    code = (
        "import resource, sys; from eagle_export.commands.cli import main; "
        f"assert main(['engines', {str(done.bundle)!r}, '--backend', 'tensorrt-rtx', '--json']) == 0; "
        "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024)"
    )
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    built = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    report, peak = built.stdout.splitlines()
    engine = json.loads(report)["engines"]["target"]
    assert json.loads(report)["compute_capabilities"] == list(default_capabilities(done.manifest))
    print(
        f"{precision}: weights {stored / 1e6:.1f} MB, engine {engine['bytes'] / 1e6:.1f} MB "
        f"({engine['bytes'] / stored:.3f}), {engine['seconds']:.0f} s, {int(peak) / 1e9:.1f} GB"
    )
    assert engine["bytes"] <= LARGEST * stored
    assert engine["fused_attention"] == done.manifest.target.num_layers


def check_kernels(bundle: Path, built: Built) -> None:
    """What an engine of a small model has besides its weights are its kernels, of all profiles."""
    models = read_manifest(bundle).models
    assert {engine.name for engine in built.built} >= set(models)
    for engine in built.built:
        weights = stored_bytes(models[engine.name].graph) if engine.name in models else 0
        assert engine.spec.size < weights + KERNEL * len(engine.kernels)


def test_kernels_are_small(engines_of: Callable[[str], tuple[Path, Built]]) -> None:
    check_kernels(*engines_of("eagle3"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", [*PRECISIONS[1:], "int4-int8"])
def test_kernels_are_small_in_every_precision(
    precision: str, quantised_bundle_of: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """And every engine of the golden pair builds, for all cards that have the precision."""
    bundle = Path(shutil.copytree(quantised_bundle_of("eagle3", precision), tmp_path / "bundle"))
    check_kernels(bundle, build_engines(bundle, "tensorrt-rtx"))


@pytest.mark.slow
@pytest.mark.parametrize("precision", PRECISIONS)
def test_eight_layers_of_eight_billion_parameters(precision: str, tmp_path: Path) -> None:
    """1.7 billion parameters in their layers. Minutes each, int8 the longest; -s prints sizes, time and memory."""
    layers = 8
    try:
        check_engine(
            write_target(tmp_path / "target", layers), write_inputs(tmp_path / "inputs", layers), precision, tmp_path
        )
    finally:
        shutil.rmtree(tmp_path)
