"""The fp16 graphs are built by NVIDIA's TensorRT-RTX, which needs no GPU for that, and what it compiled is read from
its log: every attention must have become one fused kernel."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file

from conftest import GOLDEN, HEADS
from eagle_export.bundle import export
from eagle_export.tensorrt.kernels import read_kernels
from eagle_export.trace import OPSET
from eagle_runtime.bundle.manifest import read_manifest
from trt_network import CAPABILITIES, DRAFT_SIZES, TARGET_SIZES, Network

# A Llama of about a billion parameters, but for its number of layers and its vocabulary.
HIDDEN, INTERMEDIATE, HEAD_COUNT, KV_HEADS, VOCAB = 2048, 8192, 32, 8, 4096


def faults(model: ir.Model) -> set[str]:
    """What TensorRT rejects, ignores in silence or would build in fp32, in an fp16 graph."""
    found = {f"operator domain {node.domain!r}" for node in model.graph if node.domain}
    found |= {f"opset domain {domain!r}" for domain in model.opset_imports if domain}
    found |= {
        f"{value.dtype} weight {name}"
        for name, value in model.graph.initializers.items()
        # Frequencies turn positions of thousands into angles: halves have no digits left for that.
        if value.dtype in (ir.DataType.FLOAT, ir.DataType.DOUBLE, ir.DataType.BFLOAT16)
        and not name.endswith("rotary_emb.inv_freq")
    }
    for node in model.graph:
        if node.op_type in ("Attention", "MatMul"):
            types = {value.dtype for value in node.inputs if value is not None}
            found |= {f"{kind} input of {node.op_type}" for kind in types - {ir.DataType.FLOAT16}}
        if node.op_type == "Attention":
            found |= _attention_faults(node)
    return found


def _attention_faults(node: ir.Node) -> set[str]:
    neutral = {"is_causal": 0, "softcap": 0.0, "qk_matmul_output_mode": 0, "scale": 1.0}
    found = {f"attribute {name}" for name, item in node.attributes.items() if item.value != neutral.get(name)}
    if len(node.outputs) != 1:
        found.add(f"{len(node.outputs)} outputs of Attention")
    mask, *more = [*node.inputs[3:], None]
    if mask is None:
        found.add("no mask")
    slots = ("past_key", "past_value", "nonpad_kv_seqlen", "")
    return found | {f"input {slot}" for slot, value in zip(slots, more, strict=False) if value is not None}


@dataclass(frozen=True, slots=True)
class Llama:
    """Sizes of a random checkpoint."""

    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor]) -> Path:
        """A Hugging Face folder of bfloat16 tensors, the type of most published checkpoints."""
        folder.mkdir()
        config = {
            "model_type": "llama",
            "hidden_size": HIDDEN,
            "intermediate_size": self.intermediate,
            "num_hidden_layers": self.num_layers,
            "num_attention_heads": self.num_heads,
            "num_key_value_heads": self.kv_heads,
            "head_dim": self.head_dim,
            "vocab_size": VOCAB,
            "max_position_embeddings": 2048,
            "rms_norm_eps": 1e-5,
            "rope_theta": 500000.0,
            "tie_word_embeddings": False,
            "torch_dtype": "bfloat16",
            "eos_token_id": 1,
        }
        (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
        save_file(dict(tensors), folder / "model.safetensors")
        return folder

    def target(self) -> dict[str, torch.Tensor]:
        tensors = {name: gaussian(VOCAB, HIDDEN) for name in ("model.embed_tokens.weight", "lm_head.weight")}
        tensors["model.norm.weight"] = ones(HIDDEN)
        for layer in range(self.num_layers):
            tensors |= self.layer(f"model.layers.{layer}.", HIDDEN)
        return tensors

    def eagle1(self) -> dict[str, torch.Tensor]:
        tensors = self.layer("layers.0.", HIDDEN) | {"fc.weight": gaussian(HIDDEN, 2 * HIDDEN)}
        del tensors["layers.0.input_layernorm.weight"]
        return tensors

    def eagle3(self, draft_vocab: int) -> dict[str, torch.Tensor]:
        kept = torch.arange(VOCAB) % (VOCAB // draft_vocab) == 0
        return self.layer("midlayer.", 2 * HIDDEN) | {
            "fc.weight": gaussian(HIDDEN, 3 * HIDDEN),
            "midlayer.hidden_norm.weight": ones(HIDDEN),
            "norm.weight": ones(HIDDEN),
            "lm_head.weight": gaussian(draft_vocab, HIDDEN),
            "d2t": kept.nonzero()[:, 0] - torch.arange(draft_vocab),
            "t2d": kept,
        }

    def layer(self, prefix: str, width: int) -> dict[str, torch.Tensor]:
        q, kv = self.num_heads * self.head_dim, self.kv_heads * self.head_dim
        shapes = {
            "self_attn.q_proj": (q, width),
            "self_attn.k_proj": (kv, width),
            "self_attn.v_proj": (kv, width),
            "self_attn.o_proj": (HIDDEN, q),
            "mlp.gate_proj": (self.intermediate, HIDDEN),
            "mlp.up_proj": (self.intermediate, HIDDEN),
            "mlp.down_proj": (HIDDEN, self.intermediate),
        }
        norms = ("input_layernorm", "post_attention_layernorm")
        return {f"{prefix}{name}.weight": gaussian(*shape) for name, shape in shapes.items()} | {
            f"{prefix}{name}.weight": ones(HIDDEN) for name in norms
        }


def gaussian(*shape: int) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).normal_(0, 0.02)


def ones(size: int) -> torch.Tensor:
    return torch.ones(size, dtype=torch.bfloat16)


def check_bundle(bundle: Path) -> None:
    """Both graphs are sound and build for every capability, each attention as one kernel in halves."""
    manifest = read_manifest(bundle)
    assert manifest.head is not None
    graphs = (
        (manifest.target.graph.file, manifest.target.num_layers, TARGET_SIZES),
        (manifest.head.graph.file, manifest.head.num_layers, DRAFT_SIZES),
    )
    for file, num_layers, sizes in graphs:
        assert faults(ir.load(bundle / file)) == set()
        network = Network(bundle / file, sizes)
        for capability in CAPABILITIES:
            kernels = network.build(capability)
            assert kernels, (file, capability, network.errors)
            fused = [kernel for kernel in kernels if kernel.is_fused_attention]
            assert len(fused) == num_layers, (file, capability, [kernel.name for kernel in kernels])
            assert {kernel.reads | kernel.writes for kernel in fused} == {frozenset({"Half"})}, (file, capability)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """pytest keeps the folders of its last runs; a gigabyte of random weights is not worth keeping."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("kind", HEADS)
def test_golden_pair(kind: str, folder: Path) -> None:
    check_bundle(export(GOLDEN / "target", GOLDEN / HEADS[kind], folder / "bundle", precision="fp16").bundle)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_real_shape_eagle1(head_dim: int, folder: Path) -> None:
    llama = Llama(2, HEAD_COUNT, KV_HEADS, head_dim, INTERMEDIATE)
    target = llama.write(folder / "target", llama.target())
    head = llama.write(folder / "head", llama.eagle1())
    check_bundle(export(target, head, folder / "bundle", precision="fp16").bundle)


def test_real_shape_eagle3(folder: Path) -> None:
    """Three taps need a target of seven layers; they are narrow inside, so that only the head is large."""
    llama, head = Llama(7, 8, 2, 128, 256), Llama(1, HEAD_COUNT, KV_HEADS, 128, INTERMEDIATE)
    target_folder = llama.write(folder / "target", llama.target())
    head_folder = head.write(folder / "head", head.eagle3(draft_vocab=VOCAB // 2))
    check_bundle(export(target_folder, head_folder, folder / "bundle", precision="fp16").bundle)


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "0 lists"),
        (["Layers:\n", "Layers:\n"], "2 lists"),
        (["Layers:\nName: _gemm_mha_v2, LayerType: kgen, Ports: []"], "unknown form"),
    ],
)
def test_log_of_another_form_is_refused(messages: list[str], complaint: str) -> None:
    """Control: a release that words its log differently cannot pass for an engine that was looked at."""
    with pytest.raises(ValueError, match=complaint):
        read_kernels(messages)


def test_fp32_attention_does_not_build(bundle_of: Callable[..., Path]) -> None:
    """Control: why there is an fp16 graph at all, and that a failed build is seen."""
    network = Network(bundle_of("eagle1") / "draft/model.onnx", DRAFT_SIZES)
    assert network.build("8.6") == []
    assert any("not supported by a dedicated kernel" in error for error in network.errors)


def test_unfused_attention_is_seen(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    """Control: the same graph, allowed to fall apart into plain kernels, builds, and none of them counts as fused."""
    model = ir.load(bundle_of("eagle1") / "draft/model.onnx")
    for node in model.graph:
        if node.op_type == "Attention":
            node.attributes.add(ir.AttrInt64("TRT_decomposable", 1))
    ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")
    kernels = Network(tmp_path / "model.onnx", DRAFT_SIZES).build("8.6")
    assert any(kernel.kind == "gemm" for kernel in kernels)
    assert not any(kernel.is_fused_attention for kernel in kernels)


def test_capability_is_obeyed(tmp_path: Path) -> None:
    """Control: building for a capability without a card keeps to its limits. FP8 came with 8.9."""
    x = ir.val("x", ir.DataType.FLOAT16, [16, 64])
    scale = ir.val("scale", const_value=ir.tensor([0.01], ir.DataType.FLOAT16, name="scale"))
    quantize = ir.node("QuantizeLinear", [x, scale], {"output_dtype": ir.DataType.FLOAT8E4M3FN})
    back = ir.node("DequantizeLinear", [quantize.outputs[0], scale])
    back.outputs[0].name, back.outputs[0].dtype, back.outputs[0].shape = "y", ir.DataType.FLOAT16, x.shape
    graph = ir.Graph([x], back.outputs, nodes=[quantize, back], initializers=[scale], opset_imports={"": OPSET})
    ir.save(ir.Model(graph, ir_version=11), tmp_path / "model.onnx")
    network = Network(tmp_path / "model.onnx", {})
    assert network.build("8.6") == []
    assert any("fp8" in error for error in network.errors)
    assert network.build("8.9") != []


def _foreign(model: ir.Model, attention: ir.Node) -> None:
    attention.domain = "com.microsoft"


def _causal(model: ir.Model, attention: ir.Node) -> None:
    attention.attributes.add(ir.AttrInt64("is_causal", 1))


def _softcap(model: ir.Model, attention: ir.Node) -> None:
    attention.attributes.add(ir.AttrFloat32("softcap", 30.0))


def _scale(model: ir.Model, attention: ir.Node) -> None:
    attention.attributes.add(ir.AttrFloat32("scale", 0.125))


def _nonpad(model: ir.Model, attention: ir.Node) -> None:
    attention.resize_inputs(7)
    attention.replace_input_with(6, model.graph.inputs[0])


def _past_key(model: ir.Model, attention: ir.Node) -> None:
    attention.resize_inputs(6)
    attention.replace_input_with(4, attention.inputs[1])
    attention.replace_input_with(5, attention.inputs[2])


def _no_mask(model: ir.Model, attention: ir.Node) -> None:
    attention.resize_inputs(3)


SPOILED: dict[str, Callable[[ir.Model, ir.Node], None]] = {
    "operator domain 'com.microsoft'": _foreign,
    "attribute is_causal": _causal,
    "attribute softcap": _softcap,
    "attribute scale": _scale,
    "input nonpad_kv_seqlen": _nonpad,
    "input past_key": _past_key,
    "no mask": _no_mask,
}


@pytest.mark.parametrize("fault", SPOILED)
def test_fault_is_found(fault: str, bundle_of: Callable[..., Path]) -> None:
    """Control: each forbidden thing is named when it is planted. The fp32 graph has only the faults of its type."""
    model = ir.load(bundle_of("eagle1") / "draft/model.onnx")
    before = faults(model)
    assert {"FLOAT input of MatMul", "FLOAT input of Attention", "FLOAT weight head.fc.weight"} <= before
    SPOILED[fault](model, next(node for node in model.graph if node.op_type == "Attention"))
    assert fault in faults(model) - before
