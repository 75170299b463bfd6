"""Targets of every family: what heads learn from is what transformers computes, and what they learn is what exported
graphs ask of them."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from conftest import GOLDEN
from eagle_export.bundle import export
from eagle_export.heads.block import BlockHead
from eagle_export.heads.eagle1 import Eagle1Head
from eagle_export.heads.eagle3 import Eagle3Head
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import HeadKind
from eagle_train.ahead import new_heads
from eagle_train.answering import AnswerSampler, Request, TargetSampler
from eagle_train.bundle_target import opened_target
from eagle_train.cli import main
from eagle_train.config import Sampling, TrainConfig
from eagle_train.decoder import Decoder
from eagle_train.graphed import GraphedSampler
from eagle_train.head import new_head, read_head, shape_of
from eagle_train.padded import PaddedSampler
from eagle_train.sampling import choose
from eagle_train.target import FrozenTarget
from eagle_train.ttt import unroll
from insides import bundle_in
from listed_requests import Listed
from systems import read_tensors
from tiny_families import CONTEXT, LAYERS, ROWS, VOCAB, Row, save_source, source_of

CPU = torch.device("cpu")
QUICK = ["--threads", "1", "--backend", "cpu", "--batch-size", "4", "--steps", "2"]


def deep(row: Row) -> Row:
    """With twice the layers: EAGLE-3's and block heads' taps need seven."""
    kinds = row.config.get("layer_types")
    repeated = {"layer_types": 2 * kinds} if kinds else {}
    return replace(row, config={**row.config, **repeated, "num_hidden_layers": 2 * LAYERS})


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """row -> checkpoint of its deep model."""
    base = tmp_path_factory.mktemp("families")

    @cache
    def folder_of(name: str) -> Path:
        folder = base / str(list(ROWS).index(name))
        save_source(deep(ROWS[name]), folder)
        return folder

    return folder_of


@pytest.fixture(scope="module")
def targets(folders: Callable[[str], Path]) -> Callable[[str], FrozenTarget]:
    return cache(lambda name: FrozenTarget(folders(name), CPU))


def texts(count: int, length: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(4).integers(0, VOCAB, (count, length)))


@pytest.mark.parametrize("name", ROWS)
def test_states_and_logits_are_those_of_transformers(name: str, targets: Callable[[str], FrozenTarget]) -> None:
    """And heads of all kinds have a shape and a beginning; Medusa's propose what the target does now, unless that is
    bounded."""
    target, ids, taps = targets(name), texts(2, 40), (1, 3, 6)
    with torch.no_grad():
        out = source_of(deep(ROWS[name]))(ids, output_hidden_states=True)
    states = target.states(ids, taps)
    torch.testing.assert_close(states.last, out.hidden_states[-1])
    torch.testing.assert_close(states.taps, torch.cat([out.hidden_states[tap] for tap in taps], -1))
    torch.testing.assert_close(target.logits(states.last), out.logits)
    for kind in ("eagle1", "eagle3", "block"):
        config = TrainConfig(kind, steps=1)
        new_head(shape_of(config, target, VOCAB), target, None, config.inputs, 0)
    medusa = new_heads(shape_of(TrainConfig("medusa", steps=1, heads=1), target, VOCAB), target)
    if getattr(target.config, "final_logit_softcapping", None) is None:
        torch.testing.assert_close(medusa.forced(0, states.last, ids).detach(), out.logits[:, :-1])


def trained(name: str, kind: HeadKind, folders: Callable[[str], Path], folder: Path, *options: str) -> Path:
    """A head of a few steps, which has left its first weights."""
    data = folder / "texts.jsonl"
    data.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in texts(4, 24).tolist()))
    command = ["block"] if kind == "block" else ["head", "--kind", kind]
    command[1:1] = [str(folders(name))]
    assert main([*command, "--data", str(data), "-o", str(folder / "head"), *QUICK, "--lr", "0.01", *options]) == 0
    return folder / "head"


# A bound of logits; multipliers; two rotations, norms around attention and MLP; biases; fused matrices; convolutions;
# states; experts; layers that read others' keys.
EXPORTED: tuple[tuple[str, HeadKind], ...] = (
    ("Gemma-2", "eagle1"),
    ("Granite", "eagle1"),
    ("Gemma-3", "eagle3"),
    ("LFM2", "eagle3"),
    ("Qwen3.5", "eagle3"),
    ("Gemma-3", "block"),
    ("Qwen2.5, tied, upper layers with a window", "eagle3"),
    ("Phi-3, with a window", "eagle1"),
    ("Qwen3-MoE, one layer without experts", "eagle3"),
    ("Gemma-4, with layers that use others' keys", "eagle3"),
)


@pytest.mark.parametrize(("name", "kind"), EXPORTED)
def test_an_exported_head_proposes_what_training_taught(
    name: str,
    kind: HeadKind,
    folders: Callable[[str], Path],
    targets: Callable[[str], FrozenTarget],
    tmp_path: Path,
) -> None:
    """From the features that the exported target gives, which are those of training."""
    folder, target, ids = trained(name, kind, folders, tmp_path), targets(name), texts(1, 30)
    export(folders(name), folder, tmp_path / "bundle", Settings(certify=False))
    config = TrainConfig(kind, steps=1)
    given = read_head(folder, target, config)
    head = new_head(given.config, target, None, config.inputs, 0, given)
    states = target.states(ids, given.config.taps)
    with torch.no_grad():
        if isinstance(head, BlockHead):
            taps = states.features.chunk(len(given.config.taps), -1)
            features = head.features(taps, states.last, torch.arange(30)[None])
        else:
            features = head.fc(states.features) if isinstance(head, Eagle3Head) else states.features
    with opened_target(tmp_path / "bundle", 64) as bundle:
        theirs, logits = bundle.read(ids[0].tolist())
    np.testing.assert_allclose(theirs, features[0], atol=1e-4)
    np.testing.assert_allclose(logits, target.logits(states.last)[0], atol=1e-4)
    if not isinstance(head, Eagle1Head | Eagle3Head):
        return
    with torch.no_grad():
        (hidden,) = unroll(head, given.config, features, ids, 1)
        wanted = head.logits(hidden[0, -1]).log_softmax(-1)
    with EagleModel.load(tmp_path / "bundle", threads=1) as model:
        own = bundle_in(model).head
        assert own is not None
        own.note(theirs[:-1])
        proposal = own.catch_up(ids[0].tolist())
    assert proposal.tokens[0].tolist() == wanted.topk(own.top_k)[1].tolist()
    np.testing.assert_allclose(proposal.log_probs[0], wanted.topk(own.top_k)[0], atol=1e-4)


# Whose caches differ: windows, convolutions, states, others' keys, sinks, a rotation by length, experts.
ANSWERING: dict[str, Row] = {
    **{
        name: ROWS[name]
        for name in (
            "Gemma-3",
            "Gemma-4, with layers that use others' keys",
            "LFM2",
            "LFM2, with biases and wide convolutions",
            "Qwen3.5",
            "gpt-oss",
            "Phi-4-mini",
            "Mixtral",
            "MiMo-7B",
            "Qwen3",
            "Seed-OSS",
        )
    },
    "Mistral, without a window": Row("mistral", {"sliding_window": None, "head_dim": 16}),
}
OWN_PASS = ("MiMo-7B", "Qwen3", "Seed-OSS", "Mistral, without a window")


@pytest.mark.parametrize("name", ANSWERING)
def test_answers_are_those_of_the_targets_own_logits(name: str, tmp_path: Path) -> None:
    """In rows of unequal length, of which some end before the others."""
    save_source(ANSWERING[name], tmp_path / "source")
    target = FrozenTarget(tmp_path / "source", CPU)
    assert Decoder.fits(target) is (name in OWN_PASS)
    requests = [
        Request(texts(1, length)[0].tolist(), number, Sampling(temperature=number % 2 * 0.8, max_new_tokens=limit))
        for number, (length, limit) in enumerate(((1, 20), (26, 3), (9, 30), (CONTEXT - 3, 9)))
    ]
    kinds: list[type[Any]] = [TargetSampler, GraphedSampler] if name in OWN_PASS else [PaddedSampler]
    for kind in kinds:
        sampler: AnswerSampler = kind(target, 3)
        ended = {request.number: tokens for request, tokens in sampler.answers(Listed(requests))}
        assert sorted(ended) == [0, 1, 2, 3]
        for request in requests:
            tokens, count = ended[request.number], len(request.ids)
            assert len(tokens) == min(request.sampling.max_new_tokens, CONTEXT - count)
            states = target.states(torch.tensor([[*request.ids, *tokens[:-1]]]), ())
            places = [(request.sampling, request.number, place) for place in range(len(tokens))]
            assert tokens == choose(target.logits(states.last)[0, count - 1 :], places)


def test_a_gguf_file_is_the_checkpoint_that_it_was_written_from(
    folders: Callable[[str], Path], targets: Callable[[str], FrozenTarget], tmp_path: Path
) -> None:
    pytest.importorskip("gguf")
    from gguf_writer import write_gguf

    write_gguf(folders("Qwen3"), tmp_path / "target.gguf")
    target, ids = FrozenTarget(tmp_path / "target.gguf", CPU), texts(1, 20)
    ours, theirs = (each.states(ids, (2, 4, 5)) for each in (target, targets("Qwen3")))
    torch.testing.assert_close(ours.features, theirs.features)
    assert target.head_config("eagle3", VOCAB) == targets("Qwen3").head_config("eagle3", VOCAB)
    assert target.fingerprint() != targets("Qwen3").fingerprint()


def test_text_is_read_by_the_tokenizer_of_a_gguf_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Answers, a head that learns from them, and its pair, as of the folder that the file was written from."""
    pytest.importorskip("gguf")
    from gguf_writer import write_gguf

    demo = Path(__file__).parents[2] / "tools" / "demo_pair" / "target"
    write_gguf(demo, tmp_path / "demo.gguf")
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text(json.dumps({"prompt": "def add(a, b):\n"}) + "\n")
    for target in (tmp_path / "demo.gguf", demo):
        answers, head = tmp_path / f"{target.name}.jsonl", tmp_path / f"{target.name}-head"
        command = ["generate", str(target), "--data", str(prompts), "-o", str(answers), "--max-new-tokens", "12"]
        assert main([*command, "--threads", "1", "--backend", "cpu"]) == 0
        command = ["head", str(target), "--kind", "eagle1", "--data", str(answers), "-o", str(head), *QUICK]
        assert main(command) == 0
    assert (tmp_path / "demo.gguf.jsonl").read_bytes() == (tmp_path / "target.jsonl").read_bytes()
    stored = [read_tensors(tmp_path / f"{name}-head" / "model.safetensors") for name in ("demo.gguf", "target")]
    for name, tensor in stored[1].items():
        torch.testing.assert_close(stored[0][name].to(tensor), tensor)


def test_what_is_refused(
    folders: Callable[[str], Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In one sentence, before any work."""
    data = tmp_path / "data.jsonl"
    data.write_text('{"ids": [1, 2, 3, 4]}\n')

    def refused(target: Path, *options: str) -> str:
        capsys.readouterr()
        command = ["head", str(target), "--kind", "eagle1", "--data", str(data), "-o", str(tmp_path / "new"), *QUICK]
        assert main([*command, *options]) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert not (tmp_path / "new").exists()
        return line

    other = shutil.copytree(folders("Granite"), tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"model_type": "gpt2"}))
    assert "model_type is 'gpt2', but only 'llama', 'mistral'" in refused(other)
    part = shutil.copytree(folders("Granite"), tmp_path / "part")
    weights = read_tensors(part / "model.safetensors")
    del weights["model.layers.3.mlp.up_proj.weight"]
    save_file(weights, part / "model.safetensors", {"format": "pt"})
    assert "'model.layers.3.mlp.up_proj.weight' is missing" in refused(part)
    assert "belong together" in refused(folders("Granite"), "--init", str(GOLDEN / "head_eagle1"))
    save_source(ROWS["Granite"], tmp_path / "shallow")
    assert "the target has 4 layers" in refused(tmp_path / "shallow", "--kind", "eagle3")
