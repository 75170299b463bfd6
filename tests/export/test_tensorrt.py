"""The fp16 graphs as TensorRT for RTX builds them, which needs no GPU. The kernels are read from its log: every
attention must be one fused kernel."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import onnx
import onnx_ir as ir
import pytest
import torch
from safetensors.torch import save_file

from conftest import HEADS
from eagle_export.bundle import export
from eagle_export.graphs.trace import OPSET
from eagle_export.tensorrt.build import Built, build_engines
from eagle_export.tensorrt.engine_graphs import engine_graphs
from eagle_export.tensorrt.network import Kernel, read_kernels
from eagle_export.writing.settings import Settings
from eagle_runtime.bundle.manifest import Manifest, read_manifest
from trt_graphs import faults
from trt_network import CAPABILITIES, DRAFT_SIZES, TARGET_SIZES, Network

pytest_plugins = ("trt_bundles",)

# A Llama of about a billion parameters, but for its number of layers and its vocabulary.
HIDDEN, INTERMEDIATE, HEAD_COUNT, KV_HEADS, VOCAB = 2048, 8192, 32, 8, 4096


@dataclass(frozen=True, slots=True)
class Llama:
    """Sizes of a checkpoint with random weights."""

    num_layers: int
    num_heads: int
    kv_heads: int
    head_dim: int
    intermediate: int

    def write(self, folder: Path, tensors: Mapping[str, torch.Tensor], **settings: object) -> Path:
        """A Hugging Face folder of bfloat16 tensors, the type of most published checkpoints. settings: in addition."""
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
            **settings,
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
        tensors = self.layer("layers.0.", HIDDEN) | {"fc.weight": gaussian(HIDDEN, 2 * HIDDEN), "fc.bias": ones(HIDDEN)}
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

    def mtp(self) -> dict[str, torch.Tensor]:
        """In the layout of speculators."""
        names = ("token_layernorm", "hidden_layernorm", "final_layernorm")
        norms = {f"mtp_layers.0.{name}.weight": ones(HIDDEN) for name in names}
        return (
            self.layer("mtp_layers.0.", HIDDEN)
            | norms
            | {"mtp_layers.0.input_proj.weight": gaussian(HIDDEN, 2 * HIDDEN)}
        )

    def block(self, rank: int) -> dict[str, torch.Tensor]:
        """DSpark's tensors as eagle-train writes them, whose rows read the target's state; with rank 0 those of DFlash,
        with Qwen3's norms of queries and keys."""
        tensors = {
            "fc.weight": gaussian(HIDDEN, 2 * HIDDEN),
            "hidden_norm.weight": ones(HIDDEN),
            "norm.weight": ones(HIDDEN),
        }
        for number in range(self.num_layers):
            tensors |= self.layer(f"layers.{number}.", HIDDEN)
            norms = () if rank else ("q_norm", "k_norm")
            tensors |= {f"layers.{number}.self_attn.{name}.weight": ones(self.head_dim) for name in norms}
        if rank:
            tensors |= {f"markov_head.markov_w{number}.weight": gaussian(VOCAB, rank) for number in (1, 2)}
            tensors |= {"mask_embedding": gaussian(1, 1, HIDDEN), "input_fc.weight": gaussian(HIDDEN, 2 * HIDDEN)}
            tensors["lm_head.weight"] = gaussian(VOCAB, HIDDEN)
        return tensors

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


def check_attention(kernels: Sequence[Kernel], num_layers: int) -> None:
    """Every layer's attention is one kernel in fp16, in each profile."""
    for profile in {kernel.profile for kernel in kernels}:
        fused = [kernel for kernel in kernels if kernel.is_fused_attention and kernel.profile == profile]
        assert len(fused) == num_layers, [kernel.name for kernel in kernels]
        assert {kernel.reads | kernel.writes for kernel in fused} == {frozenset({"Half"})}


def check_bundle(bundle: Path) -> None:
    """Both graphs are sound, and build for all compute capabilities with attention fused."""
    manifest = read_manifest(bundle)
    for model, sizes in zip(manifest.models.values(), (TARGET_SIZES, DRAFT_SIZES), strict=True):
        assert faults(ir.load(bundle / model.graph.file)) == set()
        network = Network(bundle / model.graph.file, sizes)
        kernels = network.build()
        assert kernels, (model.graph.file, network.errors)
        check_attention(kernels, model.num_layers)


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """pytest keeps the folders of its last runs; a gigabyte of random weights is not worth keeping."""
    yield tmp_path
    shutil.rmtree(tmp_path)


@pytest.mark.parametrize("kind", HEADS)
def test_golden_pair(kind: str, engines_of: Callable[[str], tuple[Path, Built]]) -> None:
    bundle, built = engines_of(kind)
    manifest = read_manifest(bundle)
    target, draft, keep = built.built
    assert [target.name, draft.name, keep.name] == ["target", "draft", "keep"]
    for model in manifest.models.values():
        assert faults(ir.load(bundle / model.graph.file)) == set()
    assert {kernel.profile for kernel in target.kernels} == {0, 1}
    check_attention(target.kernels, manifest.target.num_layers)
    check_attention(draft.kernels, 1 + manifest.tree_defaults.depth)  # what is read, and the levels
    assert not any(kernel.is_fused_attention for kernel in keep.kernels)


def test_multi_token_prediction(folder: Path) -> None:
    """MiMo's layer, whose first row leaves out its token. It is narrow inside."""
    llama = Llama(1, 8, 2, 128, 256)
    target = llama.write(
        folder / "target", llama.target() | {f"model.{name}": each for name, each in llama.mtp().items()}
    )
    done = export(target, target, folder / "bundle", Settings(precision="fp16", certify=False))
    assert done.manifest.head is not None and done.manifest.head.kind == "mtp"
    check_bundle(done.bundle)


@pytest.mark.parametrize("head_dim", [pytest.param(64, marks=pytest.mark.slow), 128])
def test_real_shape_eagle1(head_dim: int, folder: Path) -> None:
    llama = Llama(2, HEAD_COUNT, KV_HEADS, head_dim, INTERMEDIATE)
    target = llama.write(folder / "target", llama.target())
    head = Llama(1, HEAD_COUNT, KV_HEADS, head_dim, INTERMEDIATE).write(folder / "head", llama.eagle1())
    check_bundle(export(target, head, folder / "bundle", Settings(precision="fp16", certify=False)).bundle)


@pytest.mark.slow
def test_real_shape_eagle3(folder: Path) -> None:
    """Three taps need a target of seven layers. They are narrow inside, so that only the head is large."""
    llama, head = Llama(7, 8, 2, 128, 256), Llama(1, HEAD_COUNT, KV_HEADS, 128, INTERMEDIATE)
    target_folder = llama.write(folder / "target", llama.target())
    head_folder = head.write(folder / "head", head.eagle3(draft_vocab=VOCAB // 2))
    check_bundle(
        export(target_folder, head_folder, folder / "bundle", Settings(precision="fp16", certify=False)).bundle
    )


@pytest.mark.slow
def test_engines_keep_every_weight_once(folder: Path) -> None:
    """Of a head of real width, whose engine holds the embedding of the tokens that it knows and no other."""
    llama, head = Llama(7, 8, 2, 128, 256), Llama(1, HEAD_COUNT, KV_HEADS, 128, INTERMEDIATE)
    target_folder = llama.write(folder / "target", llama.target())
    head_folder = head.write(folder / "head", head.eagle3(draft_vocab=VOCAB // 2))
    bundle, table = folder / "bundle", VOCAB * HIDDEN * 2
    export(target_folder, head_folder, bundle, Settings(precision="fp16", certify=False))
    specs = {engine.name: engine.spec for engine in build_engines(bundle, "tensorrt-rtx", ["8.9"], context=1024).built}
    kept = {name: (bundle / name / "model.onnx.data").stat().st_size - table for name in ("target", "draft")}
    kept["draft"] += table // 2
    for name, nbytes in kept.items():
        weights, size = specs[name].weights, specs[name].size
        assert weights is not None
        print(f"{name}: {nbytes / 1e6:.1f} MB, {weights / 1e6:.1f} MB in GPU memory, {size / 1e6:.1f} MB with kernels")
        assert weights <= 1.06 * nbytes and size <= 1.06 * nbytes + 12e6
    assert specs["keep"].size < 1e6


def check_block_engines(built: Built, manifest: Manifest) -> None:
    """Attention is fused in every layer of target and head, and the engine's graphs hold standard operators alone, so
    no plugin."""
    target, draft, keep = built.built
    assert manifest.head is not None and manifest.head.kind == "block"
    check_attention(target.kernels, manifest.target.num_layers)
    check_attention(draft.kernels, manifest.head.num_layers)
    assert {kernel.profile for kernel in draft.kernels} == {0} and draft.spec.profiles[0].sizes.keys() == {"P"}
    assert not any(kernel.is_fused_attention for kernel in keep.kernels)
    for graph in engine_graphs(built.folder.parents[1], manifest, 512):
        assert {node.domain for node in ir.from_proto(onnx.load_from_string(graph.content)).graph} == {""}


@pytest.mark.parametrize("kind", ["deepspec", pytest.param("reads_state", marks=pytest.mark.slow)])
def test_block_heads(kind: str, engines_of: Callable[[str], tuple[Path, Built]]) -> None:
    bundle, built = engines_of(kind)
    manifest = read_manifest(bundle)
    for model in manifest.models.values():
        assert faults(ir.load(bundle / model.graph.file)) == set()
    check_block_engines(built, manifest)


BLOCKS: dict[str, tuple[int, int, dict[str, object]]] = {  # layers, rank, settings
    "dspark": (2, 256, {"eagle_train": {"kind": "block"}, "block_size": 8, "causal": True}),
    "dflash": (5, 0, {"architectures": ["DFlashDraftModel"], "block_size": 16, "mask_token_id": 3}),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", BLOCKS)
def test_real_shape_block_heads(kind: str, folder: Path) -> None:
    """A target of a billion parameters with the head of eagle-train, and a small one with DFlash's."""
    (layers, rank, settings), count = BLOCKS[kind], 16 if kind == "dspark" else 4
    llama = Llama(count, HEAD_COUNT, KV_HEADS, 64, INTERMEDIATE)
    target = llama.write(folder / "target", llama.target())
    block = Llama(layers, HEAD_COUNT, KV_HEADS, 64, INTERMEDIATE)
    said = {"architectures": ["DSparkDraftModel"], "target_layer_ids": [0, count - 2], "num_target_layers": count}
    said |= {"markov_rank": rank, "draft_vocab_size": VOCAB, "markov_head_type": "vanilla"} if rank else {}
    head = block.write(folder / "head", block.block(rank), **said | settings)
    bundle = export(target, head, folder / "bundle", Settings(precision="fp16", certify=False)).bundle
    built = build_engines(bundle, "tensorrt-rtx", CAPABILITIES, context=1024)
    check_block_engines(built, read_manifest(bundle))
    for engine in built.built:
        print(
            f"{kind}: {engine.name}: {engine.layers} layers, {engine.spec.fused_attention} fused attentions,", end=" "
        )
        print(f"{engine.spec.kernels} kernels, {engine.spec.size / 1e6:.1f} MB, {engine.seconds:.0f} s")
        weights, stored = engine.spec.weights, sum((bundle / name).stat().st_size for name in engine.spec.graph)
        assert weights is not None and weights <= 1.06 * stored + 1e6, "every weight is kept once"


@pytest.mark.parametrize("precision", ["fp16", "int8", "int4"])
def test_one_engine_for_several_capabilities_has_the_kernels_of_each(
    precision: str, bundle_of: Callable[..., Path], quantised_bundle_of: Callable[[str, str], Path]
) -> None:
    """So the kernels of one engine for all capabilities stand for those of an engine for each."""
    bundle = (bundle_of if precision == "fp16" else quantised_bundle_of)("eagle3", precision)
    network = Network(bundle / "draft/model.onnx", DRAFT_SIZES)
    kernels = network.build()
    for capability in CAPABILITIES:
        assert kernels and network.build([capability]) == kernels


@pytest.mark.parametrize(
    ("messages", "complaint"),
    [
        ([], "0 lists"),
        (["Layers:\n", "Layers:\n"], "2 lists"),
        (["Layers:\nName: _gemm_mha_v2, LayerType: kgen, Ports: []"], "unknown format"),
    ],
)
def test_log_of_another_form_is_refused(messages: list[str], complaint: str) -> None:
    """Control: a log that cannot be read is an error, not an engine without kernels."""
    with pytest.raises(ValueError, match=complaint):
        read_kernels(messages)


def test_fp32_attention_does_not_build(bundle_of: Callable[..., Path]) -> None:
    """Control: fp16 graphs are needed, and a failed build is noticed."""
    network = Network(bundle_of("eagle1") / "draft/model.onnx", DRAFT_SIZES)
    assert network.build(["8.6"]) == []
    assert any("not supported by a dedicated kernel" in error for error in network.errors)


def test_unfused_attention_is_noticed(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    """Control: the same graph, if its attention may be split into several kernels, builds, and none of them counts as
    fused."""
    model = ir.load(bundle_of("eagle1") / "draft/model.onnx")
    for node in model.graph:
        if node.op_type == "Attention":
            node.attributes.add(ir.AttrInt64("TRT_decomposable", 1))
    ir.save(model, tmp_path / "model.onnx", external_data="model.onnx.data")
    kernels = Network(tmp_path / "model.onnx", DRAFT_SIZES).build(["8.6"])
    assert any(kernel.kind == "gemm" for kernel in kernels)
    assert not any(kernel.is_fused_attention for kernel in kernels)


def test_an_engine_keeps_to_the_limits_of_its_capabilities(tmp_path: Path) -> None:
    """Control: also without a GPU, and of all if there are several. FP8 came with 8.9."""
    x = ir.val("x", ir.DataType.FLOAT16, [16, 64])
    scale = ir.val("scale", const_value=ir.tensor([0.01], ir.DataType.FLOAT16, name="scale"))
    quantize = ir.node("QuantizeLinear", [x, scale], {"output_dtype": ir.DataType.FLOAT8E4M3FN})
    back = ir.node("DequantizeLinear", [quantize.outputs[0], scale])
    back.outputs[0].name, back.outputs[0].dtype, back.outputs[0].shape = "y", ir.DataType.FLOAT16, x.shape
    graph = ir.Graph([x], back.outputs, nodes=[quantize, back], initializers=[scale], opset_imports={"": OPSET})
    ir.save(ir.Model(graph, ir_version=11), tmp_path / "model.onnx")
    network = Network(tmp_path / "model.onnx", {})
    for capabilities in (["8.6"], CAPABILITIES):
        assert network.build(capabilities) == []
        assert any("fp8" in error for error in network.errors)
    assert network.build(["8.9"]) != []


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
def test_a_planted_fault_is_reported(fault: str, bundle_of: Callable[..., Path]) -> None:
    """Control: the fp32 graph has the faults of its type, and reports one more."""
    model = ir.load(bundle_of("eagle1") / "draft/model.onnx")
    before = faults(model)
    assert {"FLOAT input of MatMul", "FLOAT input of Attention", "FLOAT weight head.fc.weight"} <= before
    SPOILED[fault](model, next(node for node in model.graph if node.op_type == "Attention"))
    assert fault in faults(model) - before
