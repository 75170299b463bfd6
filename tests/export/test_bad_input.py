"""Bad checkpoints, pairs and destinations: one line that says what and where, exit status 2, nothing left on disk.

Every case damages a copy of the golden pair and runs the command itself. What needs no trace to be seen is refused
before one: in a fraction of the processor time that a trace takes, and without a folder beside the destination.
"""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

import eagle_export.bundle
from eagle_export.cli import main
from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import MANIFEST_NAME, read_manifest
from eagle_runtime.session.trt.engine_file import SIDECAR_VERSION, EngineSet, EngineSpec, Profile

CHECK_SECONDS = 2.0  # of processor time; the checks take a tenth of it, tracing the golden pair three times as much
GATE, NORM = "model.layers.2.mlp.gate_proj.weight", "model.norm.weight"
Q, K, V = (f"layers.0.self_attn.{part}_proj.weight" for part in "qkv")


class Workplace:
    """A copy of the golden pair, and an empty folder to export into."""

    def __init__(self, golden: Path, root: Path) -> None:
        self.root = root
        self.target, self.eagle1, self.eagle3 = root / "target", root / "eagle1", root / "eagle3"
        for name, folder in (("target", self.target), ("head_eagle1", self.eagle1), ("head_eagle3_dv44", self.eagle3)):
            shutil.copytree(golden / name, folder)
        self.bundle = root / "out" / "bundle"
        self.bundle.parent.mkdir()

    def arguments(self, head: str = "eagle1") -> list[str]:
        return [str(self.target), str(self.root / head), "-o", str(self.bundle)]

    def snapshot(self) -> dict[str, Any]:
        """Every path below the root with its content: equal snapshots mean that nothing was made, changed or lost."""
        return {
            str(path.relative_to(self.root)): os.readlink(path)
            if path.is_symlink()
            else path.read_bytes()
            if path.is_file()
            else None
            for path in self.root.rglob("*")
        }

    def make_shallow(self) -> None:
        """Keep one layer of the target, for what is found after the trace."""
        configure(self.target, num_hidden_layers=1)
        edit(
            self.target, lambda t: [t.pop(name) for name in list(t) if ".layers." in name and ".layers.0." not in name]
        )


def configure(folder: Path, **changes: Any) -> None:
    """Set keys of config.json; None takes a key away."""
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({key: value for key, value in config.items() if value is not None}))


def edit(folder: Path, change: Callable[[dict[str, Tensor]], object]) -> None:
    """Rewrite model.safetensors after `change` worked on its tensors."""
    tensors = {name: tensor.clone() for name, tensor in load_file(folder / "model.safetensors").items()}
    change(tensors)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, folder / "model.safetensors")


def put(name: str, tensor: Tensor) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.update({name: tensor})


def drop(name: str) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors.pop(name)


def spoil(name: str, value: float) -> Callable[[dict[str, Tensor]], object]:
    return lambda tensors: tensors[name].view(-1)[-1].fill_(value)


def write_index(folder: Path, weight_map: object) -> None:
    """Replace the weights by an index alone."""
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))


def shard(folder: Path) -> None:
    """Leave one of two shards behind, as a download that broke off does."""
    (folder / "model.safetensors").rename(folder / "model-00001-of-00002.safetensors")
    index = folder / "model.safetensors.index.json"
    names = sorted(json.loads(index.read_text())["weight_map"])
    files = [f"model-0000{1 + (2 * i >= len(names))}-of-00002.safetensors" for i in range(len(names))]
    index.write_text(json.dumps({"weight_map": dict(zip(names, files, strict=True))}))


@dataclass(frozen=True)
class Case:
    """says: what the message names, the place included. damage: one step after another."""

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
    case("pickled weights", "eagle1", "*.bin")(
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
    case("unknown tensor in EAGLE-3", "eagle3/model.safetensors", "fc_norm.0.weight", head="eagle3")(
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
    case("variant", "eagle3/config.json", "norm_before_residual", head="eagle3")(
        lambda w: configure(w.eagle3, norm_before_residual=True)
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
    case("a file in the way", "out/bundle", "no folder")(lambda w: w.bundle.write_text("mine")),
    case("a dangling link", "out/bundle", "no folder")(lambda w: w.bundle.symlink_to("nowhere")),
    case("a link to a folder", "out/bundle", "no folder")(lambda w: w.bundle.symlink_to(w.eagle3)),
    case("no parent", "out does not exist")(lambda w: w.bundle.parent.rmdir()),
    case("parent a file", "out does not exist")(
        lambda w: w.bundle.parent.rmdir(), lambda w: w.bundle.parent.write_text("mine")
    ),
]


@pytest.fixture
def work(golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Workplace]:
    """The command also sets signal handlers and a variable of its process: put back."""
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    yield Workplace(golden, tmp_path)
    for number, handler in before.items():
        signal.signal(number, handler)


def refusal(work: Workplace, argv: list[str], capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that eagle-export says, having left every file as it was."""
    before = work.snapshot()
    try:
        status: object = main(argv)
    except SystemExit as stop:  # argparse's way out
        status = stop.code
    out, err = capsys.readouterr()
    assert (status, out) == (2, ""), err
    assert err.startswith("eagle-export: ") and err.index("\n") == len(err) - 1, err
    assert work.snapshot() == before
    return err


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_damage_is_named_before_any_long_work(work: Workplace, case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    for step in case.damage:
        step(work)
    parent = work.bundle.parent
    changed = parent.stat().st_mtime_ns if parent.exists() else None
    started = time.process_time()
    message = refusal(work, work.arguments(case.head), capsys)
    assert time.process_time() - started < CHECK_SECONDS
    assert changed is None or parent.stat().st_mtime_ns == changed, "something was made beside the destination"
    for words in case.says:
        assert words in message.replace(f"{work.root}/", "")


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["-p", "int3"], "--precision"),
        (["--backend", "tpu"], "--backend"),
        (["--draft-top-k", "0"], "draft top-k is 0"),
        (["--draft-top-k", "many"], "--draft-top-k"),
        (["--no-such-option"], "--no-such-option"),
    ],
)
def test_wrong_arguments_take_one_line(
    work: Workplace, argv: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert says in refusal(work, [*work.arguments(), *argv], capsys)


def test_a_name_no_disk_takes(work: Workplace, capsys: pytest.CaptureFixture[str]) -> None:
    work.bundle = work.bundle.with_name(300 * "x")
    assert "File name too long" in refusal(work, work.arguments(), capsys)


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
    """Values are read when they are written, so this is found late, with files beside the destination to clear away."""
    work.make_shallow()
    damage(work)
    shutil.copytree(bundle_of("eagle1"), work.bundle)
    message = refusal(work, [*work.arguments(), *argv], capsys)
    for words in says:
        assert words in message


def test_an_older_bundle_is_replaced(
    work: Workplace, bundle_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    work.make_shallow()
    edit(work.target, spoil(NORM, 1e6))  # too large for fp16, well within fp32
    shutil.copytree(bundle_of("eagle1"), work.bundle)
    fake_engines(work.bundle)  # made from the older graphs, so they must go with them
    assert main([*work.arguments(), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert any("engines tensorrt-rtx-sm89 were built from the older bundle" in text for text in report["warnings"])
    assert report["bundle"] == str(work.bundle)
    assert [path.name for path in work.bundle.parent.iterdir()] == ["bundle"]
    manifest = read_manifest(work.bundle)
    assert manifest.head is not None and (manifest.head.kind, manifest.target.num_layers) == ("eagle1", 1)
    assert {path.relative_to(work.bundle).as_posix() for path in work.bundle.rglob("*") if path.is_file()} == {
        MANIFEST_NAME,
        *manifest.files,
    }
    with EagleModel.load(work.bundle, threads=1) as model:
        assert len(model.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True).token_ids) == 4


def early_refusal(work: Workplace, capsys: pytest.CaptureFixture[str]) -> str:
    """Before the trace."""
    started = time.process_time()
    message = refusal(work, work.arguments(), capsys)
    assert time.process_time() - started < CHECK_SECONDS
    return message


def fake_engines(bundle: Path) -> Path:
    """A folder of engines whose sidecar lists them; nobody loads them."""
    folder = bundle / "engines" / "tensorrt-rtx-sm89"
    folder.mkdir(parents=True)
    profile = Profile("tree", (1, 1, 1), (1, 1, 1), (1, 1, 1), (1, 1, 1))
    spec = EngineSpec("target.engine", "0" * 64, 6, {}, (profile,), True, None, None)
    sidecar = EngineSet(SIDECAR_VERSION, "tensorrt-rtx", "1.7", ("8.9",), None, None, 64, False, spec, None)
    (folder / "engine.json").write_text(sidecar.to_json())
    (folder / "target.engine").write_bytes(b"engine")
    (folder.parent / "timing.cache").write_bytes(b"timings")
    return folder


def foreign_file(bundle: Path) -> str:
    (bundle / "thesis.tex").write_text("years of work")
    return "thesis.tex"


def foreign_beside_the_graph(bundle: Path) -> str:
    (bundle / "target" / "notes.txt").write_text("mine")
    return "target/notes.txt"


def foreign_folder(bundle: Path) -> str:
    (bundle / "photos").mkdir()
    return "photos"


def foreign_link(bundle: Path) -> str:
    (bundle / "link").symlink_to(bundle.parent)
    return "link"


def foreign_engine(bundle: Path) -> str:
    folder = fake_engines(bundle)
    (folder / "my.plan").write_bytes(b"engine")
    return "engines/tensorrt-rtx-sm89/my.plan"


def engines_without_a_sidecar(bundle: Path) -> str:
    folder = fake_engines(bundle)
    (folder / "engine.json").write_text("{}")
    return "engines/tensorrt-rtx-sm89"


def listed_name_as_a_folder(bundle: Path) -> str:
    (bundle / "generation_config.json").unlink(missing_ok=True)
    (bundle / "generation_config.json").mkdir()
    return "generation_config.json"


@pytest.mark.parametrize(
    "add",
    [
        foreign_file, foreign_beside_the_graph, foreign_folder, foreign_link, foreign_engine,
        engines_without_a_sidecar, listed_name_as_a_folder,
    ],
)  # fmt: skip
def test_files_that_no_manifest_lists_stop_the_export(
    work: Workplace,
    bundle_of: Callable[..., Path],
    add: Callable[[Path], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Before any work, and nothing is touched."""
    shutil.copytree(bundle_of("eagle1"), work.bundle)
    name = add(work.bundle)
    message = early_refusal(work, capsys)
    assert f"{work.bundle / name} does not belong to the bundle" in message


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"files": 7}'])
def test_a_manifest_that_lists_nothing_stops_the_export(
    work: Workplace, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    work.bundle.mkdir()
    (work.bundle / MANIFEST_NAME).write_text(content)
    message = early_refusal(work, capsys)
    assert f"{work.bundle / MANIFEST_NAME} does not say which files are the bundle's" in message


def test_a_bundle_of_another_version_may_be_replaced(
    work: Workplace, bundle_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    work.make_shallow()
    shutil.copytree(bundle_of("eagle1"), work.bundle)
    data = json.loads((work.bundle / MANIFEST_NAME).read_text())
    (work.bundle / MANIFEST_NAME).write_text(json.dumps({"schema_version": 3, "files": data["files"]}))
    assert main([*work.arguments(), "--no-certificate"]) == 0, capsys.readouterr().err
    assert read_manifest(work.bundle).target.num_layers == 1


def test_a_file_that_comes_while_the_export_runs_stays(
    work: Workplace,
    bundle_of: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The older bundle is looked at once more before it goes."""
    work.make_shallow()
    shutil.copytree(bundle_of("eagle1"), work.bundle)
    write = eagle_export.bundle._write

    def write_meanwhile(*arguments: Any) -> None:
        write(*arguments)
        foreign_file(work.bundle)

    monkeypatch.setattr(eagle_export.bundle, "_write", write_meanwhile)
    assert main([*work.arguments(), "--no-certificate"]) == 2
    assert f"{work.bundle / 'thesis.tex'} does not belong to the bundle" in capsys.readouterr().err
    assert (work.bundle / "thesis.tex").read_text() == "years of work"
    assert read_manifest(work.bundle).target.num_layers > 1
    assert [path.name for path in work.bundle.parent.iterdir()] == ["bundle"]


def test_a_loaded_model_goes_on_when_its_bundle_is_replaced(
    work: Workplace, bundle_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights are mapped from files that lose their name, and nothing else."""
    work.make_shallow()
    shutil.copytree(bundle_of("eagle1"), work.bundle)
    with EagleModel.load(work.bundle, threads=1) as model:
        before = model.generate([5, 6, 7], max_new_tokens=32, ignore_eos=True).token_ids
        assert main([*work.arguments(), "--no-certificate"]) == 0, capsys.readouterr().err
        assert model.generate([5, 6, 7], max_new_tokens=32, ignore_eos=True).token_ids == before
    with EagleModel.load(work.bundle, threads=1) as model:
        assert model.generate([5, 6, 7], max_new_tokens=32, ignore_eos=True).token_ids != before


def test_the_process_itself_ends_with_status_2(work: Workplace) -> None:
    """What a shell sees: status, one line, and nothing of the libraries' own talk."""
    os.truncate(work.eagle1 / "model.safetensors", 5000)
    before = work.snapshot()
    done = subprocess.run(
        [sys.executable, "-m", "eagle_export.cli", *work.arguments()], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"eagle-export: {work.eagle1 / 'model.safetensors'} is damaged or cut short")
    assert done.stderr.count("\n") == 1
    assert work.snapshot() == before
