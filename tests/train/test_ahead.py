"""Training Medusa's and Hydra's heads: it starts from the target, the loss falls, and the folder is the authors'."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from ahead_writers import Hydra, embedding_of, medusa
from conftest import GOLDEN, load_trace
from eagle_export.bundle import export
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from eagle_train.ahead import ahead_objective, ahead_shape, new_heads
from eagle_train.cli import main
from eagle_train.losses import soft_cross_entropy
from eagle_train.metrics import Tally
from eagle_train.target import FrozenTarget
from eagle_train.taught import Batch, Taught, WholeLogits

TARGET, KINDS = GOLDEN / "target", ("medusa", "hydra")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The reference texts."""
    file = tmp_path_factory.mktemp("texts") / "texts.jsonl"
    rows = load_trace("eagle2_tt16_d3_k4")["prompts"]
    file.write_text("".join(json.dumps({"ids": row["prompt_ids"] + row["first_64"]}) + "\n" for row in rows))
    return file


def train(kind: str, data: Path, output: Path, *options: str) -> int:
    quick = ["--threads", "1", "--backend", "cpu", "--seq-len", "48", "--heads", "3", "--log-every", "1"]
    return main(["head", str(TARGET), "--kind", kind, "--data", str(data), "-o", str(output), *quick, *options])


def losses(head: Path) -> list[float]:
    rows = [json.loads(line) for line in (head / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if row["event"] == "step"]


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_falls_and_the_heads_draft(tmp_path: Path, data: Path, kind: str) -> None:
    head = tmp_path / "head"
    assert train(kind, data, head, "--steps", "60", "--eval-data", str(data)) == 0
    seen = losses(head)
    assert np.mean(seen[-5:]) < 0.5 * np.mean(seen[:5])
    evaluation = json.loads((head / "training" / "log.jsonl").read_text(encoding="utf-8").splitlines()[-1])
    assert len(evaluation["accuracy"]) == 3
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    assert (config[f"{kind}_num_heads"], config[f"{kind}_num_layers"]) == (3, 1)
    assert set(load_file(head / f"{kind}_lm_head.safetensors")) == names_of(kind)
    bundle = export(TARGET, head, tmp_path / "bundle", Settings(certify=False, record=False)).bundle
    with EagleModel.load(bundle, threads=1) as model:
        prompt = load_trace("eagle2_tt16_d3_k4")["prompts"][0]["prompt_ids"]
        drafted = model.generate(prompt, tree="chain", total_token=4, max_new_tokens=32)
        assert drafted.token_ids == model.generate(prompt, method="vanilla", max_new_tokens=32).token_ids
        assert drafted.usage.tau > 1.1


def names_of(kind: str) -> set[str]:
    """Of the authors' module, without the embedding, which is the target's."""
    module: torch.nn.Module = medusa(64, 256, 3) if kind == "medusa" else Hydra(embedding_of(TARGET), 256, 3)
    return set(module.state_dict()) - {"input_embed_fn.weight"}


@pytest.mark.parametrize("kind", KINDS)
def test_training_goes_on_where_it_stopped(tmp_path: Path, data: Path, kind: str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    assert train(kind, data, whole, "--steps", "4") == 0
    assert train(kind, data, parts, "--steps", "4", "--save-every", "2") == 0
    checkpoint = parts / "training" / "checkpoint.safetensors"
    assert checkpoint.is_file()
    assert train(kind, data, parts, "--steps", "4", "--resume") == 0
    left, right = (load_file(folder / f"{kind}_lm_head.safetensors") for folder in (whole, parts))
    assert all(torch.equal(left[name], right[name]) for name in left)


def test_heads_beyond_all_windows_are_kept_by_a_checkpoint(tmp_path: Path) -> None:
    short = tmp_path / "short.jsonl"
    short.write_text("\n".join(json.dumps({"ids": [70 + number, 80, 90, 100]}) for number in range(16)))
    for more in (["--steps", "1"], ["--steps", "2", "--resume"]):
        assert train("medusa", short, tmp_path / "head", *more) == 0


@pytest.fixture(scope="module")
def target() -> FrozenTarget:
    return FrozenTarget(TARGET, torch.device("cpu"))


@pytest.mark.parametrize("kind", KINDS)
def test_untrained_heads_propose_what_the_target_does_now(target: FrozenTarget, kind: Any) -> None:
    heads = new_heads(ahead_shape(kind, 3, target), target)
    ids = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(4))
    states = target.states(ids, ())
    for depth in range(3):
        rows = ids.shape[1] - 1 - depth
        torch.testing.assert_close(
            heads.forced(depth, states.features, ids), target.logits(states.last)[:, :rows], atol=1e-4, rtol=1e-4
        )


@pytest.mark.parametrize("kind", KINDS)
def test_the_loss_is_the_papers(target: FrozenTarget, kind: Any) -> None:
    """Against a loop over rows: head d at row i learns token i + 2 + d where that carries loss."""
    heads = new_heads(ahead_shape(kind, 2, target), target)
    with torch.no_grad():
        for parameter in heads.heads.parameters():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(8)))
    random = torch.Generator().manual_seed(5)
    ids = torch.randint(256, (2, 8), generator=random)
    mask = torch.rand(2, 8, generator=random) < 0.7
    states = target.states(ids, ())
    target_logits = target.logits(states.last)
    taught = Taught(states.features, WholeLogits(target_logits))
    total, parts = ahead_objective(heads, Batch(ids, mask), taught, Tally(2, torch.device("cpu")))
    wanted = 0.0
    for depth in range(2):
        each = []
        for text in range(2):
            for row in range(8 - 2 - depth):
                if not mask[text, row + 2 + depth]:
                    continue
                path = ids[text, row + 1 : row + 2 + depth]
                logits = heads.logits(depth, states.features[text, row], path)
                teacher = target_logits[text, row + 1 + depth].softmax(-1)
                each.append(float(soft_cross_entropy(logits, teacher).detach()))
        assert float(parts[f"head{depth}"]) == pytest.approx(np.mean(each), rel=1e-4)
        wanted += 0.8**depth * float(np.mean(each))
    assert float(total) == pytest.approx(wanted, rel=1e-4)


def test_such_heads_start_untrained(tmp_path: Path, data: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert train("medusa", data, tmp_path / "head", "--steps", "1") == 0
    assert train("medusa", data, tmp_path / "next", "--steps", "1", "--init", str(tmp_path / "head")) == 2
    assert "holds Medusa heads, which start untrained" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        train("mtp", data, tmp_path / "other", "--steps", "1")
