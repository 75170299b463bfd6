"""Bad checkpoints, pairs and destinations: one line with what and where, exit status 2, and no file is left.

Each case damages a copy of the golden pair and runs the command. What can be seen without a trace is refused before
one: in a fraction of the processor time of a trace, and without a work folder next to the destination.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from export_workplace import (
    Workplace,
    configure,
    drop,
    edit,
    put,
    refusal,
    shard,
    spoil,
    workplace,
    write_index,
)
from systems import needs_links
from trace_memory import TraceMemory

GATE, NORM = "model.layers.2.mlp.gate_proj.weight", "model.norm.weight"
Q, K, V = (f"layers.0.self_attn.{part}_proj.weight" for part in "qkv")


@dataclass(frozen=True)
class Case:
    """says: what the message must contain, the path included. damage: steps in order."""

    name: str
    says: tuple[str, ...]
    head: str
    damage: tuple[Callable[[Workplace], object], ...]


def case(name: str, *says: str, head: str = "eagle1") -> Callable[..., Case]:
    return lambda *damage: Case(name, says, head, damage)


CASES = [
    # files
    case("target missing", "target is not a folder")(lambda w: shutil.rmtree(w.target)),
    case("head missing", "eagle1 is not a folder")(lambda w: shutil.rmtree(w.eagle1)),
    case("target a file", "target is not a folder")(
        lambda w: shutil.rmtree(w.target), lambda w: w.target.write_text("x")
    ),
    case("no config", "target/config.json is missing")(lambda w: (w.target / "config.json").unlink()),
    case("no head config", "eagle1/config.json is missing")(lambda w: (w.eagle1 / "config.json").unlink()),
    case("config cut short", "target/config.json", "JSON")(lambda w: os.truncate(w.target / "config.json", 200)),
    case("config empty", "eagle1/config.json", "JSON")(lambda w: os.truncate(w.eagle1 / "config.json", 0)),
    case("config a list", "target/config.json", "JSON object")(lambda w: (w.target / "config.json").write_text("[]")),
    case("config bytes", "target/config.json")(lambda w: (w.target / "config.json").write_bytes(b"\xff\xfe\x00")),
    case("config nested", "target/config.json")(lambda w: (w.target / "config.json").write_text("[" * 100_000)),
    case("config of many levels", "target/config.json", "levels deep")(
        lambda w: (w.target / "config.json").write_text(f'{{"model_type": "llama", "more": {"[" * 500}{"]" * 500}}}')
    ),
    case("config a folder", "target/config.json")(
        lambda w: (w.target / "config.json").unlink(), lambda w: (w.target / "config.json").mkdir()
    ),
    case("no weights", "model.safetensors is missing")(
        lambda w: (w.target / "model.safetensors").unlink(),
        lambda w: (w.target / "model.safetensors.index.json").unlink(),
    ),
    case("weights cut short", "target/model.safetensors", "cut short")(
        lambda w: os.truncate(w.target / "model.safetensors", 1_000_000)
    ),
    case("header cut short", "eagle1/model.safetensors", "cut short")(
        lambda w: os.truncate(w.eagle1 / "model.safetensors", 100)
    ),
    case("weights empty", "eagle1/model.safetensors", "cut short")(
        lambda w: os.truncate(w.eagle1 / "model.safetensors", 0)
    ),
    case("shard missing", "target/model-00002-of-00002.safetensors is missing")(lambda w: shard(w.target)),
    case("index empty", "model.safetensors.index.json", "weight_map")(lambda w: write_index(w.target, {})),
    case("index a list", "model.safetensors.index.json", "weight_map")(lambda w: write_index(w.target, ["x"])),
    case("index of numbers", "model.safetensors.index.json", "3")(lambda w: write_index(w.target, {"a": 3, "b": "c"})),
    case("index leaves", "index.json", "../eagle1", "leaves the folder")(
        lambda w: write_index(w.target, {"a": "../eagle1/model.safetensors"})
    ),
    case("index absolute", "index.json", "leaves the folder")(
        lambda w: write_index(w.target, {"a": str(w.eagle1 / "model.safetensors")})
    ),
    case("pickled weights", "eagle1/pytorch_model.bin", "holds more than tensors")(
        lambda w: (w.eagle1 / "model.safetensors").rename(w.eagle1 / "pytorch_model.bin")
    ),
    case("tokenizer damaged", "target/tokenizer.json")(lambda w: (w.target / "tokenizer.json").write_text("{")),
    case("tokenizer config damaged", "target/tokenizer_config.json")(
        lambda w: (w.target / "tokenizer_config.json").write_text("{")
    ),
    case("tokenizer config a list", "target/tokenizer_config.json")(
        lambda w: (w.target / "tokenizer_config.json").write_text("[]")
    ),
    case("template not UTF-8", "target/chat_template.jinja")(
        lambda w: (w.target / "chat_template.jinja").write_bytes(b"\xff{{ messages }}")
    ),
    case("generation config damaged", "target/generation_config.json")(
        lambda w: (w.target / "generation_config.json").write_text("{")
    ),
    case("eos no id", "target/generation_config.json", "eos_token_id", "'x'")(
        lambda w: (w.target / "generation_config.json").write_text('{"eos_token_id": "x"}')
    ),
    # the target's config
    case("model type", "target/config.json", "model_type", "'gpt2'")(lambda w: configure(w.target, model_type="gpt2")),
    case("model type absent", "target/config.json", "model_type")(lambda w: configure(w.target, model_type=None)),
    case("quantised", "target/config.json", "quantised")(
        lambda w: configure(w.target, quantization_config={"quant_method": "gptq", "bits": 4})
    ),
    case("vocabulary", "target", "model.embed_tokens.weight", "[300, 64]")(
        lambda w: configure(w.target, vocab_size=300)
    ),
    case("hidden size", "target", "model.embed_tokens.weight")(lambda w: configure(w.target, hidden_size=128)),
    case("hidden size a word", "target/config.json", "hidden_size", "'64'")(
        lambda w: configure(w.target, hidden_size="64")
    ),
    case("too many layers", "target", "model.layers.8.")(lambda w: configure(w.target, num_hidden_layers=9)),
    case("layers without end", "target", "model.layers.9999999")(
        lambda w: configure(w.target, num_hidden_layers=10_000_000)
    ),
    case("too few layers", "target/model.safetensors", "model.layers.4.")(
        lambda w: configure(w.target, num_hidden_layers=4)
    ),
    case("intermediate size", "target/model.safetensors", "gate_proj", "[128, 64]")(
        lambda w: configure(w.target, intermediate_size=128)
    ),
    case("heads of the target", "target/config.json", "3")(lambda w: configure(w.target, num_attention_heads=3)),
    case("key/value heads", "target/config.json", "4 heads", "3 key/value heads")(
        lambda w: configure(w.target, num_key_value_heads=3)
    ),
    case("no key/value heads", "target/config.json", "num_key_value_heads")(
        lambda w: configure(w.target, num_key_value_heads=0)
    ),
    case("fewer key/value heads", "target/model.safetensors", "k_proj", "[16, 64]")(
        lambda w: configure(w.target, num_key_value_heads=1)
    ),
    case("head_dim 0", "target/config.json", "head_dim")(lambda w: configure(w.target, head_dim=0)),
    case("head_dim odd", "target/config.json", "head_dim")(lambda w: configure(w.target, head_dim=15)),
    case("context a word", "target/config.json", "max_position_embeddings")(
        lambda w: configure(w.target, max_position_embeddings="long")
    ),
    case("context 0", "target/config.json", "max_position_embeddings")(
        lambda w: configure(w.target, max_position_embeddings=0)
    ),
    case("activation", "target/config.json", "relu7")(lambda w: configure(w.target, hidden_act="relu7")),
    case("theta a word", "target/config.json", "rope_theta")(lambda w: configure(w.target, rope_theta="x")),
    case("scaling a word", "target/config.json", "rope_scaling")(lambda w: configure(w.target, rope_scaling="x")),
    case("scaling by length", "target/config.json", "'dynamic'")(
        lambda w: configure(w.target, rope_scaling={"type": "dynamic", "factor": 2.0})
    ),
    case("scaling without factor", "target/config.json", "factor")(
        lambda w: configure(w.target, rope_scaling={"rope_type": "yarn"})
    ),
    # the target's tensors
    case("unknown tensor", "target/model.safetensors", "model.layers.3.self_attn.q_norm.weight")(
        lambda w: edit(w.target, put("model.layers.3.self_attn.q_norm.weight", torch.ones(16)))
    ),
    case("tensor missing", "target", GATE, "missing")(lambda w: edit(w.target, drop(GATE))),
    case("embedding missing", "target", "model.embed_tokens.weight", "missing")(
        lambda w: edit(w.target, drop("model.embed_tokens.weight"))
    ),
    case("LM head missing", "target", "lm_head.weight", "missing")(lambda w: edit(w.target, drop("lm_head.weight"))),
    case("shape", "target/model.safetensors", GATE, "[100, 64]", "[160, 64]")(
        lambda w: edit(w.target, put(GATE, torch.zeros(100, 64)))
    ),
    case("norm of another width", "target/model.safetensors", NORM, "[65]")(
        lambda w: edit(w.target, put(NORM, torch.ones(65)))
    ),
    case("whole numbers", "target/model.safetensors", GATE, "I8")(
        lambda w: edit(w.target, put(GATE, torch.zeros(160, 64, dtype=torch.int8)))
    ),
    case("8-bit floats", "target/model.safetensors", GATE, "F8_E4M3")(
        lambda w: edit(w.target, put(GATE, torch.zeros(160, 64).to(torch.float8_e4m3fn)))
    ),
    # the head
    case("head of another vocabulary", "eagle1/config.json", "300", "256")(
        lambda w: configure(w.eagle1, vocab_size=300)
    ),
    case("head of another hidden size", "eagle1", "fc.weight", "[32, 64]", "64")(
        lambda w: edit(w.eagle1, put("fc.weight", torch.zeros(32, 64)))
    ),
    case("taps of another hidden size", "eagle3", "fc.weight", "[64, 100]", head="eagle3")(
        lambda w: edit(w.eagle3, put("fc.weight", torch.zeros(64, 100)))
    ),
    case("two taps", "eagle3", "2 taps", head="eagle3")(
        lambda w: edit(w.eagle3, put("fc.weight", torch.zeros(64, 128)))
    ),
    case("d2t too short", "eagle3", "d2t", "[43]", "[44]", head="eagle3")(
        lambda w: edit(w.eagle3, put("d2t", torch.zeros(43, dtype=torch.int64)))
    ),
    case("d2t of fractions", "eagle3", "d2t", "F32", head="eagle3")(
        lambda w: edit(w.eagle3, put("d2t", torch.full((44,), 0.5)))
    ),
    case("embedding of 8 bits", "eagle1/model.safetensors", "embed_tokens.weight", "F8_E4M3")(
        lambda w: edit(w.eagle1, put("embed_tokens.weight", torch.zeros(256, 64).to(torch.float8_e4m3fn)))
    ),
    case("d2t outside", "eagle3", "d2t", "256", head="eagle3")(
        lambda w: edit(w.eagle3, put("d2t", torch.full((44,), 250)))
    ),
    case("d2t missing", "eagle3", "d2t", "missing", head="eagle3")(lambda w: edit(w.eagle3, drop("d2t"))),
    case("t2d too short", "eagle3", "t2d", "[255]", head="eagle3")(
        lambda w: edit(w.eagle3, put("t2d", torch.ones(255, dtype=torch.bool)))
    ),
    case("t2d names others", "eagle3", "d2t and t2d", head="eagle3")(
        lambda w: edit(w.eagle3, lambda t: t["t2d"].logical_not_())
    ),
    case("shallow target", "6 layers", "7", head="eagle3")(
        lambda w: configure(w.target, num_hidden_layers=6),
        lambda w: edit(w.target, lambda t: [t.pop(name) for name in list(t) if ".6." in name or ".7." in name]),
    ),
    case("3 heads", "eagle1/config.json", "3 heads")(lambda w: configure(w.eagle1, num_attention_heads=3)),
    case("8 heads", "eagle1/config.json", "8 heads")(lambda w: configure(w.eagle1, num_attention_heads=8)),
    case("128 heads", "eagle1/config.json", "128 heads")(lambda w: configure(w.eagle1, num_attention_heads=128)),
    case("no heads", "eagle1/config.json", "num_attention_heads")(
        lambda w: configure(w.eagle1, num_attention_heads=None)
    ),
    case("key/value heads of the head", "eagle1/config.json", "4 key/value heads")(
        lambda w: configure(w.eagle1, num_key_value_heads=4)
    ),
    case("head_dim of the head", "eagle1/config.json", "head_dim 32")(lambda w: configure(w.eagle1, head_dim=32)),
    case("keys of no width", "eagle1", K, "[0, 64]")(lambda w: edit(w.eagle1, put(K, torch.zeros(0, 64)))),
    case("queries of no width", "eagle1", Q, "[0, 64]")(lambda w: edit(w.eagle1, put(Q, torch.zeros(0, 64)))),
    case("3 key/value heads", "eagle1/config.json", "48 rows")(
        lambda w: edit(w.eagle1, lambda t: t.update({K: torch.zeros(48, 64), V: torch.zeros(48, 64)}))
    ),
    case("flat projection", "eagle1", Q, "[64]")(lambda w: edit(w.eagle1, put(Q, torch.zeros(64)))),
    case("wide projection", "eagle1/model.safetensors", Q, "[64, 128]")(
        lambda w: edit(w.eagle1, put(Q, torch.zeros(64, 128)))
    ),
    case("bias", "eagle1/model.safetensors", "fc.bias", "[65]")(
        lambda w: edit(w.eagle1, put("fc.bias", torch.zeros(65)))
    ),
    case("unknown tensor in the head", "eagle1/model.safetensors", "layers.0.mystery.weight")(
        lambda w: edit(w.eagle1, put("layers.0.mystery.weight", torch.zeros(3)))
    ),
    case("unknown tensor in EAGLE-3", "eagle3", "fc_norm.0.weight", "is there", head="eagle3")(
        lambda w: edit(w.eagle3, put("fc_norm.0.weight", torch.ones(64)))
    ),
    case("LM head in EAGLE-1", "eagle1", "lm_head.weight")(
        lambda w: edit(w.eagle1, put("lm_head.weight", torch.zeros(256, 64)))
    ),
    case("d2t in EAGLE-1", "eagle1/model.safetensors", "d2t")(
        lambda w: edit(w.eagle1, put("d2t", torch.zeros(256, dtype=torch.int64)))
    ),
    case("head's tensor missing", "eagle1", "layers.0.mlp.up_proj.weight", "missing")(
        lambda w: edit(w.eagle1, drop("layers.0.mlp.up_proj.weight"))
    ),
    case("head's projection missing", "eagle1", Q, "missing")(lambda w: edit(w.eagle1, drop(Q))),
    case("EAGLE-3 norm missing", "eagle3", "midlayer.hidden_norm.weight", "missing", head="eagle3")(
        lambda w: edit(w.eagle3, drop("midlayer.hidden_norm.weight"))
    ),
    case("no tensors", "eagle3", "nothing", head="eagle3")(lambda w: edit(w.eagle3, lambda t: t.clear())),
    case("no head", "target", "neither", head="target")(lambda w: None),
    case("variant", "eagle3/config.json", "layer_types", head="eagle3")(
        lambda w: configure(w.eagle3, layer_types=["sliding_attention"])
    ),
    case("activation of the head", "eagle1/config.json", "'gelu'")(lambda w: configure(w.eagle1, hidden_act="gelu")),
    case("epsilon a word", "eagle1/config.json", "rms_norm_eps")(lambda w: configure(w.eagle1, rms_norm_eps="x")),
    case("theta of the head", "eagle1/config.json", "rope_theta")(lambda w: configure(w.eagle1, rope_theta=[1])),
    case("scaling of the head", "eagle1/config.json", "factor")(
        lambda w: configure(w.eagle1, rope_scaling={"rope_type": "linear"})
    ),
    case("scaling by a word", "eagle1/config.json")(
        lambda w: configure(w.eagle1, rope_scaling={"rope_type": "linear", "factor": "x"})
    ),
    case("layer ids", "eagle3/config.json", "[2, 4, 8]", head="eagle3")(
        lambda w: configure(w.eagle3, eagle_config={"eagle_aux_hidden_state_layer_ids": [2, 4, 8]})
    ),
    case("layer ids no numbers", "eagle3/config.json", "'a'", head="eagle3")(
        lambda w: configure(w.eagle3, eagle_config={"eagle_aux_hidden_state_layer_ids": ["a", "b", "c"]})
    ),
    case("layer ids no list", "eagle3/config.json", "layer_ids is 3", head="eagle3")(
        lambda w: configure(w.eagle3, eagle_config={"eagle_aux_hidden_state_layer_ids": 3})
    ),
    case("eagle_config a word", "eagle3/config.json", "eagle_config", head="eagle3")(
        lambda w: configure(w.eagle3, eagle_config="x")
    ),
    # the destination
    case("other files", "out/bundle", "other files")(
        lambda w: w.bundle.mkdir(), lambda w: (w.bundle / "thesis.txt").write_text("mine")
    ),
    case("a file in the way", "out/bundle", "not a folder")(lambda w: w.bundle.write_text("mine")),
    case("a dangling link", "out/bundle is a link")(lambda w: w.bundle.symlink_to("nowhere")),
    case("a link to a folder", "out/bundle is a link")(lambda w: w.bundle.symlink_to(w.eagle3)),
    case("no parent", "out does not exist")(lambda w: w.bundle.parent.rmdir()),
    case("parent a file", "out is not a folder")(
        lambda w: w.bundle.parent.rmdir(), lambda w: w.bundle.parent.write_text("mine")
    ),
]


@pytest.fixture
def work(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace_memory: TraceMemory
) -> Iterator[Workplace]:
    with workplace(golden, tmp_path, monkeypatch, trace_memory) as place:
        yield place


def slashes(text: str) -> str:
    """Paths of Windows as the others write them."""
    return text.replace("\\", "/") if os.name == "nt" else text


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=needs_links if " link" in case.name else ()) for case in CASES],
    ids=lambda case: case.name,
)
def test_damage_is_named_before_any_long_work(work: Workplace, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    for step in case.damage:
        step(work)
    parent = work.bundle.parent
    changed = parent.stat().st_mtime_ns if parent.exists() else None
    asked = work.traces.asked
    message = refusal(work, work.arguments(case.head), capsys)
    assert work.traces.asked == asked
    assert changed is None or parent.stat().st_mtime_ns == changed, "something was created next to the destination"
    for words in case.says:
        assert words in slashes(message).replace(f"{slashes(str(work.root))}/", "")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["-p", "int3"], "--precision"),
        (["--backend", "tpu"], "--backend"),
        (["--head-top-k", "0"], "draft top-k is 0"),
        (["--head-top-k", "many"], "--head-top-k"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_wrong_arguments_take_one_line(
    work: Workplace, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(work, [*work.arguments(), *argv], capsys)


def test_a_head_is_no_gguf_file(work: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    """The advice was to give a target's .gguf file."""
    file = work.root / "head.gguf"
    file.write_bytes(b"GGUF")
    message = refusal(work, [str(work.target), str(file), "-o", str(work.bundle)], capsys)
    assert "head.gguf is a GGUF file, which only a target may be" in message


def test_a_name_no_disk_takes(work: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    work.bundle = work.bundle.with_name(300 * "x")
    says = "File name too long" if os.name == "posix" else "cannot be written"  # the words are the system's
    assert says in refusal(work, work.arguments(), capsys)


def test_the_target_is_never_the_destination(work: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    message = refusal(work, [str(work.target), str(work.eagle1), "-o", str(work.target)], capsys)
    assert f"{work.target} exists and holds other files" in message


@pytest.mark.parametrize(
    ("damage", "argv", "says"),
    [
        (lambda w: edit(w.target, spoil(NORM, float("nan"))), [], ("target/model.safetensors", NORM, "not finite")),
        (lambda w: edit(w.eagle1, spoil("fc.weight", float("-inf"))), [], ("eagle1/model.safetensors", "fc.weight")),
        (lambda w: edit(w.target, spoil(NORM, 1e6)), ["-p", "fp16"], ("target/model.safetensors", NORM, "fp16")),
    ],
    ids=["nan", "inf in the head", "beyond fp16"],
)
def test_values_are_checked_and_the_older_bundle_stays(
    work: Workplace,
    bundle_of: Callable[..., Path],
    damage: Callable[[Workplace], object],
    argv: list[str],
    says: tuple[str, ...],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Values are read when they are written, so this error comes late, with a work folder that must be removed."""
    work.make_shallow()
    damage(work)
    shutil.copytree(bundle_of("eagle1"), work.bundle)
    message = refusal(work, [*work.arguments(), *argv], capsys)
    for words in says:
        assert words in slashes(message)


def test_the_process_itself_ends_with_status_2(work: Workplace) -> None:
    """A shell sees the status and one line, and no output of the libraries."""
    os.truncate(work.eagle1 / "model.safetensors", 5000)
    before = work.snapshot()
    done = subprocess.run(
        [sys.executable, "-m", "eagle_export.commands.cli", *work.arguments()],
        capture_output=True,
        text=True,
        check=False,
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"eagle-export: {work.eagle1 / 'model.safetensors'} is damaged or cut short")
    assert done.stderr.count("\n") == 1
    assert work.snapshot() == before
