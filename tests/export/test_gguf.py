"""Targets in GGUF files: bundles equal those of the checkpoints that the files were written from."""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx_ir as ir
import pytest
import torch

from conftest import needs_operators
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.graphs.pair import open_pair, weight_sources
from eagle_export.inspection.report import inspect
from eagle_export.reading.checkpoint import open_checkpoint
from eagle_export.reading.families.registry import FAMILIES
from eagle_export.reading.families.source import load_source
from eagle_export.reading.families.target import open_target
from eagle_export.reading.gguf.architectures import architecture_of
from eagle_export.reading.gguf.checkpoint import open_gguf, open_stored
from eagle_export.reading.gguf.file import GgufFile
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import read_manifest
from insides import bundle_in

gguf = pytest.importorskip("gguf")
from gguf_writer import KINDS, write_gguf  # noqa: E402
from tiny_families import RANDOM  # noqa: E402

CONTEXT, VOCAB = 256, 96
DEMO = Path(__file__).parents[2] / "tools/demo_pair"


@dataclass(frozen=True)
class Row:
    """A family, and how its config differs from that of all. shared: what a file's values share with the source's."""

    model_type: str
    config: dict[str, Any] = field(default_factory=dict)


LLAMA3 = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LONGROPE = {"rope_type": "longrope", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
FACTORS = {"short_factor": [1.0, 1.5, 2.0, 2.5], "long_factor": [2.0, 3.0, 5.0, 9.0]}
LINEAR = {"rope_type": "linear", "rope_theta": 20000.0, "factor": 4.0}
YARN = {"rope_type": "yarn", "rope_theta": 5e5, "factor": 4.0, "original_max_position_embeddings": 64}
NEAR = {"rope_type": "default", "rope_theta": 10000.0}
PROPORTIONAL = {"rope_type": "proportional", "rope_theta": 5e5, "partial_rotary_factor": 0.7}
GEMMA4 = {"head_dim": 16, "global_head_dim": 44, "num_hidden_layers": 4, "sliding_window": 12}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
CAPS = {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
QWEN35 = {
    "head_dim": 32,
    "num_hidden_layers": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 32,
    "rope_parameters": {**NEAR, "partial_rotary_factor": 0.5},
}
SCALES = {"embedding_multiplier": 3.0, "attention_multiplier": 0.2, "residual_multiplier": 0.7, "logits_scaling": 2.0}
GRANITE4 = {
    **SCALES,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "shared_intermediate_size": 96,
    "mamba_n_heads": 8,
    "mamba_d_state": 16,
}
ROWS = {
    "Llama 3, tied": Row(
        "llama",
        {
            "tie_word_embeddings": True,
            "head_dim": 64,
            "rope_parameters": {**LLAMA3, "original_max_position_embeddings": 8192},
        },
    ),
    "Llama with biases and a smaller original context": Row(
        "llama",
        {
            "attention_bias": True,
            "mlp_bias": True,
            "head_dim": 64,
            "rope_parameters": {**LLAMA3, "factor": 4.0, "original_max_position_embeddings": 1024},
        },
    ),
    "Mistral": Row("mistral", {"sliding_window": None, "head_dim": 32}),
    "Ministral-3": Row(
        "ministral3",
        {
            "sliding_window": None,
            "head_dim": 32,
            "rope_parameters": {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1},
        },
    ),
    "Qwen2.5": Row("qwen2", {"rope_parameters": {**NEAR, "rope_theta": 1e6}}),
    "Qwen3": Row("qwen3", {"head_dim": 32, "tie_word_embeddings": True}),
    "Qwen3.5": Row("qwen3_5_text", {**QWEN35, "linear_num_value_heads": 2, "tie_word_embeddings": True}),
    "Qwen3.5, with more values than keys": Row(
        "qwen3_5_text",
        {
            **QWEN35,
            "layer_types": ["linear_attention", "full_attention", "linear_attention", "linear_attention"],
            "linear_num_value_heads": 6,
            "mtp_num_hidden_layers": 1,
        },
    ),
    "Qwen3.5, with experts": Row(
        "qwen3_5_moe_text",
        {
            **QWEN35,
            **EXPERTS,
            "linear_num_value_heads": 4,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 64,
        },
    ),
    "Phi-3": Row("phi3", {"sliding_window": 20}),
    "Phi-4-mini": Row(
        "phi3",
        {
            "tie_word_embeddings": True,
            "max_position_embeddings": 2 * CONTEXT,
            "original_max_position_embeddings": CONTEXT,
            "partial_rotary_factor": 0.5,
            "rope_parameters": {**LONGROPE, **FACTORS, "original_max_position_embeddings": CONTEXT},
        },
    ),
    "Gemma": Row("gemma", {"head_dim": 32}),
    "Gemma-2": Row("gemma2", {"head_dim": 32, "query_pre_attn_scalar": 32, "sliding_window": 12, **CAPS}),
    "Gemma-3": Row(
        "gemma3_text",
        {
            "head_dim": 32,
            "query_pre_attn_scalar": 32,
            "sliding_window": 12,
            "num_hidden_layers": 7,
            "rope_parameters": {"full_attention": LINEAR, "sliding_attention": NEAR},
        },
    ),
    "Gemma-4, with layers that use others' keys": Row(
        "gemma4_text",
        {
            **GEMMA4,
            "num_key_value_heads": 1,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "use_double_wide_mlp": True,
            "vocab_size_per_layer_input": VOCAB,
            "hidden_size_per_layer_input": 8,
            "final_logit_softcapping": 3.0,
        },
    ),
    "Gemma-4, with values that are keys": Row(
        "gemma4_text",
        {
            **GEMMA4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "rope_parameters": {"full_attention": PROPORTIONAL, "sliding_attention": {**NEAR, "rope_theta": 2e4}},
        },
    ),
    "Gemma-4, with experts": Row(
        "gemma4_text",
        {
            **GEMMA4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_global_key_value_heads": 1,
            "attention_k_eq_v": True,
            "hidden_size_per_layer_input": 0,
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "LFM2": Row(
        "lfm2", {"layer_types": ["conv", "full_attention", "conv"], "num_hidden_layers": 3, "tie_word_embeddings": True}
    ),
    "LFM2, with experts": Row(
        "lfm2_moe",
        {
            "layer_types": ["conv", "full_attention", "conv", "conv"],
            "num_hidden_layers": 4,
            "num_dense_layers": 1,
            "moe_intermediate_size": 32,
            "tie_word_embeddings": True,
            **EXPERTS,
        },
    ),
    "SmolLM3": Row("smollm3", {"num_hidden_layers": 5}),
    "Granite": Row("granite", SCALES),
    "Granite, with experts": Row("granitemoe", {"num_local_experts": 4, **SCALES}),
    "Granite 4": Row("granitemoehybrid", {**GRANITE4, "num_local_experts": 0, "tie_word_embeddings": True}),
    "Granite 4, with experts": Row("granitemoehybrid", {**GRANITE4, "num_local_experts": 4, "mamba_n_groups": 2}),
    "OLMo-2": Row("olmo2", {"rms_norm_eps": 1e-6}),
    "OLMo-3": Row(
        "olmo3",
        {
            "sliding_window": 12,
            "num_hidden_layers": 5,
            "rope_parameters": {"full_attention": YARN, "sliding_attention": {**NEAR, "rope_theta": 5e5}},
        },
    ),
    "GLM-4-0414": Row("glm4", {"head_dim": 32, "attention_bias": True}),
    "ERNIE 4.5": Row("ernie4_5", {"head_dim": 32, "tie_word_embeddings": True}),
    "Hunyuan": Row(
        "hunyuan_v1_dense",
        {"head_dim": 32, "rope_parameters": {**NEAR, "rope_type": "dynamic", "alpha": 1000.0, "factor": 1.0}},
    ),
    "EXAONE 4.0": Row(
        "exaone4", {"head_dim": 32, "sliding_window": 12, "num_hidden_layers": 5, "sliding_window_pattern": 4}
    ),
    "EXAONE 4.0, without windows": Row("exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 2}),
    "Seed-OSS": Row("seed_oss", {"head_dim": 32, "attention_bias": True}),
    "AFM": Row("arcee"),
    "Mixtral": Row("mixtral", {"num_local_experts": 4, "sliding_window": None}),
    "Qwen3-MoE": Row("qwen3_moe", {**EXPERTS, "moe_intermediate_size": 32, "norm_topk_prob": True}),
    "OLMoE": Row("olmoe", EXPERTS),
    "ERNIE 4.5, with experts": Row(
        "ernie4_5_moe",
        {
            "head_dim": 32,
            "moe_num_experts": 4,
            "moe_k": 2,
            "moe_intermediate_size": 32,
            "moe_layer_end_index": 3,
            "tie_word_embeddings": True,
        },
    ),
    "GLM-4.5-Air": Row(
        "glm4_moe",
        {
            "head_dim": 32,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "routed_scaling_factor": 1.5,
            "num_nextn_predict_layers": 1,
        },
    ),
    "gpt-oss": Row(
        "gpt_oss",
        {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "head_dim": 32,
            "sliding_window": 12,
            "rope_parameters": {**YARN, "truncate": False},
        },
    ),
}


def save_source(row: Row, folder: Path) -> None:
    """The random model of a row, in fp32."""
    torch.manual_seed(7)
    cls = FAMILIES[row.model_type].model_class()
    config = cls.config_class(
        **{
            "vocab_size": VOCAB,
            "hidden_size": 64,
            "intermediate_size": 96,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "max_position_embeddings": CONTEXT,
            "initializer_range": 0.1,
            "tie_word_embeddings": row.model_type.startswith("gemma"),
            "bos_token_id": None,
            "eos_token_id": None,
            "pad_token_id": None,
            **row.config,
        }
    )
    model = cls(config)
    scalars = [each for each in model.named_buffers() if each[0].endswith("layer_scalar")]
    for name, parameter in [*model.named_parameters(), *scalars]:
        if name.endswith((*RANDOM, "layer_scalar")):
            torch.nn.init.normal_(parameter, parameter.mean().item(), 0.3)
        if name.endswith("A_log"):  # the file has exp of it, of which nearer 0 the logarithm has other last bits
            torch.nn.init.uniform_(parameter, 2, 2.7)
    model.save_pretrained(folder)


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """row -> checkpoint of its model."""
    base = tmp_path_factory.mktemp("gguf")

    @cache
    def folder_of(name: str) -> Path:
        folder = base / str(list(ROWS).index(name)) / "source"
        save_source(ROWS[name], folder)
        return folder

    return folder_of


@pytest.fixture(scope="module")
def files(sources: Callable[[str], Path]) -> Callable[..., Path]:
    """row, kind -> GGUF file of its model, with matrices of that kind."""

    @cache
    def file_of(name: str, kind: str = "f32") -> Path:
        path = sources(name).with_name(f"{kind}.gguf")
        write_gguf(sources(name), path, kind)
        return path

    return file_of


def same_bundle(first: Path, second: Path) -> None:
    """Graphs and weights are the same bytes."""
    for path in sorted(first.rglob("model.onnx*")):
        name = path.relative_to(first)
        assert path.read_bytes() == (second / name).read_bytes(), name


def used_weights(path: Path) -> dict[str, torch.Tensor]:
    """What the target's graph gets."""
    return {
        name: weight.source.read().float() for name, weight in weight_sources(open_pair(path, None))["target"].items()
    }


@pytest.mark.parametrize("name", ROWS)
@torch.inference_mode()
def test_a_file_in_fp32_is_its_source(sources: Callable[[str], Path], files: Callable[..., Path], name: str) -> None:
    """To the bit: in weights, and in what transformers computes with the config."""
    expected, weights = used_weights(sources(name)), used_weights(files(name))
    assert weights.keys() == expected.keys()
    assert all(torch.equal(weights[key], expected[key]) for key in expected)
    ids = torch.randint(0, VOCAB, (1, 90), generator=torch.Generator().manual_seed(1))
    assert torch.equal(load_source(files(name))(ids).logits, load_source(sources(name))(ids).logits)


@pytest.mark.slow
@pytest.mark.usefixtures("fresh_traces")
@pytest.mark.parametrize("name", ROWS)
def test_a_file_in_fp32_gives_the_bundle_of_its_source(
    sources: Callable[[str], Path], files: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    export(sources(name), None, tmp_path / "one", Settings(certify=False))
    export(files(name), None, tmp_path / "two", Settings(certify=False))
    same_bundle(tmp_path / "one", tmp_path / "two")


@pytest.mark.usefixtures("fresh_traces")
def test_a_pair_from_a_file_is_the_pair_of_its_source(
    bundle_of: Callable[..., Path], golden: Path, tmp_path: Path
) -> None:
    """So its tokens are those of the EAGLE authors' program, with which the source's bundle is compared."""
    write_gguf(golden / "target", tmp_path / "model.gguf")
    export(tmp_path / "model.gguf", golden / "head_eagle1", tmp_path / "bundle", Settings(certify=False))
    same_bundle(bundle_of("eagle1"), tmp_path / "bundle")


@pytest.mark.parametrize("kind", ["f16", "bf16", "q8_0", "q4_0", "q5_1"])
@pytest.mark.parametrize(
    "name",
    [
        "Llama with biases and a smaller original context",
        "Gemma-2",
        "Mixtral",
        "Phi-3",
        "Qwen3.5, with more values than keys",
        "Granite 4",
    ],
)
def test_values_are_the_dequantised_ones(
    sources: Callable[[str], Path], files: Callable[..., Path], name: str, kind: str
) -> None:
    """A matrix is quantised row by row, so the order of its rows in the file does not matter, nor that of columns that
    keep together in blocks."""
    form = gguf.GGMLQuantizationType[KINDS[kind]]
    source, file = open_checkpoint(sources(name)).tensors, open_gguf(files(name, kind)).tensors
    compared = 0
    for key, tensor in source.items():
        if key not in file or tensor.read().ndim < 2 or key.endswith(("gate.weight", "conv1d.weight")):
            continue
        values = tensor.read().float().numpy()
        expected = gguf.dequantize(gguf.quantize(values, form), form)
        np.testing.assert_array_equal(file[key].read().float().numpy(), expected)
        step = {"q8_0": 127, "q4_0": 7, "q5_1": 15}.get(kind, 128)  # of the largest number
        assert np.abs(values - expected).max() <= np.abs(values).max() / step
        compared += 1
    assert compared >= 8


def test_a_quantised_file_is_recorded_and_certified(golden: Path, tmp_path: Path) -> None:
    folder = tmp_path / "target"
    shutil.copytree(golden / "target", folder)
    tokenizer = json.loads((golden / "byte_tokenizer.json").read_text(encoding="utf-8"))
    tokenizer["model"]["vocab"]["he"], tokenizer["model"]["merges"] = len(tokenizer["model"]["vocab"]), [["h", "e"]]
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    write_gguf(folder, tmp_path / "model.gguf", "q8_0")
    done = export(tmp_path / "model.gguf", golden / "head_eagle3_dv44", tmp_path / "bundle", Settings(precision="int8"))
    assert done.manifest.certificate is not None
    assert done.manifest.certificate.agreement > 0.9
    assert not [each for each in done.warnings if "recorded" in each]
    with EagleModel.load(tmp_path / "bundle") as model:
        assert model.generate("he", max_new_tokens=4).text is not None


@needs_operators
def test_experts_of_a_file_in_four_bits_stay_as_they_are(files: Callable[..., Path], tmp_path: Path) -> None:
    export(files("Mixtral", "q4_0"), None, tmp_path / "bundle", Settings(precision="stored", certify=False))
    recipe = read_manifest(tmp_path / "bundle").target.graph.recipe
    assert sum("as the source has them" in how for how in recipe.values()) == 2 * (4 * 3 + 4)
    logits = {}
    for backend in ("cpu", "native"):
        with EagleModel.load(tmp_path / "bundle", backend=backend, threads=1) as model:
            logits[backend] = np.concatenate(list(bundle_in(model).target.score([7 * n % 90 for n in range(60)])))
    assert np.abs(logits["native"] - logits["cpu"]).mean() < 0.02 * logits["cpu"].std()
    operators = {node.op_type for node in ir.load(tmp_path / "bundle" / "target/native.onnx").graph}
    assert not operators & {"MatMulNBits", "BitShift", "NonZero"}


def test_inspect_states_what_the_file_holds(files: Callable[..., Path], sources: Callable[[str], Path]) -> None:
    quantised, plain = (inspect(str(path), None).target for path in (files("Qwen3", "q4_0"), sources("Qwen3")))
    assert (quantised.stored, quantised.parameters) == ("Q4_0, F32", plain.parameters)
    weights = files("Qwen3", "q4_0").stat().st_size
    assert 0.8 * weights < quantised.bytes < weights < plain.bytes / 4
    assert replace(quantised, name=plain.name, stored=plain.stored, bytes=plain.bytes) == plain


@pytest.mark.parametrize("name", ["Gemma-3", "Mixtral"])
def test_parts_of_a_split_file_are_one(
    sources: Callable[[str], Path], files: Callable[..., Path], tmp_path: Path, name: str
) -> None:
    write_gguf(sources(name), tmp_path / "model.gguf", shard_tensors=7)
    parts = sorted(tmp_path.glob("model-*-of-*.gguf"))
    assert len(parts) > 2
    expected = open_gguf(files(name)).tensors
    for given in (parts[0], parts[-1]):
        tensors = open_gguf(given).tensors
        assert tensors.keys() == expected.keys()
        assert all(torch.equal(tensors[key].read(), expected[key].read()) for key in expected)
    parts[1].unlink()
    with pytest.raises(ExportError, match=f"{parts[1].name} is missing; download it too"):
        open_gguf(parts[0])
    parts[0].rename(tmp_path / "renamed.gguf")
    with pytest.raises(ExportError, match="its name does not say which"):
        open_gguf(tmp_path / "renamed.gguf")


def changed(path: Path, out: Path, change: Callable[[Any], None]) -> Path:
    """Writes a file again with other metadata. change: gets the writer, after the old metadata."""
    reader = gguf.GGUFReader(path)
    fields = {name: field for name, field in reader.fields.items() if not name.startswith("GGUF.")}
    writer = gguf.GGUFWriter(out, fields.pop("general.architecture").contents())
    for name, old in fields.items():
        sub = old.types[1] if old.types[0] == gguf.GGUFValueType.ARRAY else None
        writer.add_key_value(name, old.contents(), old.types[0], sub_type=sub)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    change(writer)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return out


def key(name: str, value: Any) -> Callable[[Any], None]:
    """A change that sets metadata, or takes it away (None)."""

    def change(writer: Any) -> None:
        if value is None:
            writer.kv_data[0].pop(name)
        elif isinstance(value, list):
            writer.add_array(name, value)
        else:
            kinds = {str: writer.add_string, int: writer.add_uint32, float: writer.add_float32, bool: writer.add_bool}
            kinds[type(value)](name, value)

    return change


def tensor(name: str, values: np.ndarray | None) -> Callable[[Any], None]:
    """A change that puts a tensor in the place of another, or takes it away (None)."""

    def change(writer: Any) -> None:
        writer.tensors[0].pop(name, None)
        if values is not None:
            writer.add_tensor(name, values)

    return change


def renamed(names: dict[str, str]) -> Callable[[Any], None]:
    """A change of metadata: name -> the name that it gets."""

    def change(writer: Any) -> None:
        writer.kv_data[0] = {names.get(name, name): value for name, value in writer.kv_data[0].items()}

    return change


REFUSED = {
    "architecture": (key("general.architecture", "starcoder2"), "'starcoder2', but only 'llama', 'qwen2'"),
    "adapter": (key("general.type", "adapter"), "holds a adapter, no model"),
    "missing size": (key("qwen3.block_count", None), "metadata qwen3.block_count is missing"),
    "size per layer": (key("qwen3.attention.head_count_kv", [2, 1]), "must be one whole number"),
    "dynamic rotation": (key("qwen3.rope.scaling.type", "longrope"), "rotation of type 'longrope'"),
    "part of a head": (key("qwen3.rope.dimension_count", 16), "a part of each head is rotated"),
    "foreign tensor": (
        lambda writer: writer.add_tensor("blk.0.ssm_a", np.zeros(4, np.float32)),
        "tensor 'blk.0.ssm_a' is not known",
    ),
    "type of a tensor": (
        lambda writer: writer.add_tensor("blk.0.ffn_norm.bias", np.zeros(4, np.int32)),
        "tensor 'blk.0.ffn_norm.bias' is of type I32",
    ),
    "tokenizer": (key("tokenizer.ggml.model", "t5"), "tokenizer of kind 't5' is not supported"),
    "embeddings": (key("qwen3.pooling_type", 3), "holds a model of embeddings, which writes no text"),
    "both directions": (key("qwen3.attention.causal", False), "holds a model of embeddings, which writes no text"),
    "no tokens": (key("tokenizer.ggml.model", "gpt2"), "tokenizer.ggml.tokens is missing"),
}


def assert_refused(path: Path, message: str) -> None:
    """Asserts that a file is refused in one line that holds a message."""
    with pytest.raises(ExportError, match=re.escape(message)) as raised:
        open_gguf(path)
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_expressed_is_refused(files: Callable[..., Path], tmp_path: Path, name: str) -> None:
    change, message = REFUSED[name]
    path = changed(files("Qwen3"), tmp_path / "changed.gguf", change)
    assert_refused(path, message)


def test_a_granite_without_rotation_is_refused(files: Callable[..., Path], tmp_path: Path) -> None:
    """As llama.cpp stores a Granite 4 whose position_embedding_type is nope."""
    finetuned = "granite.rope.scaling.finetuned"
    path = changed(files("Granite"), tmp_path / "rotated.gguf", key(finetuned, True))
    assert open_gguf(path).config == open_gguf(files("Granite")).config
    path = changed(files("Granite"), tmp_path / "unrotated.gguf", key(finetuned, False))
    with pytest.raises(ExportError, match=r"unrotated\.gguf: the model does not rotate queries and keys"):
        open_gguf(path)


def test_gemma3_may_have_ollamas_names_of_its_rotations(files: Callable[..., Path], tmp_path: Path) -> None:
    """Ollama's files of the 1B model have them."""
    names = {
        "gemma3.rope.freq_base": "gemma3.rope.global.freq_base",
        "gemma3.rope.freq_base_swa": "gemma3.rope.local.freq_base",
    }
    path = changed(files("Gemma-3"), tmp_path / "ollama.gguf", renamed(names))
    rope = open_gguf(path).config["rope_parameters"]
    assert rope == open_gguf(files("Gemma-3")).config["rope_parameters"]
    assert rope["full_attention"]["rope_theta"] == LINEAR["rope_theta"]


def test_gemma3_may_lack_what_all_with_images_have(files: Callable[..., Path], tmp_path: Path) -> None:
    """Ollama's files of the larger models do, and hold what reads images; values are those of the published configs."""

    def change(writer: Any) -> None:
        for name in ("rope.freq_base", "rope.freq_base_swa", "rope.scaling.type", "rope.scaling.factor"):
            writer.kv_data[0].pop(f"gemma3.{name}")
        writer.kv_data[0].pop("gemma3.attention.layer_norm_rms_epsilon")
        writer.add_uint32("gemma3.mm.tokens_per_image", 256)
        writer.add_tensor("v.blk.0.attn_q.weight", np.zeros((32, 32), np.float32))
        writer.add_tensor("mm.mm_input_projection.weight", np.zeros((32, 32), np.float32))

    opened, plain = open_gguf(changed(files("Gemma-3"), tmp_path / "ollama.gguf", change)), open_gguf(files("Gemma-3"))
    full = {"rope_type": "linear", "rope_theta": 1e6, "factor": 8.0}
    assert opened.config["rope_parameters"] == {"full_attention": full, "sliding_attention": NEAR}
    assert opened.config["rms_norm_eps"] == 1e-6
    assert opened.tensors.keys() == plain.tensors.keys()


def test_gemma4_may_hold_keys_that_no_layer_uses(files: Callable[..., Path], tmp_path: Path) -> None:
    """Published files have them of layers that use others' keys, and Ollama's what reads images and sound."""
    name = "Gemma-4, with layers that use others' keys"

    def change(writer: Any) -> None:
        shapes = {"attn_k": (16, 64), "attn_v": (16, 64), "attn_k_norm": (16,)}
        for part, shape in shapes.items():
            writer.add_tensor(f"blk.2.{part}.weight", np.ones(shape, np.float32))
        for other in ("v.blk.0.attn_q.weight", "a.blk.0.attn_q.weight", "mm.a.fc.weight"):
            writer.add_tensor(other, np.zeros((32, 32), np.float32))

    path = changed(files(name), tmp_path / "all.gguf", change)
    assert "model.layers.2.self_attn.k_proj.weight" in open_gguf(path).tensors
    opened, plain = open_target(path), open_target(files(name))
    assert (opened.config, opened.tensors.keys()) == (plain.config, plain.tensors.keys())


GEMMA4_REFUSED = {
    "experts unknown": (key("gemma4.expert_count", 4), "gemma4.expert_used_count is missing"),
    "no pattern": (key("gemma4.attention.sliding_window_pattern", None), "pattern is None, but must say of each layer"),
    "short pattern": (key("gemma4.attention.sliding_window_pattern", [True, False]), "but must say of each layer"),
    "last layer": (key("gemma4.attention.sliding_window_pattern", [True, False, True, True]), "the last not"),
    "shared unknown": (key("gemma4.attention.shared_kv_layers", None), "shared_kv_layers is missing"),
    "all shared": (key("gemma4.attention.shared_kv_layers", 4), "have no keys and values that they could use"),
    "widths": (key("gemma4.feed_forward_length", [96, 96, 192, 96]), "have the others' width or twice that"),
    "number of widths": (key("gemma4.feed_forward_length", [96, 96]), "of all layers or of each of 4"),
    "key heads": (key("gemma4.attention.head_count_kv", [1, 2, 1, 2]), "not in whether their values are keys"),
    "key heads of a kind": (key("gemma4.attention.head_count_kv", [1, 2, 2, 2]), "layers of one kind differ"),
    "value width": (key("gemma4.attention.value_length", 16), "have another width, which is not supported"),
    "rotated part": (key("gemma4.rope.dimension_count_swa", 8), "have another width, which is not supported"),
    "no width": (key("gemma4.attention.key_length_swa", None), "gemma4.attention.key_length_swa is missing"),
    "no base": (key("gemma4.rope.freq_base_swa", None), "gemma4.rope.freq_base_swa is missing"),
    "no tables": (key("gemma4.embedding_length_per_layer_input", None), "length_per_layer_input is missing"),
    "scaling": (key("gemma4.rope.scaling.factor", 8.0), "rotation of type 'linear' is not supported"),
    "no factors": (tensor("rope_freqs.weight", None), "tensor 'rope_freqs.weight' is missing"),
    "factors": (tensor("rope_freqs.weight", np.full(22, 8, np.float32)), "do not leave a part of 44 unrotated"),
    "fused": (tensor("blk.0.attn_qkv.weight", np.zeros((96, 64), np.float32)), "'blk.0.attn_qkv.weight' is not known"),
}


@pytest.mark.parametrize("name", GEMMA4_REFUSED)
def test_a_gemma4_that_contradicts_itself_is_refused(files: Callable[..., Path], tmp_path: Path, name: str) -> None:
    change, message = GEMMA4_REFUSED[name]
    path = changed(files("Gemma-4, with layers that use others' keys"), tmp_path / "changed.gguf", change)
    assert_refused(path, message)


def test_a_gemma4_of_which_one_layer_has_values_is_refused(files: Callable[..., Path], tmp_path: Path) -> None:
    plain = files("Gemma-4, with values that are keys")
    path = changed(plain, tmp_path / "one.gguf", tensor("blk.3.attn_v.weight", np.zeros((44, 64), np.float32)))
    with pytest.raises(ExportError, match=r"has tensor 'blk\.3\.attn_v\.weight', but none such of another layer"):
        open_gguf(path)


LFM2_REFUSED = {
    "no list": (
        key("lfm2.attention.head_count_kv", 2),
        "'model.layers.0.conv.conv.weight' is not used by this kind of model",
    ),
    "two numbers": (key("lfm2.attention.head_count_kv", [1, 2, 0]), "is [1, 2, 0], not one number and zeros"),
    "no attention": (key("lfm2.attention.head_count_kv", [0, 0, 0]), "is [0, 0, 0], not one number and zeros"),
    "short list": (key("lfm2.attention.head_count_kv", [0, 2]), "of all layers or of each of 3"),
    "tokens unknown": (key("lfm2.shortconv.l_cache", None), "lfm2.shortconv.l_cache is missing"),
    "other weights": (tensor("blk.0.shortconv.conv.weight", np.zeros((64, 4), np.float32)), "asks for [64, 1, 3]"),
}


def test_a_qwen35_may_be_ollamas(files: Callable[..., Path], tmp_path: Path) -> None:
    """Its files say how many key heads each layer has, not which are delta nets, and hold what predicts further tokens
    and reads images."""

    def change(writer: Any) -> None:
        key("qwen35.attention.recurrent_layers", None)(writer)
        key("qwen35.attention.head_count_kv", [0, 0, 0, 2])(writer)
        for name in [name for name in writer.tensors[0] if name.endswith("ssm_dt.bias")]:
            writer.tensors[0][name.removesuffix(".bias")] = writer.tensors[0].pop(name)
        for name in ("mtp.fc.weight", "v.blk.0.attn_q.weight"):
            writer.add_tensor(name, np.zeros((32, 32), np.float32))

    opened, plain = open_gguf(changed(files("Qwen3.5"), tmp_path / "ollama.gguf", change)), open_gguf(files("Qwen3.5"))
    assert opened.config == plain.config
    assert opened.tensors.keys() == plain.tensors.keys()


def test_what_fades_is_read_to_a_rounding_error(files: Callable[..., Path], tmp_path: Path) -> None:
    """exp rounds it: of the logarithm of a number near 1 the last bits are lost, to no effect."""
    logs = np.array([-3, -1e-3, 1e-4, 0.3, 1, 2.7], np.float32)
    path = changed(
        files("Qwen3.5, with more values than keys"), tmp_path / "near.gguf", tensor("blk.0.ssm_a", -np.exp(logs))
    )
    read = open_gguf(path).tensors["model.layers.0.linear_attn.A_log"].read().numpy()
    np.testing.assert_allclose(read, logs.reshape(3, 2).T.ravel(), rtol=0, atol=2**-23)


QWEN35_REFUSED = {
    "kinds": (key("qwen35.attention.recurrent_layers", [True] * 3), "must say of each of 4 layers"),
    "no kind": (key("qwen35.attention.recurrent_layers", True), "is True, but must say of each of 4 layers"),
    "key heads unknown": (key("qwen35.ssm.group_count", None), "qwen35.ssm.group_count is missing"),
    "heads that share none": (key("qwen35.ssm.group_count", 4), "6 heads of values cannot share 4 heads of keys"),
    "other widths": (key("qwen35.ssm.inner_size", 96), "asks for [160, 1, 4]"),
    "without a kind": (lambda writer: writer.add_tensor("blk.1.attn_q", np.zeros(4, np.float32)), "is not known"),
    "with other names": (
        key("general.architecture", "qwen35next"),
        "holds a model of architecture 'qwen35next', but only",
    ),
}
GRANITE4_REFUSED = {
    "no attention": (key("granitehybrid.attention.head_count_kv", [0, 0, 0]), "not one number and zeros"),
    "groups unknown": (key("granitehybrid.ssm.group_count", None), "granitehybrid.ssm.group_count is missing"),
    "other groups": (key("granitehybrid.ssm.state_size", 24), "asks for [176]"),
    "no other half": (
        lambda writer: writer.tensors[0].pop("blk.1.ffn_up.weight"),
        "tensor 'model.layers.1.shared_mlp.gate_proj.weight' has no other one of its shape",
    ),
}
CONTRADICTING = {
    "LFM2": LFM2_REFUSED,
    "Qwen3.5, with more values than keys": QWEN35_REFUSED,
    "Granite 4": GRANITE4_REFUSED,
}


@pytest.mark.parametrize(("model", "name"), [(model, name) for model, cases in CONTRADICTING.items() for name in cases])
def test_a_file_that_contradicts_itself_is_refused(
    files: Callable[..., Path], tmp_path: Path, model: str, name: str
) -> None:
    change, message = CONTRADICTING[model][name]
    path = changed(files(model), tmp_path / "changed.gguf", change)
    with pytest.raises(ExportError, match=re.escape(message)):
        export(path, None, tmp_path / "bundle", certify=False)


def test_olmo3_has_a_base_of_its_own_in_windows_if_a_file_says_so(files: Callable[..., Path], tmp_path: Path) -> None:
    path = changed(files("OLMo-3"), tmp_path / "bases.gguf", key("olmo2.rope.freq_base_swa", 123.0))
    rope = open_gguf(path).config["rope_parameters"]
    assert (rope["sliding_attention"]["rope_theta"], rope["full_attention"]["rope_theta"]) == (123.0, 5e5)


def test_a_mistral3_whose_queries_do_not_grow_is_a_llama(files: Callable[..., Path], tmp_path: Path) -> None:
    """Mistral Small 3.2 is stored so."""
    path = changed(files("Ministral-3"), tmp_path / "small.gguf", key("mistral3.attention.temperature_scale", None))
    assert open_gguf(files("Ministral-3")).config["model_type"] == "ministral3"
    assert open_gguf(path).config["model_type"] == "llama"


def test_equal_numbers_of_all_layers_are_one() -> None:
    """As newer converters list granite-4.0-micro's key heads."""
    file = GgufFile(Path("x.gguf"), {"general.architecture": "granite", "granite.n": [8] * 40, "granite.none": []}, {})
    assert file.integer("n") == 8
    with pytest.raises(ExportError, match=r"granite.none is \[\], but must be one whole number"):
        file.integer("none")


def test_a_file_of_another_kind_is_told_without_an_architecture() -> None:
    with pytest.raises(ExportError, match=r"i\.gguf holds a imatrix, no model; give the file of the model"):
        architecture_of(GgufFile(Path("i.gguf"), {"general.type": "imatrix"}, {}))


def test_a_file_is_known_by_its_first_bytes(files: Callable[..., Path], tmp_path: Path) -> None:
    """Ollama keeps files under their sums."""
    blob = tmp_path / "sha256-6c1f"
    shutil.copyfile(files("Qwen3"), blob)
    stored = open_stored(blob)
    assert (stored.folder, stored.config) == (blob, open_gguf(files("Qwen3")).config)
    with pytest.raises(ExportError, match="is a GGUF file, which only a target may be"):
        open_checkpoint(blob)
    (tmp_path / "notes").write_text("GGU")
    with pytest.raises(ExportError, match="notes is not a folder"):
        open_stored(tmp_path / "notes")


def test_markers_that_are_no_control_tokens_are_noted(files: Callable[..., Path], tmp_path: Path) -> None:
    stated = {"model": "gpt2", "pre": "gpt-2", "tokens": ["a", "b", "ab", "<|im_end|>"], "merges": ["a b"]}
    tokenizer = {f"tokenizer.ggml.{name}": value for name, value in stated.items()}

    def change(writer: Any) -> None:
        for name, value in {**tokenizer, "tokenizer.chat_template": "{{ messages }}<|im_end|>"}.items():
            key(name, value)(writer)
        writer.add_array("tokenizer.ggml.token_type", [1, 1, 1, 1])

    target = open_target(changed(files("Qwen3"), tmp_path / "marked.gguf", change))
    assert target.config["eos_token_id"] == [3]
    (note,) = target.notes
    assert note.endswith("writes '<|im_end|>', which the file does not list as control tokens; they are read as such")


def test_a_type_that_the_package_does_not_know_is_not_called_damage(files: Callable[..., Path], tmp_path: Path) -> None:
    content = files("Qwen3").read_bytes()
    name = b"output_norm.weight"
    at = content.index(name) + len(name) + 4 + 8  # after the number of dimensions, which is 1, and the dimension
    path = tmp_path / "newer.gguf"
    path.write_bytes(content[:at] + (999).to_bytes(4, "little") + content[at + 4 :])
    with pytest.raises(
        ExportError, match=r"'output_norm.weight' is of type 999, which the installed package gguf does"
    ):
        open_gguf(path)


def test_a_row_that_is_no_number_of_blocks_is_damage(files: Callable[..., Path], tmp_path: Path) -> None:
    content, name = files("Qwen3", "q4_0").read_bytes(), b"token_embd.weight"
    at = content.index(name) + len(name) + 4  # after the number of dimensions
    path = tmp_path / "odd.gguf"
    path.write_bytes(content[:at] + (63).to_bytes(8, "little") + content[at + 8 :])
    with pytest.raises(
        ExportError, match=r"cut short \(tensor 'token_embd.weight' has rows of 63 numbers in blocks of 32"
    ):
        open_gguf(path)


def test_damaged_files_are_refused(files: Callable[..., Path], tmp_path: Path) -> None:
    content = files("Qwen3").read_bytes()
    for name, cut in {"header": 40, "metadata": 600, "tensors": len(content) - 64, "empty": 0}.items():
        path = tmp_path / f"{name}.gguf"
        path.write_bytes(content[:cut])
        with pytest.raises(ExportError, match="is not a GGUF file, or damaged or cut short"):
            export(path, None, tmp_path / "bundle")
    (tmp_path / "text.gguf").write_text("not a model at all")
    with pytest.raises(ExportError, match="is not a GGUF file"):
        open_gguf(tmp_path / "text.gguf")
    with pytest.raises(ExportError, match=r"absent.gguf is missing; give an existing file"):
        open_gguf(tmp_path / "absent.gguf")
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(ExportError, match="holds GGUF files; give the file itself, such as"):
        export(tmp_path, None, tmp_path / "bundle")
    assert not (tmp_path / "bundle").exists()


def test_the_package_is_named_when_it_is_missing(files: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    path = files("Qwen3")
    monkeypatch.setitem(sys.modules, "gguf", None)  # so that importing it fails
    with pytest.raises(ExportError, match=r'pip install "eagle-edge\[gguf\]"'):
        open_gguf(path)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["f32", "q8_0", "q4_0", "q4_K_M"])
def test_llama_cpp_chooses_the_same_tokens(tmp_path: Path, kind: str) -> None:
    """llama.cpp itself quantises and runs the file of the demo pair's target; tokens are greedy. It rounds activations
    to eight bits where the weights are quantised, so near ties fall otherwise there."""
    llama_cpp = pytest.importorskip("llama_cpp")
    from eagle_tools.peers.llama_cpp import LlamaCpp
    from eagle_tools.peers.quantise import quantise

    path = tmp_path / "model.gguf"
    write_gguf(DEMO / "target", path)
    if kind != "f32":
        quantise(path, tmp_path / "quantised.gguf", kind, 2)
        path = tmp_path / "quantised.gguf"
    export(path, DEMO / "eagle1", tmp_path / "bundle", Settings(certify=False))
    vocabulary = llama_cpp.Llama(str(path), vocab_only=True, verbose=False)
    theirs = LlamaCpp(path, 2, 1024)
    lines = (DEMO / "heldout.jsonl").read_text(encoding="utf-8").splitlines()[:16]
    same = []
    with EagleModel.load(tmp_path / "bundle") as model:
        for line in lines:
            prompt = json.loads(line)["turns"][0]
            ids = model.text.encode(prompt)
            assert ids == vocabulary.tokenize(prompt.encode(), add_bos=False, special=True)
            tokens = list(model.generate(ids, max_new_tokens=48, temperature=0).token_ids)
            logits = np.concatenate(list(theirs.score([*ids, *tokens])))
            same.append(logits[len(ids) - 1 : -1].argmax(-1) == tokens)
    share = float(np.concatenate(same).mean())
    print(f"{kind}: {share:.1%} of {sum(map(len, same))} tokens")
    assert share >= {"f32": 1.0, "q8_0": 0.98, "q4_0": 0.95, "q4_K_M": 0.95}[kind]
