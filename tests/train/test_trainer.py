"""Training on the golden target through the command: it learns, it goes on where it was killed, it refuses."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from conftest import GOLDEN
from eagle_calib.folder import claimed
from eagle_export.bundle import export
from eagle_export.graphs.pair import open_pair
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_train import precision
from eagle_train.cli import _from_arguments, _parser, main
from eagle_train.config import TrainConfig, TrainingJob
from eagle_train.head import vocabulary_of
from eagle_train.target import FrozenTarget
from eagle_train.trainer import train_head
from open_files import watched
from systems import largest_file, read_tensors

TARGET = GOLDEN / "target"
HEADS = {"eagle1": GOLDEN / "head_eagle1", "eagle3": GOLDEN / "head_eagle3_dv44"}
QUICK = ["--threads", "1", "--backend", "cpu", "--batch-size", "8", "--seq-len", "48"]


def write_prompts(path: Path, golden_prompts: list[list[int]], count: int) -> Path:
    """Short printable prompts and beginnings of the reference prompts, as ids (byte + 3)."""
    draw = random.Random(0)
    rows = [[draw.randrange(32, 127) + 3 for _ in range(draw.randint(1, 4))] for _ in range(count // 2)]
    while len(rows) < count:
        prompt = golden_prompts[len(rows) % len(golden_prompts)]
        rows.append(prompt[: draw.randint(2, len(prompt))])
    path.write_text("".join(json.dumps({"ids": row}) + "\n" for row in rows), encoding="utf-8")
    return path


def answers_of_the_target(folder: Path, golden_prompts: list[list[int]], count: int, tokens: int, seed: int) -> Path:
    prompts = write_prompts(folder / f"prompts{seed}.jsonl", golden_prompts, count)
    out = folder / f"answers{seed}.jsonl"
    options = ["--temperature", "1", "--max-new-tokens", str(tokens), "--batch-size", str(count), "--seed", str(seed)]
    options += ["--threads", "1"]
    assert main(["generate", str(TARGET), "--data", str(prompts), "-o", str(out), "--backend", "cpu", *options]) == 0
    return out


@pytest.fixture(scope="session")
def answers(tmp_path_factory: pytest.TempPathFactory, prompts: list[list[int]]) -> Path:
    """128 texts of the golden target, sampled at temperature 1."""
    return answers_of_the_target(tmp_path_factory.mktemp("answers"), prompts, 128, 64, 0)


def train(kind: str, data: Path, output: Path, *options: str) -> int:
    """Trains a head, an EAGLE-3 head with a draft vocabulary of 64 tokens unless an option says otherwise."""
    size = ["--draft-vocab", "64"] if kind == "eagle3" else []
    return main(["head", str(TARGET), "--kind", kind, "--data", str(data), "-o", str(output), *QUICK, *size, *options])


def untrained(kind: str, data: Path, output: Path, *options: str) -> None:
    """Writes what training begins with, which the command refuses."""
    size = ["--draft-vocab", "64"] if kind == "eagle3" else []
    command = ["head", str(TARGET), "--kind", kind, "--data", str(data), "-o", str(output), *QUICK, *size, *options]
    args = _parser().parse_args([*command, "--steps", "0"])
    train_head(_from_arguments(TrainingJob, args), _from_arguments(TrainConfig, args))


def same_weights(a: Path, b: Path) -> bool:
    left, right = load_file(a / "model.safetensors"), load_file(b / "model.safetensors")
    return left.keys() == right.keys() and all(torch.equal(left[name], right[name]) for name in left)


def all_weights(folder: Path) -> torch.Tensor:
    """All that a head's folder holds, one after another."""
    weights = load_file(folder / "model.safetensors")
    return torch.cat([weights[name].flatten().double() for name in sorted(weights)])


def checkpoint_step(head: Path) -> int:
    """Step of the last checkpoint; 0 while there is none."""
    path = head / "training" / "checkpoint.safetensors"
    if not path.is_file():
        return 0
    with safe_open(path, framework="pt") as file:
        return int(json.loads(file.metadata()["training"])["step"])


def log_of(head: Path) -> list[dict[str, Any]]:
    lines = (head / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_files_are_closed_before_they_are_replaced_or_removed(answers: Path, tmp_path: Path) -> None:
    """Also the checkpoint from which a run is resumed, and the windows that it has read."""
    with watched(tmp_path):
        for more in (["--steps", "2"], ["--steps", "4", "--resume"]):
            assert train("eagle1", answers, tmp_path / "head", *more) == 0
    assert {path.name for path in (tmp_path / "head" / "training").iterdir()} == {"checkpoint.safetensors", "log.jsonl"}


def decoded_tau(head: Path, bundle: Path, prompts: list[list[int]], tokens: int) -> float:
    """Tokens per target pass of the exported pair on the reference prompts, greedily, with the default tree."""
    export(TARGET, head, bundle, Settings(certify=False))
    new = passes = 0
    with EagleModel.load(bundle, threads=1) as model:
        for prompt in prompts:
            stats = model.generate(prompt, tree="dynamic", max_new_tokens=tokens, ignore_eos=True).usage
            new, passes = new + stats.new_tokens, passes + stats.target_passes
    return new / passes


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_short_run_learns_to_draft(kind: str, answers: Path, tmp_path: Path, prompts: list[list[int]]) -> None:
    assert train(kind, answers, tmp_path / "head", "--steps", "40", "--eval-data", str(answers)) == 0
    assert decoded_tau(tmp_path / "head", tmp_path / "bundle", prompts[:3], 32) > 2.0
    rows = log_of(tmp_path / "head")
    steps = [row for row in rows if row["event"] == "step"]
    assert [row["step"] for row in steps] == [1, 20, 40]
    assert steps[-1]["loss"] < steps[0]["loss"]
    measured = rows[-1]
    assert measured["event"] == "eval"
    assert len(measured["n_alpha"]) == len(measured["overlap"]) == 7
    assert measured["tau"] > 1.2


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_given_head_is_trained_on(kind: str, answers: Path, tmp_path: Path) -> None:
    """--init starts from the published weights, maps and vocabulary, and the first step already knows what they do."""
    given = HEADS[kind]
    arguments = ["head", str(TARGET), "--kind", kind, "--data", str(answers), "--init", str(given), *QUICK]
    assert main([*arguments, "-o", str(tmp_path / "same"), "--steps", "0"]) == 0
    before, after = (open_pair(TARGET, folder).head for folder in (given, tmp_path / "same"))
    assert before is not None and after is not None
    assert (before.d2t is None) == (after.d2t is None)
    if before.d2t is not None and after.d2t is not None:
        assert torch.equal(before.d2t, after.d2t)
    for name, stored in after.checkpoint.tensors.items():
        assert torch.equal(
            stored.read().float(), before.checkpoint.tensors[name].read().to(stored.read().dtype).float()
        )
    assert main([*arguments, "-o", str(tmp_path / "more"), "--steps", "2", "--log-every", "1"]) == 0
    assert train(kind, answers, tmp_path / "new", "--steps", "2", "--log-every", "1") == 0
    first, untrained = (log_of(tmp_path / name)[1]["loss"] for name in ("more", "new"))
    assert first < untrained
    assert not same_weights(tmp_path / "same", tmp_path / "more")


@pytest.mark.parametrize("size", [40, 64])
def test_a_given_heads_vocabulary_is_chosen_anew_for_the_data(size: int, answers: Path, tmp_path: Path) -> None:
    """With --draft-vocab. Tokens that it knew keep their rows, others begin with the target's."""
    arguments = ["head", str(TARGET), "--kind", "eagle3", "--data", str(answers), "--init", str(HEADS["eagle3"])]
    arguments += [*QUICK, "--draft-vocab", str(size), "-o", str(tmp_path / "anew"), "--steps", "0"]
    assert main(arguments) == 0
    before, after = (open_pair(TARGET, folder).head for folder in (HEADS["eagle3"], tmp_path / "anew"))
    assert before is not None and after is not None
    old, new = vocabulary_of(before), vocabulary_of(after)
    assert old is not None and new is not None and new.ids.tolist() != old.ids.tolist()
    target = FrozenTarget(TARGET, torch.device("cpu")).model.lm_head.weight
    stored = after.checkpoint.tensors["lm_head.weight"].read()
    given = dict(zip(old.ids.tolist(), before.checkpoint.tensors["lm_head.weight"].read(), strict=True))
    assert len(stored) == size and new.member.sum() == size
    for row, token in zip(stored, new.ids.tolist(), strict=True):
        assert torch.equal(row, given.get(token, target[token]).to(row))


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_two_minutes_double_the_tokens_per_pass(kind: str, tmp_path: Path, prompts: list[list[int]]) -> None:
    data = answers_of_the_target(tmp_path, prompts, 1024, 200, 1)
    longer = ["--seq-len", "96", "--batch-size", "16"]
    untrained(kind, data, tmp_path / "new")
    assert train(kind, data, tmp_path / "head", "--minutes", "2", *longer) == 0
    assert decoded_tau(tmp_path / "new", tmp_path / "bundle_new", prompts, 64) < 1.3
    assert decoded_tau(tmp_path / "head", tmp_path / "bundle", prompts, 64) > 2.0


@pytest.mark.slow
def test_two_processes_share_the_work(answers: Path, tmp_path: Path) -> None:
    """Neighbouring parts of one batch and averaged gradients: as one process with the whole batch, up to rounding,
    where all parts hold as many rows that count."""
    ids = [i for line in answers.read_text(encoding="utf-8").splitlines() for i in json.loads(line)["ids"]]
    data = tmp_path / "even.jsonl"
    rows = [json.dumps({"ids": ids[first : first + 48]}) for first in range(0, len(ids) - 48, 48)]
    data.write_text("\n".join(rows), encoding="utf-8")
    options = [*QUICK, "--ttt-steps", "2", "--steps", "8", "--draft-vocab", "256"]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "-m", "eagle_train.cli"]
    arguments = ["head", str(TARGET), "--kind", "eagle3", "--data", str(data), "-o", str(tmp_path / "two"), *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([*launcher, *arguments, "--batch-size", "4"], env=environment, check=True)
    assert train("eagle3", data, tmp_path / "one", *options, "--batch-size", "8") == 0
    untrained("eagle3", data, tmp_path / "new", *options)
    two, one, new = (all_weights(tmp_path / name) for name in ("two", "one", "new"))
    assert (two - one).norm() < 0.02 * (one - new).norm()
    with safe_open(tmp_path / "two" / "training" / "checkpoint.safetensors", framework="pt") as file:
        assert json.loads(file.metadata()["training"])["run"]["processes"] == 2


def test_a_killed_run_goes_on_to_the_same_bits(answers: Path, tmp_path: Path) -> None:
    options = ["--steps", "60", "--save-every", "4"]
    assert train("eagle1", answers, tmp_path / "whole", *options) == 0
    killed = tmp_path / "killed"
    command = ["head", str(TARGET), "--kind", "eagle1", "--data", str(answers), "-o", str(killed), *QUICK, *options]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-m", "eagle_train.cli", *command], env=environment)
    while checkpoint_step(killed) < 8 and process.poll() is None:
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -9  # it had not ended by itself
    assert 8 <= checkpoint_step(killed) < 60
    assert not (killed / "model.safetensors").exists()
    assert train("eagle1", answers, killed, *options, "--resume") == 0
    assert same_weights(tmp_path / "whole", killed)
    losses = [{row["step"]: row["loss"] for row in log_of(f) if "loss" in row} for f in (tmp_path / "whole", killed)]
    assert losses[0] == losses[1]


def test_an_interrupted_eagle3_run_goes_on_to_the_same_bits(answers: Path, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    config = TrainConfig(
        "eagle3", steps=12, batch_size=4, seq_len=32, ttt_steps=3, draft_vocab=64, save_every=5, ttt_share=0.5
    )

    def run(output: Path, clock: Callable[[], float] = time.monotonic, resume: bool = False) -> None:
        train_head(TrainingJob(TARGET, (answers,), output, device="cpu", resume=resume), config, clock)

    ticks = iter(range(8))

    def interrupted() -> float:
        if (tick := next(ticks, None)) is None:
            raise KeyboardInterrupt
        return float(tick)

    run(tmp_path / "whole")
    with pytest.raises(KeyboardInterrupt):
        run(tmp_path / "parts", interrupted)
    assert checkpoint_step(tmp_path / "parts") == 5
    run(tmp_path / "parts", resume=True)
    assert same_weights(tmp_path / "whole", tmp_path / "parts")


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_acceptance_on_held_out_text_is_followed(kind: str, answers: Path, tmp_path: Path) -> None:
    """At every --eval-every steps and at the end, from the cache where there is one."""
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(answers.read_text(encoding="utf-8").splitlines()[:12]), encoding="utf-8")
    options = ["--steps", "5", "--eval-data", str(few), "--eval-every", "2", "--cache", str(tmp_path / "cache")]
    assert train(kind, few, tmp_path / "head", *options) == 0
    measured = [row for row in log_of(tmp_path / "head") if row["event"] == "eval"]
    assert [row["step"] for row in measured] == [2, 4, 5]
    assert all(len(row["n_alpha"]) == len(row["overlap"]) == 7 and row["tau"] >= 1 for row in measured)
    assert measured[0]["overlap"] != measured[-1]["overlap"]


def test_a_run_that_broke_off_before_its_first_checkpoint_starts_again(answers: Path, tmp_path: Path) -> None:
    options = ["--steps", "2"]
    assert train("eagle1", answers, tmp_path / "whole", *options) == 0
    for name, more in (("resumed", ["--resume"]), ("fresh", [])):
        (tmp_path / name / "training" / "data").mkdir(parents=True)
        (tmp_path / name / "training" / "data" / "ids.bin").write_bytes(b"half")
        assert train("eagle1", answers, tmp_path / name, *options, *more) == 0
        assert same_weights(tmp_path / "whole", tmp_path / name)


def test_a_full_disk_leaves_the_last_checkpoint(
    answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    head = tmp_path / "head"
    assert train("eagle1", answers, head, "--steps", "4") == 0
    before = (head / "training" / "checkpoint.safetensors").read_bytes()
    capsys.readouterr()
    with largest_file(len(before) // 2):
        status = train("eagle1", answers, head, "--steps", "8", "--resume")
    assert status == 2
    last = capsys.readouterr().err.splitlines()[-1]
    assert "checkpoint.safetensors could not be written" in last and "resume" in last
    assert (head / "training" / "checkpoint.safetensors").read_bytes() == before
    assert not list(head.rglob("*.new"))
    assert train("eagle1", answers, head, "--steps", "8", "--resume") == 0
    assert checkpoint_step(head) == 8


def test_weights_that_are_not_finite_leave_the_last_checkpoint(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The loss of the step that makes them so is a number still."""
    head = tmp_path / "head"
    assert train("eagle1", answers, head, "--steps", "2") == 0
    before = (head / "training" / "checkpoint.safetensors").read_bytes()

    def infinite(parameters: Iterable[torch.Tensor], limit: float) -> None:
        for parameter in parameters:
            assert parameter.grad is not None
            parameter.grad.fill_(torch.nan)

    monkeypatch.setattr(torch.nn.utils, "clip_grad_norm_", infinite)
    assert train("eagle1", answers, head, "--steps", "3", "--resume") == 2
    assert "weights are not finite after step 3" in capsys.readouterr().err.splitlines()[-1]
    assert (head / "training" / "checkpoint.safetensors").read_bytes() == before


def test_cached_features_give_the_same_head_and_are_never_stale(
    answers: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "has_bf16", lambda device: False)  # bfloat16 makes five times the difference of fp16
    few = tmp_path / "few.jsonl"
    few.write_text("\n".join(answers.read_text(encoding="utf-8").splitlines()[:24]), encoding="utf-8")
    cache = tmp_path / "cache"
    options = ["--steps", "3", "--ttt-steps", "2"]
    assert train("eagle3", few, tmp_path / "online", *options) == 0
    assert train("eagle3", few, tmp_path / "filled", *options, "--cache", str(cache)) == 0
    (folder,) = cache.iterdir()
    written = {path: path.stat().st_mtime_ns for path in folder.iterdir()}
    assert train("eagle3", few, tmp_path / "read", *options, "--cache", str(cache)) == 0
    assert {path: path.stat().st_mtime_ns for path in folder.iterdir()} == written
    assert same_weights(tmp_path / "filled", tmp_path / "read")
    untrained("eagle3", few, tmp_path / "new")
    online, cached, new = (all_weights(tmp_path / name) for name in ("online", "read", "new"))
    assert (online - cached).norm() < 0.02 * (online - new).norm()  # fp16, through AdamW's first steps

    more = tmp_path / "more.jsonl"
    more.write_text(few.read_text(encoding="utf-8") + '\n{"ids": [80, 81, 82, 83]}\n', encoding="utf-8")
    assert train("eagle3", more, tmp_path / "other_data", *options, "--cache", str(cache)) == 0
    assert len(list(cache.iterdir())) == 2
    changed = shutil.copytree(TARGET, tmp_path / "target")
    config = json.loads((changed / "config.json").read_text(encoding="utf-8")) | {"rms_norm_eps": 1e-4}
    (changed / "config.json").write_text(json.dumps(config), encoding="utf-8")
    other = ["head", str(changed), "--kind", "eagle3", "--data", str(few), "-o", str(tmp_path / "other_target")]
    assert main([*other, *QUICK, "--draft-vocab", "64", *options, "--cache", str(cache)]) == 0
    assert len(list(cache.iterdir())) == 3


def test_heads_have_the_published_format(answers: Path, tmp_path: Path) -> None:
    for kind, reference in (("eagle1", "head_eagle1"), ("eagle3", "head_eagle3_dv44")):
        size = ["--draft-vocab", "44"] if kind == "eagle3" else []
        untrained(kind, answers, tmp_path / kind, *size)
        ours, theirs = (load_file(path / "model.safetensors") for path in (tmp_path / kind, GOLDEN / reference))
        # The reference EAGLE-1 head carries a bias and a copy of the target's embedding; both are optional.
        wanted = {name: value for name, value in theirs.items() if name not in ("fc.bias", "embed_tokens.weight")}
        assert {name: (value.shape, value.dtype) for name, value in ours.items()} == {
            name: (value.shape, value.dtype) for name, value in wanted.items()
        }
        texts = ((path / "config.json").read_text(encoding="utf-8") for path in (tmp_path / kind, GOLDEN / reference))
        config, known = map(json.loads, texts)
        differing = {key for key in known if config.get(key) != known[key]}
        assert differing <= {"bias"}
        pair = open_pair(TARGET, tmp_path / kind)
        assert pair.head is not None and pair.head.config.kind == kind
        assert not pair.head.own_embedding


def test_ablated_inputs(answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for inputs, cut in (("feature", slice(0, 64)), ("token", slice(64, 128))):
        assert train("eagle1", answers, tmp_path / inputs, "--steps", "3", "--inputs", inputs) == 0
        weight = load_file(tmp_path / inputs / "model.safetensors")["fc.weight"]
        assert not weight[:, cut].any()
        assert weight.any()
    unshifted = tmp_path / "unshifted"
    options = ["--steps", "2", "--inputs", "feature+unshifted", "--eval-data", str(answers)]
    assert train("eagle1", answers, unshifted, *options) == 0
    assert not (unshifted / "model.safetensors").exists()
    assert log_of(unshifted)[-1]["event"] == "eval"
    assert train("eagle3", answers, tmp_path / "e3", "--steps", "1", "--inputs", "token") == 2
    assert "eagle1" in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize("kind", ["eagle1", "medusa", "hydra"])
def test_only_heads_with_an_lm_head_of_their_own_take_a_draft_vocabulary(
    kind: str, answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert train(kind, answers, tmp_path / "new", "--steps", "1", "--draft-vocab", "64") == 2
    says = f"draft_vocab is for EAGLE-3 and block heads; a head of kind {kind} has the target's vocabulary"
    assert says in capsys.readouterr().err and not (tmp_path / "new").exists()


def six_layers(folder: Path) -> Path:
    """The golden target without its last two layers."""
    shutil.copytree(TARGET, folder)
    config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | {"num_hidden_layers": 6}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    weights = read_tensors(folder / "model.safetensors")
    kept = {name: w for name, w in weights.items() if ".layers.6." not in name and ".layers.7." not in name}
    save_file(kept, folder / "model.safetensors", {"format": "pt"})
    (folder / "model.safetensors.index.json").unlink()
    return folder


def test_what_is_refused(answers: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def refused(*arguments: str) -> str:
        capsys.readouterr()
        assert main(["head", *QUICK, *arguments]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("eagle-train: ")
        return line

    new, data = str(tmp_path / "new"), ["--data", str(answers)]
    one = ["--steps", "1"]
    both = [str(TARGET), "--kind", "eagle1"]
    assert "steps or minutes" in refused(*both, *data, "-o", new)
    init = ["--init", str(HEADS["eagle3"]), *data, "-o", new, *one]
    assert "has a head of kind eagle3, not eagle1" in refused(*both, *init)
    assert "is not a folder" in refused(*both, "--init", str(tmp_path / "nowhere"), *data, "-o", new, *one)
    torn = tmp_path / "torn"
    shutil.copytree(HEADS["eagle1"], torn)
    kept = read_tensors(torn / "model.safetensors")
    save_file({n: w for n, w in kept.items() if "up_proj" not in n}, torn / "model.safetensors", {"format": "pt"})
    assert "up_proj" in refused(*both, "--init", str(torn), *data, "-o", new, *one)
    assert not Path(new).exists()
    assert "7 or more" in refused(str(six_layers(tmp_path / "six")), "--kind", "eagle3", *data, "-o", new, *one)
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"\x89PNG\r\n\xff")
    assert "is not UTF-8 text" in refused(*both, "--data", str(binary), "-o", new, *one)
    empty = tmp_path / "empty.jsonl"
    empty.write_text("", encoding="utf-8")
    assert "nothing to learn from" in refused(*both, "--data", str(empty), "-o", new, *one)
    assert "would stay untrained; give 1 or more" in refused(*both, *data, "-o", new, "--steps", "0")
    assert not Path(new).exists()  # a refused run leaves no files
    long = tmp_path / "long.jsonl"
    long.write_text(json.dumps({"ids": [70] * 3000}), encoding="utf-8")
    assert "the context of" in refused(*both, "--data", str(long), "-o", new, *one, "--seq-len", "4096")
    assert "nothing to resume" in refused(*both, *data, "-o", new, *one, "--resume")
    assert "does not exist" in refused(*both, *data, "-o", str(tmp_path / "no" / "head"), *one)
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "thesis.txt").write_text("words", encoding="utf-8")
    assert "is not empty" in refused(*both, *data, "-o", str(tmp_path / "full"), *one)
    for name in ("training/data/thesis.txt", "training/notes.txt"):  # where a run deletes and writes over its own files
        mine = tmp_path / "mine" / name
        mine.parent.mkdir(parents=True)
        mine.write_text("words", encoding="utf-8")
        assert f"{mine} is not a file of a training run" in refused(*both, *data, "-o", str(tmp_path / "mine"), *one)
        assert mine.read_text(encoding="utf-8") == "words"
        shutil.rmtree(tmp_path / "mine")
    with claimed(Path(new)):
        assert f"{new} is being written by another process" in refused(*both, *data, "-o", new, *one)
    assert "is not a folder" in refused(str(tmp_path / "nowhere"), "--kind", "eagle1", *data, "-o", new, *one)
    assert train("eagle1", answers, Path(new), "--steps", "2") == 0
    assert "resume it" in refused(*both, *data, "-o", new, "--steps", "4")
    assert "another lr (left out, now 0.1)" in refused(
        *both, *data, "-o", new, "--steps", "4", "--resume", "--lr", "0.1"
    )
    fewer = tmp_path / "fewer.jsonl"
    fewer.write_text(answers.read_text(encoding="utf-8").splitlines()[0], encoding="utf-8")
    assert "another data" in refused(*both, "--data", str(fewer), "-o", new, "--steps", "4", "--resume")
    (Path(new) / "training" / "checkpoint.safetensors").write_bytes(b"\0" * 100)
    assert "is not a checkpoint" in refused(*both, *data, "-o", new, "--steps", "4", "--resume")
