"""Heads are measured on held-out text as it is decoded: by the target's own precision, on all files that were given."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from conftest import GOLDEN
from eagle_train import precision
from eagle_train.batches import OnlineTeacher
from eagle_train.cli import main
from eagle_train.config import TrainConfig
from eagle_train.data import Example, Windows, write_windows
from eagle_train.examine import EVAL_WINDOWS, examine
from eagle_train.head import new_head, shape_of
from eagle_train.objective import measure
from eagle_train.target import FrozenTarget
from eagle_train.taught import Batch, LmHead, StateLogits, Taught, likeliest

CPU = torch.device("cpu")


class Watched(OnlineTeacher):
    """Keeps which windows were asked for, and whether products were halved meanwhile."""

    def __init__(self, target: FrozenTarget, taps: tuple[int, ...]) -> None:
        super().__init__(target, taps)
        self.seen: list[int] = []
        self.halved = False

    def teach(self, windows: Windows, indices: Sequence[int], batch: Batch) -> Taught:
        self.seen += indices
        self.halved = self.halved or torch.is_autocast_enabled("cpu")
        return super().teach(windows, indices, batch)


@pytest.mark.parametrize(("count", "seen"), [(3, [0, 1, 2]), (2 * EVAL_WINDOWS, None)])
def test_windows_of_all_files_are_measured_in_the_targets_precision(
    count: int, seen: list[int] | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(precision, "has_bf16", lambda device: True)
    draw = np.random.default_rng(0)
    texts = [draw.integers(3, 256, 5).tolist() for _ in range(count)]
    windows = write_windows([Example(ids, [True] * 5) for ids in texts], tmp_path, 8, "texts")
    config, target = TrainConfig("eagle1", steps=1, ttt_steps=1), FrozenTarget(GOLDEN / "target", CPU)
    shape = shape_of(config, target, target.vocab_size)
    head, teacher, halved = new_head(shape, target, None, config.inputs, 0), Watched(target, ()), []

    def watched(*arguments: Any) -> None:
        halved.append(torch.is_autocast_enabled("cpu"))
        measure(*arguments)

    monkeypatch.setattr("eagle_train.examine.measure", watched)
    examine(head, shape, windows, teacher, lambda taught: taught, None, config, CPU)
    assert not teacher.halved and all(halved)
    assert len(teacher.seen) == len(halved) == min(count, EVAL_WINDOWS)
    assert teacher.seen == (seen or sorted({*teacher.seen})) and teacher.seen[-1] == count - 1


def test_what_the_target_says_is_not_rounded_where_a_head_computes_in_bfloat16() -> None:
    torch.manual_seed(0)
    states, lm_head, rows = torch.randn(1, 5, 16), LmHead(torch.randn(40, 16)), torch.arange(5)
    said = StateLogits(states, lm_head, *likeliest(states, lm_head, torch.ones(1, 5, dtype=torch.bool)))
    with torch.autocast("cpu", torch.bfloat16):
        inside = said.logits(rows, None)
    assert torch.equal(inside, said.logits(rows, None))


def test_held_out_text_that_is_trained_on_is_reported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = [json.dumps({"ids": [70 + number, 80, 90, 100]}) for number in range(5)]
    for name, some in (("data", rows[:4]), ("other", rows[4:]), ("mixed", rows[3:])):
        (tmp_path / f"{name}.jsonl").write_text("\n".join(some), encoding="utf-8")
    command = [
        "head",
        str(GOLDEN / "target"),
        "--kind",
        "eagle1",
        "--data",
        str(tmp_path / "data.jsonl"),
        "--steps",
        "1",
    ]
    command += ["--threads", "1", "--backend", "cpu"]
    for name, says in (("mixed", True), ("other", False)):
        held_out = ["--eval-data", str(tmp_path / f"{name}.jsonl")]
        assert main([*command, *held_out, "-o", str(tmp_path / f"head_{name}")]) == 0
        assert ("1 held-out windows are training text too" in capsys.readouterr().err) == says
