"""The tool that tries a published model, on the small pair."""

from __future__ import annotations

import dataclasses
import json
import shutil
from pathlib import Path

import pytest

from eagle_runtime import EagleModel
from eagle_tools import tried, tried_worker

OPTIONS = ["--threads", "1", "--context", "512"]


def lines(served_bundle: Path, capsys: pytest.CaptureFixture[str], *options: str) -> list[str]:
    """What it prints of steps that succeed, without their seconds."""
    assert tried.main([str(served_bundle), *OPTIONS, *options]) == 0
    return [line for line in capsys.readouterr().out.splitlines() if not line.endswith(" s")]


def test_answers_are_compared_with_vanilla(served_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = lines(served_bundle, capsys, "--only", "conversation,template", "--tokens", "4")
    assert any("file of" in line and "the next turn is equal" in line for line in said)
    assert any("a tool's result" in line and "tools are not known" in line for line in said)


def test_a_model_that_samples_by_default_is_compared_too(
    served_bundle: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    bundle = shutil.copytree(served_bundle, tmp_path / "samples")
    manifest = json.loads((bundle / "eagle_config.json").read_text(encoding="utf-8"))
    manifest["sampling"]["temperature"] = 1.0
    (bundle / "eagle_config.json").write_text(json.dumps(manifest))
    lines(bundle, capsys, "--only", "conversation,template", "--tokens", "4")


def test_an_order_that_the_worker_refuses_fails(
    served_bundle: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tried_worker, "PATTERN", "(")
    assert tried.main([str(served_bundle), *OPTIONS, "--only", "worker", "--tokens", "4"]) == 2
    assert "FAILED: the worker refuses generate: " in capsys.readouterr().out


def test_an_answer_that_differs_fails(served_model: EagleModel) -> None:
    one = served_model.generate("def f(", max_new_tokens=8, ignore_eos=True)
    other = dataclasses.replace(one, token_ids=(*one.token_ids[:-1], one.token_ids[-1] ^ 1))
    with pytest.raises(tried.DiffersError, match=r"T = 0: .* instead of"):
        tried.compare(served_model, [1], one, other)
    assert tried.compare(served_model, [1], one, one)


@pytest.mark.slow
def test_all_steps(served_bundle: Path, capsys: pytest.CaptureFixture[str]) -> None:
    said = lines(served_bundle, capsys, "--only", "identity,constraints,long,worker")
    assert sum(": 6 answers equal, 0 ties" in line for line in said) == 6
    assert any("a longer one is refused" in line for line in said)
    assert any("loaded as resident" in line for line in said)
