"""Training on an exported target: what is learned is what decoding hands to the head, and tuned heads fit it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import cast

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from conftest import GOLDEN, put_listed, put_tokenizer
from eagle_export.bundle import export
from eagle_export.graphs.pair import open_pair
from eagle_export.writing.settings import Settings
from eagle_runtime import Drafter, EagleModel, SamplingParams
from eagle_runtime.base.tree import Float, Tree, chain_of
from eagle_runtime.bundle.manifest import HeadKind
from eagle_runtime.core.accept import Step
from eagle_runtime.core.cache import NoRows
from eagle_runtime.core.decoding_state import DecodingState
from eagle_runtime.core.generate import generate
from eagle_runtime.core.head import ForgettingHead
from eagle_runtime.core.target import Features
from eagle_runtime.sampling.sampler import Sampler
from eagle_train.bundle_target import opened_target
from eagle_train.cli import main
from eagle_train.target import FrozenTarget
from insides import bundle_in
from systems import read_tensors

TARGET = GOLDEN / "target"
HEADS: dict[HeadKind, Path] = {"eagle1": GOLDEN / "head_eagle1", "eagle3": GOLDEN / "head_eagle3_dv44"}
QUICK = ["--threads", "1", "--backend", "cpu", "--batch-size", "4", "--seq-len", "48", "--log-every", "1"]


class Recorder:
    """Stands beside the head, and keeps the features that the head is given."""

    def __init__(self, capacity: int) -> None:
        self.cache = NoRows(capacity)
        self.features: list[Float] = []

    def note(self, features: Features) -> None:
        self.features.append(np.array(features, np.float32))

    def truncate(self, length: int) -> None:
        assert length == 0


class Repeating(Drafter):
    """Drafts the last token three times."""

    def grow(self, tokens: Sequence[int], max_nodes: int) -> Tree:
        return chain_of(tokens[-1], [tokens[-1]] * min(3, max_nodes - 1))

    def learn(self, step: Step) -> None:
        """Nothing depends on it."""


@pytest.fixture(scope="module")
def frozen() -> FrozenTarget:
    return FrozenTarget(TARGET, torch.device("cpu"))


def answers(tmp_path: Path, bundle: Path, prompts: list[list[int]], *options: str) -> Path:
    data, out = tmp_path / "prompts.jsonl", tmp_path / "answers.jsonl"
    out.unlink(missing_ok=True)  # of an earlier call
    data.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in prompts), encoding="utf-8")
    arguments = ["generate", str(TARGET), "--target-bundle", str(bundle), "--data", str(data), "-o", str(out)]
    assert main([*arguments, "--max-new-tokens", "24", "--threads", "1", *options]) == 0
    return out


def train(kind: HeadKind, bundle: Path, data: Path, output: Path, *options: str, target: Path = TARGET) -> int:
    arguments = ["head", str(target), "--kind", kind, "--target-bundle", str(bundle), "--data", str(data)]
    return main([*arguments, "-o", str(output), *QUICK, *options])


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
@pytest.mark.parametrize("precision", ["int8", "int4"])
def test_what_is_learned_is_what_decoding_gives_to_the_bit(
    kind: HeadKind, precision: str, bundle_of: Callable[..., Path], prompts: list[list[int]], frozen: FrozenTarget
) -> None:
    bundle, text = bundle_of(kind, precision), list(prompts[0])
    with EagleModel.load(bundle, threads=1) as model:
        recorder = Recorder(model.context)
        state = DecodingState(bundle_in(model).target, bundle_in(model).head, [cast(ForgettingHead, recorder)])
        sampler = Sampler(SamplingParams(), text, model.manifest.target.vocab_size)
        for cycle in generate(state, Repeating(), sampler, list(text)):
            text += cycle.step.tokens.tolist()
            if len(text) >= len(prompts[0]) + 70:
                break
        logits = np.concatenate(list(model.score(text)))
    decoded = np.concatenate(recorder.features)
    given = open_pair(TARGET, HEADS[kind]).head
    torch.set_num_threads(1)
    with opened_target(bundle, len(text)) as target:
        target.check_features(frozen, given)
        for _ in range(2):  # a second text is read as the first one was
            features, learned = target.read(text)
            assert np.array_equal(features[: len(decoded)], decoded)
            assert np.array_equal(learned, logits)
    assert len(decoded) >= len(text) - 4


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_a_head_tuned_on_an_int8_target(
    kind: HeadKind, bundle_of: Callable[..., Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    """From answers of the bundle to a bundle with the tuned head, whose target is the old one to the bit."""
    bundle = bundle_of(kind, "int8")
    data = answers(tmp_path, bundle, prompts)
    options = ["--init", str(HEADS[kind]), "--eval-data", str(data)]
    for name, steps in (("same", "0"), ("tuned", "3")):
        assert train(kind, bundle, data, tmp_path / name, *options, "--steps", steps) == 0
    same, tuned = (load_file(tmp_path / name / "model.safetensors") for name in ("same", "tuned"))
    assert same.keys() == tuned.keys()
    changed = {name for name in same if not torch.equal(same[name], tuned[name])}
    assert changed == set(same) - {"d2t", "t2d"} - ({"fc.weight"} if kind == "eagle3" else set())
    lines = (tmp_path / "tuned" / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()
    assert [json.loads(line)["event"] for line in lines] == ["start", "step", "step", "step", "eval"]
    export(TARGET, tmp_path / "tuned", tmp_path / "bundle", Settings(precision="int8", certify=False))
    for file in ("target/model.onnx", "target/model.onnx.data"):
        assert (tmp_path / "bundle" / file).read_bytes() == (bundle / file).read_bytes()
    with EagleModel.load(tmp_path / "bundle", threads=1) as model:
        drafted, plain = (
            model.generate(prompts[0], method=method, max_new_tokens=24).token_ids for method in ("eagle", "vanilla")
        )
    assert drafted == plain


def test_answers_are_the_bundles_own(bundle_of: Callable[..., Path], prompts: list[list[int]], tmp_path: Path) -> None:
    bundle = bundle_of("eagle1", "int4")
    rows = [
        json.loads(line) for line in answers(tmp_path, bundle, prompts[:2]).read_text(encoding="utf-8").splitlines()
    ]
    sampled = (
        answers(tmp_path, bundle, prompts[:1] * 2, "--temperature", "3", "--seed", "5")
        .read_text(encoding="utf-8")
        .splitlines()
    )
    with EagleModel.load(bundle, threads=1) as model:
        for row, prompt in zip(rows, prompts, strict=False):
            plain = model.generate(prompt, method="vanilla", max_new_tokens=24)
            assert row == {"ids": [*prompt, *plain.token_ids], "prompt_tokens": len(prompt)}
    assert len(set(sampled)) == 2  # each answer has random numbers of its own


def test_what_is_refused(bundle_of: Callable[..., Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"ids": [80, 81, 82, 83]}\n', encoding="utf-8")
    new, init = tmp_path / "new", str(HEADS["eagle3"])

    def refused(kind: HeadKind, bundle: Path, *options: str, target: Path = TARGET) -> str:
        capsys.readouterr()
        assert train(kind, bundle, data, new, "--steps", "1", *options, target=target) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert line.startswith("eagle-train: ")
        assert not new.exists()
        return line

    one, three, alone = bundle_of("eagle1"), bundle_of("eagle3"), bundle_of("alone")
    assert "is not a folder" in refused("eagle1", tmp_path / "nowhere")
    assert "no eagle1 head reads" in refused("eagle1", three)
    assert "has no eagle3 head" in refused("eagle3", one, "--init", init)
    assert "has no eagle3 head" in refused("eagle3", alone, "--init", init)
    assert "as --init" in refused("eagle3", three)
    assert "leave it out" in refused("eagle1", one, "--cache", str(tmp_path / "cache"))
    assert "give a smaller seq_len" in refused("eagle1", one, "--seq-len", "100000")
    assert "has a hidden size of 64, but" in refused("eagle1", one, target=changed(tmp_path / "wide", hidden_size=32))
    assert "has a vocabulary of 256, but" in refused("eagle1", one, target=changed(tmp_path / "words", vocab_size=255))
    assert "number of layers" in refused("eagle1", one, target=changed(tmp_path / "deep", num_hidden_layers=7))
    other_text = shutil.copytree(one, tmp_path / "other_text")
    put_tokenizer(other_text)
    assert not (TARGET / "tokenizer.json").exists()  # nothing to compare with
    with_text = changed(tmp_path / "with_text")
    (with_text / "tokenizer.json").write_text("{}", encoding="utf-8")
    assert "another tokenizer.json" in refused("eagle1", other_text, target=with_text)

    broken = shutil.copytree(one, tmp_path / "broken")
    put_listed(broken, "target/model.onnx", b"no graph")
    assert "broken" in refused("eagle1", broken)
    trained_apart = changed(tmp_path / "trained_apart")
    weights = read_tensors(trained_apart / "model.safetensors")
    weights["model.norm.weight"] = weights["model.norm.weight"] * torch.tensor([1.0, -1.0] * 32)
    save_file(weights, trained_apart / "model.safetensors", {"format": "pt"})
    assert "are not those of" in refused("eagle1", one, target=trained_apart)
    other_fc = shutil.copytree(HEADS["eagle3"], tmp_path / "other_fc")
    tensors = read_tensors(other_fc / "model.safetensors")
    tensors["fc.weight"] = tensors["fc.weight"].roll(1, 0)
    save_file(tensors, other_fc / "model.safetensors", {"format": "pt"})
    assert "with the fc of" in refused("eagle3", three, "--init", str(other_fc))
    other_taps = shutil.copytree(three, tmp_path / "other_taps")
    manifest = json.loads((other_taps / "eagle_config.json").read_text(encoding="utf-8"))
    manifest["head"]["taps"] = [1, 2, 3]
    (other_taps / "eagle_config.json").write_text(json.dumps(manifest), encoding="utf-8")
    assert "reads the taps [1, 2, 3]" in refused("eagle3", other_taps, "--init", init)


def changed(folder: Path, **config: int) -> Path:
    """A copy of the golden target with other entries in its config."""
    shutil.copytree(TARGET, folder)
    stored = json.loads((folder / "config.json").read_text(encoding="utf-8")) | config
    (folder / "config.json").write_text(json.dumps(stored), encoding="utf-8")
    return folder
