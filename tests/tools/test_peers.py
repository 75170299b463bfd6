"""Other engines on the same weights: what is converted, and, as slow tests, what the engines make of it."""

from __future__ import annotations

import json
import os
import shutil
from contextlib import ExitStack
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGUFReader
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS
from transformers.models.llama.configuration_llama import LlamaConfig

import gguf_writer
from conftest import GOLDEN
from eagle_runtime.base.errors import RequestError
from eagle_tools.bench import main
from eagle_tools.bench.peer_rows import PASS_ROWS, passes_table
from eagle_tools.bench.peers import check_peers, load_peers
from eagle_tools.peers.convert import PACKAGES, Converted, convert
from eagle_tools.peers.engine import (
    ALL_FORMATS,
    FORMATS,
    GENAI,
    LLAMA_CPP,
    MODES,
    MODULES,
    OPENVINO,
    PLAIN,
    check_installed,
    format_of,
    installed_formats,
)
from eagle_tools.peers.gguf_file import gguf_name, permuted, rope_factors, write_gguf
from eagle_tools.peers.gguf_tokens import with_tokens
from eagle_tools.peers.source import Source, open_source
from eagle_tools.peers.worker import Worker
from eagle_tools.precision import main as precision

ROOT = Path(__file__).resolve().parents[2]
TARGET = ROOT / "tools" / "demo_pair" / "target"
HERE = installed_formats(FORMATS, print)  # slow tests need one of the engines, and leave out those that are not here


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder for converted weights: conversions take most of the slow tests' time."""
    return tmp_path_factory.mktemp("peers")


def folder_with(tmp_path: Path, **config: object) -> Path:
    """A folder with the golden target's weights and a changed configuration."""
    folder = tmp_path / "changed"
    shutil.copytree(GOLDEN / "target", folder, dirs_exist_ok=True)
    base = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    (folder / "config.json").write_text(json.dumps({**base, **config}))
    return folder


def test_what_is_no_plain_llama_is_refused_by_name(tmp_path: Path) -> None:
    for config, says in (
        ({"model_type": "qwen2"}, "holds a model of type 'qwen2'"),
        ({"attention_bias": True}, "a model with attention_bias"),
        ({"rope_scaling": {"rope_type": "yarn", "factor": 4.0}}, "a model with rope_type yarn"),
        ({"quantization_config": {"bits": 4}}, "a model with quantization_config"),
    ):
        with pytest.raises(RequestError, match=says):
            open_source(folder_with(tmp_path, **config))
    (tmp_path / "changed" / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "changed" / "model.safetensors").unlink()
    with pytest.raises(RequestError, match=r"has no \.safetensors file"):
        open_source(tmp_path / "changed")


def test_the_number_of_weights_counts_tied_tables_once(tmp_path: Path) -> None:
    for tied in (True, False):
        config = LlamaConfig(
            vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=2, num_attention_heads=2,
            num_key_value_heads=1, tie_word_embeddings=tied,
        )  # fmt: skip
        model = AutoModelForCausalLM.from_config(config)
        model.save_pretrained(tmp_path / str(tied))
        source = open_source(tmp_path / str(tied))
        assert source.num_weights() == sum(weights.numel() for weights in model.parameters())
        assert (source.head_dim, source.kv_heads, source.rope["rope_theta"]) == (8, 1, 10000.0)


def test_the_sum_of_a_source_depends_on_weights_and_configuration(tmp_path: Path) -> None:
    first = open_source(folder_with(tmp_path)).digest()
    assert open_source(GOLDEN / "target").digest() == first
    assert open_source(folder_with(tmp_path, rms_norm_eps=1e-4)).digest() != first
    folder = folder_with(tmp_path)
    save_file({"a": torch.ones(1)}, folder / "model.safetensors")
    assert open_source(folder).digest() != first


def test_rows_of_queries_are_paired_as_llama_cpp_rotates_them() -> None:
    heads, half = 3, 4
    weights = np.arange(heads * 2 * half * 5, dtype=np.float32).reshape(-1, 5)
    moved = permuted(weights, heads)
    for head in range(heads):
        for i in range(half):
            for part in range(2):
                row = weights[head * 2 * half + part * half + i]
                assert (moved[head * 2 * half + 2 * i + part] == row).all()


def test_slower_frequencies_are_those_of_transformers() -> None:
    scaling = {"rope_type": "llama3", "rope_theta": 10000.0, "factor": 8.0, "low_freq_factor": 1.0}
    scaling |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 512}
    config = LlamaConfig(hidden_size=64, num_attention_heads=2, max_position_embeddings=4096, rope_parameters=scaling)
    frequencies = ROPE_INIT_FUNCTIONS["llama3"](config, "cpu")[0].numpy()
    plain = 10000.0 ** -(np.arange(0, 32, 2) / 32)
    made = rope_factors(Source(Path(), {"head_dim": 32, "rope_parameters": scaling}, ()))
    assert made is not None and len(set(made.round(3))) > 2
    np.testing.assert_allclose(plain / made, frequencies, rtol=1e-5)
    assert rope_factors(open_source(TARGET)) is None


def test_tensors_have_llama_cpp_names() -> None:
    assert gguf_name("model.layers.11.self_attn.o_proj.weight") == "blk.11.attn_output.weight"
    assert gguf_name("model.norm.weight") == "output_norm.weight"
    for name in ("model.layers.0.self_attn.q_norm.weight", "model.layers.0.mlp.gate_proj.bias", "vision.weight"):
        with pytest.raises(RequestError, match=f"tensor {name} belongs to no Llama"):
            gguf_name(name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
def test_a_gguf_file_has_the_source_s_numbers(dtype: torch.dtype, tmp_path: Path) -> None:
    config = LlamaConfig(
        vocab_size=32, hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1,
    )  # fmt: skip
    model = AutoModelForCausalLM.from_config(config).to(dtype)
    model.save_pretrained(tmp_path / "source")
    write_gguf(open_source(tmp_path / "source"), tmp_path / "model.gguf")
    stored = {
        each.name: gguf.quants.dequantize(each.data, each.tensor_type)
        for each in GGUFReader(tmp_path / "model.gguf").tensors
    }
    weights = {name: each.detach().float().numpy() for name, each in model.state_dict().items()}
    assert len(stored) == len(weights)
    for name, heads in (("model.layers.0.self_attn.q_proj.weight", 2), ("model.layers.0.self_attn.k_proj.weight", 1)):
        weights[name] = permuted(weights[name], heads)
    for name, weight in weights.items():
        np.testing.assert_array_equal(stored[gguf_name(name)], weight)


def test_a_gguf_file_is_a_source_for_llama_cpp_alone(tmp_path: Path) -> None:
    path = tmp_path / "q8.gguf"
    gguf_writer.write_gguf(TARGET, path, "q8_0")
    source = open_source(path)
    assert source.is_gguf and source.config["vocab_size"] == open_source(TARGET).config["vocab_size"]
    assert source.num_weights() == open_source(TARGET).num_weights()
    with pytest.raises(RequestError, match=r"onnxruntime-genai/int8 is not made from; name formats of llama\.cpp"):
        check_peers(path, FORMATS)
    damaged = tmp_path / "none.gguf"
    damaged.write_bytes(b"none")
    with pytest.raises(RequestError, match=r"none\.gguf"):
        open_source(damaged)


def test_two_conversions_at_once_do_not_read_what_the_other_writes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The second runs from beginning to end while the first quantises."""
    source, form = open_source(GOLDEN / "target"), format_of("llama.cpp/q8_0")
    others: list[Converted] = []

    def quantise(plain: Path, out: Path, name: str, threads: int) -> None:
        if not others:
            others.append(Converted(form, out, 0))
            others[:] = convert(source, [form], tmp_path, 1, lambda line: None)
        shutil.copy(plain, out)

    monkeypatch.setattr("eagle_tools.peers.quantise.quantise", quantise)  # llama.cpp itself may be missing
    monkeypatch.setitem(PACKAGES, LLAMA_CPP, "numpy")
    (left := tmp_path / source.digest() / "making-left").mkdir(parents=True)
    os.utime(left, (0, 0))
    made = convert(source, [form], tmp_path, 1, lambda line: None)
    assert made == others and len(GGUFReader(made[0].path).tensors) == len(source.tensors())
    assert [path.name for path in left.parent.iterdir()] == [made[0].path.parent.name]


def test_formats_have_names_and_a_missing_package_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [format_of(str(known)) for known in ALL_FORMATS] == list(ALL_FORMATS)
    monkeypatch.setitem(MODULES, "this engine", ("json",))
    check_installed("this engine")
    monkeypatch.setitem(MODULES, "this engine", ("json", "no_such_engine"))
    with pytest.raises(RequestError, match=r"'no_such_engine'; pip install 'eagle-edge\[cpu,export,bench,peers\]'"):
        check_installed("this engine")


def test_engines_that_are_not_installed_are_left_out_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    for engine, module in ((LLAMA_CPP, "json"), (GENAI, "json"), (OPENVINO, "no_such_engine")):
        monkeypatch.setitem(MODULES, engine, (module,))
    said: list[str] = []
    assert installed_formats(FORMATS, said.append) == tuple(form for form in FORMATS if form.engine != OPENVINO)
    install = "pip install 'eagle-edge[cpu,export,bench,peers]'"
    assert said == [f"openvino is not compared: it needs 'no_such_engine'; {install}"]
    for engine in (LLAMA_CPP, GENAI):
        monkeypatch.setitem(MODULES, engine, ("no_such_engine",))
    said.clear()
    assert installed_formats(FORMATS, said.append) == FORMATS and not said  # check_peers names the first


def test_a_peer_that_does_not_decode_is_left_out_and_named(tmp_path: Path) -> None:
    source = open_source(GOLDEN / "target")
    models = [Converted(form, tmp_path / "model.gguf", 1) for form in FORMATS if form.engine == LLAMA_CPP][:2]
    said: list[str] = []
    with ExitStack() as stack, pytest.raises(RequestError, match=LLAMA_CPP):
        load_peers(source, models, 1, 64, stack, said.append)
    (line,) = said  # the last one's reason is the error
    assert line.startswith(f"{models[0].format} is left out: {LLAMA_CPP} with {tmp_path}")


def test_passes_are_shown_in_milliseconds() -> None:
    lines = passes_table({"a": (0.05, 0.06, 0.07, 0.1, 0.2, 0.33)}).splitlines()
    assert lines[0] == "| ms of a forward pass over rows | 1 | 2 | 4 | 8 | 16 | 32 |"
    assert lines[2] == "| a | 50.0 | 60.0 | 70.0 | 100.0 | 200.0 | 330.0 |"


@pytest.mark.slow
def test_llama_cpp_quantises_a_gguf_file(work: Path, tmp_path: Path) -> None:
    path = tmp_path / "q8.gguf"
    gguf_writer.write_gguf(TARGET, path, "q8_0")
    narrow = format_of("llama.cpp/iq4_nl")
    (made,) = convert(check_peers(path, [narrow]), [narrow], work, 1, lambda line: None)
    kinds = {each.tensor_type.name for each in GGUFReader(made.path).tensors}
    assert "IQ4_NL" in kinds and not list(work.rglob("source.gguf"))


@pytest.mark.slow
def test_peers_compute_the_sources_logits_and_decode_greedily(work: Path) -> None:
    source = open_source(TARGET)
    model = AutoModelForCausalLM.from_pretrained(TARGET, dtype=torch.float32)
    text = (
        "def read_lines(path):\n    with open(path) as file:\n        return [line.strip() for line in file]\n\n\ndef "
    )
    ids = Tokenizer.from_file(str(TARGET / "tokenizer.json")).encode(text).ids
    with torch.inference_mode():
        expected = model(torch.tensor([ids])).logits[0].numpy()
        free = model.generate(
            torch.tensor([ids]), max_new_tokens=24, do_sample=False, eos_token_id=None, pad_token_id=0
        )
    said: list[str] = []
    converted = convert(source, HERE, work, 1, said.append)
    assert said and [made.format for made in converted] == list(HERE)
    said.clear()
    assert convert(source, HERE, work, 1, said.append) == converted and not said
    assert not list(work.rglob("f32.gguf")) and not list(work.rglob("*.part"))
    for made in converted:
        worker = Worker(made.format.engine, made.path, 1, 128)
        logits = np.concatenate(list(worker.score(ids)))
        assert logits.shape == expected.shape
        eight = made.format.name in ("q8_0", "int8")
        assert (logits.argmax(-1) == expected.argmax(-1)).mean() >= (0.9 if eight else 0.7)
        outputs = []
        for mode in MODES[made.format.engine]:
            worker.start(mode, mode, ids, 24)
            first = worker.advance(mode, 0.0, 1)
            rest = worker.advance(mode, 60.0, 24)
            assert first.passes == 0 and first.seconds > 0
            # A lookup that is rejected may take onnxruntime-genai a second pass to correct its cache.
            assert rest.passes == 23 if mode == PLAIN else 0 < rest.passes < 46
            outputs.append((*first.tokens, *rest.tokens)[:24])
        assert outputs[0] == outputs[-1]  # a draft does not change the output
        if eight and made.format.engine != OPENVINO:  # which may multiply in bf16
            assert outputs[0] == tuple(free[0, len(ids) :].tolist())
        assert len(worker.pass_seconds(16, 4, 3)) == 3 and min(worker.pass_seconds(16, 1, 1)) > 0
        worker.close()


@pytest.mark.slow
def test_a_worker_reports_a_file_that_its_engine_cannot_load(tmp_path: Path) -> None:
    (tmp_path / "model.gguf").write_bytes(b"GGUF")
    for engine, path in ((LLAMA_CPP, tmp_path / "model.gguf"), (GENAI, tmp_path)):
        with pytest.raises(RequestError, match=f"{engine} with {path}"):
            Worker(engine, path, 1, 64)


@pytest.mark.slow
def test_the_command_compares_peers(tmp_path: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from eagle_export.bundle import export
    from eagle_export.writing.settings import Settings

    export(TARGET, None, tmp_path / "alone", Settings(certify=False))
    prompts = ROOT / "tools" / "demo_pair" / "heldout.jsonl"
    limits = ["--count", "1", "--max-new-tokens", "8", "--threads", "1", "--methods", "vanilla"]
    peers = ["--vs-pytorch", str(TARGET), "--peer-rows", "--peer-folder", str(work), "--json"]
    assert main([str(tmp_path / "alone"), "--prompts", str(prompts), *limits, *peers]) == 0
    report = json.loads(capsys.readouterr().out)
    setups = {(s["backend"], s["precision"], s["method"]): s for s in report["setups"]}
    wanted = {(form.engine, form.name, mode) for form in HERE for mode in MODES[form.engine]}
    assert set(setups) == {("cpu", "fp32", "vanilla"), ("pytorch", "fp32", "eager"), *wanted}
    assert setups["cpu", "fp32", "vanilla"]["shared"] == 1
    passes = report["passes"]
    assert set(passes) == {"alone", *map(str, HERE)}
    assert all(len(times) == len(PASS_ROWS) for times in passes.values())
    assert all(times[-1] > times[0] > 0 for times in passes.values())
    for name in wanted:
        assert setups[name]["tok_s"]["value"] > 0 and setups[name]["peak"]["host"] > 0
        assert 3 < setups[name]["stored"]["bits"] < 20


@pytest.mark.slow
def test_precision_compares_peers(tmp_path: Path, work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    from eagle_export.bundle import export
    from eagle_export.writing.settings import Settings

    export(TARGET, None, tmp_path / "alone", Settings(certify=False))
    prompts = ROOT / "tools" / "demo_pair" / "heldout.jsonl"
    limits = ["--count", "1", "--max-new-tokens", "8", "--threads", "1", "--own-tokens", "100"]
    peers = ["--peer-target", str(TARGET), "--peer-folder", str(work), "-o", str(tmp_path / "out")]
    assert precision([str(tmp_path / "alone"), "--prompts", str(prompts), *limits, *peers]) == 0
    capsys.readouterr()
    rows = [
        json.loads(line) for line in (tmp_path / "out" / "precision.jsonl").read_text(encoding="utf-8").splitlines()
    ]
    formats = installed_formats(ALL_FORMATS, print)
    assert [row["name"] for row in rows] == ["alone", *map(str, formats)]
    kl = {row["name"]: row["own_kl"] for row in rows}
    assert kl["alone"] == 0
    for engine, eight, four in ((LLAMA_CPP, "q8_0", "q4_0"), (GENAI, "int8", "int4"), (OPENVINO, "int8", "int4")):
        if f"{engine}/{eight}" in kl:
            assert 0 < kl[f"{engine}/{eight}"] < kl[f"{engine}/{four}"] < 1
    if "openvino/int8" in kl:
        assert kl["openvino/int8"] < 0.01  # positions rounded to bf16 gave 0.07
    for row in rows:
        assert row["bits"] > 4 and row["vanilla_tokens_per_s"] > 0 and row["pass_1_ms"] > 0
    assert abs(rows[0]["bits"] - 32) < 1


def test_a_file_gets_the_tokens_of_a_tokenizer(tmp_path: Path) -> None:
    """Without them llama.cpp's server ends when it makes text of its first token."""
    write_gguf(open_source(TARGET), tmp_path / "model.gguf")
    out = with_tokens(tmp_path / "model.gguf", TARGET / "tokenizer.json")
    plain, full = GGUFReader(tmp_path / "model.gguf"), GGUFReader(out)
    tokens = full.fields["tokenizer.ggml.tokens"].contents()
    tokenizer = Tokenizer.from_file(str(TARGET / "tokenizer.json"))
    count = open_source(TARGET).config["vocab_size"]
    assert len(tokens) == count and tokens[: tokenizer.get_vocab_size()] == [
        tokenizer.id_to_token(number) for number in range(min(count, tokenizer.get_vocab_size()))
    ]
    assert full.fields["llama.block_count"].contents() == plain.fields["llama.block_count"].contents()
    for before, after in zip(plain.tensors, full.tensors, strict=True):
        assert (before.name, before.tensor_type) == (after.name, after.tensor_type)
        np.testing.assert_array_equal(before.data, after.data)
    assert with_tokens(tmp_path / "model.gguf", tmp_path / "gone") == out
    for content, message in (("{}", "cannot be read as a tokenizer"), ('{"model": {"type": "Unigram"}}', "only BPE")):
        (tmp_path / "other.json").write_text(content)
        out.unlink(missing_ok=True)
        with pytest.raises(RequestError, match=message):
            with_tokens(tmp_path / "model.gguf", tmp_path / "other.json")
