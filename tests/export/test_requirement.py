"""The time that an export announces is that of pieces of its work on this machine."""

from __future__ import annotations

import errno
import json
from dataclasses import astuple
from pathlib import Path

import pytest

from conftest import GOLDEN
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.graphs.pair import open_pair
from eagle_export.recording import self_calibration
from eagle_export.recording.layered_recording import observe_layers
from eagle_export.recording.recording import Way
from eagle_export.recording.self_calibration import KEPT, observe_source
from eagle_export.writing import requirement
from eagle_export.writing.pace import Pace, measure
from eagle_runtime.text.tokenizer import Text
from tiny_families import ROWS, save_source


def test_the_announced_time_follows_what_was_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine with half the speed in everything, all parts of an export take twice as long."""
    pair = open_pair(GOLDEN / "target", None)
    monkeypatch.setattr(requirement, "SMALL", 0)

    def seconds(pace: Pace, *, way: Way | None, certify: bool) -> float:
        monkeypatch.setattr(requirement, "measure", lambda folder, bits: pace)
        place = tmp_path / "bundle"
        return requirement.requirement_of(
            pair, "cpu", {"target": "int4"}, way, place, calibrated=False, certify=certify
        ).seconds

    fast, slow = Pace(1e10, 1e9, 1e9, 1e-8, 1e-7), Pace(5e9, 5e8, 5e8, 2e-8, 2e-7)
    ways: tuple[Way | None, ...] = ("whole", "layers", None)
    for way in ways:
        for certify in (True, False):
            once = seconds(fast, way=way, certify=certify)
            assert seconds(slow, way=way, certify=certify) == pytest.approx(2 * once)
    assert seconds(fast, way="whole", certify=True) > seconds(fast, way="layers", certify=True)
    assert seconds(fast, way="layers", certify=True) > seconds(fast, way="layers", certify=False)


def test_a_pace_is_measured(tmp_path: Path) -> None:
    """Compensated rounding takes longer than rounding to nearest; nothing is left on the disk."""
    pace = measure(tmp_path, 4)
    assert min(astuple(pace)) > 0 and pace.compensating > pace.rounding
    assert not any(tmp_path.iterdir())


def test_a_disk_that_cannot_be_tried_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(folder: Path, bits: int) -> Pace:
        raise OSError(errno.EROFS, "Read-only file system", str(folder / "tmp6jlirlo5"))

    monkeypatch.setattr(requirement, "SMALL", 0)
    monkeypatch.setattr(requirement, "measure", refuse)
    with pytest.raises(ExportError, match=r"bundle could not be written \(Read-only file system\); no files were left"):
        export(GOLDEN / "target", None, tmp_path / "bundle")


def test_two_processes_need_the_memory_of_both(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Layers that are too large to be there twice are computed by one."""
    pair = open_pair(GOLDEN / "target", None)

    def memory(processes: int) -> int:
        monkeypatch.setattr(requirement, "fit_twice", lambda largest, cores: processes == 2)
        place = tmp_path / "bundle"
        return requirement.requirement_of(
            pair, "cpu", {"target": "int4"}, "layers", place, calibrated=False, certify=False
        ).memory

    one, two = memory(1) - requirement.PROGRAM, memory(2) - requirement.PROGRAM
    assert 1.2 * one < two <= 2 * one


@pytest.mark.parametrize(
    "name",
    ["Gemma-4, with experts", "Qwen3.5, with experts", "Qwen3.5", "ERNIE 4.5, with experts", "GLM-4.5-Air", "AFM"],
)
def test_the_disk_for_recorded_inputs_is_what_they_take(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Per row, in fp32: also of layers with an MLP beside their experts, and of MLPs without a gate. What weighs these
    is not rounded, and so not recorded: by the whole model neither."""
    monkeypatch.setattr(self_calibration, "LEAST_ROWS", 1)
    save_source(ROWS[name], tmp_path / "source")
    pair = open_pair(tmp_path / "source", None)

    def disk(way: Way | None) -> int:
        precisions, place = {"target": "int8"}, tmp_path / "bundle"
        return requirement.requirement_of(pair, "cpu", precisions, way, place, calibrated=False, certify=False).disk

    tokens = list(range(3, 40))
    inputs = observe_layers(pair.target, [tokens], tmp_path / "inputs").inputs
    recorded = [inputs[name] for name in {file: name for name, file in inputs.names.items()}.values()]
    numbers = sum(each.rows * each.sample.shape[1] for each in recorded)
    assert disk("layers") - disk(None) == 4 * KEPT * numbers // len(tokens)
    (texts := tmp_path / "texts.jsonl").write_text(json.dumps({"ids": tokens}))
    whole = observe_source(pair.target, Text(GOLDEN / "target"), texts, weighed=1)
    assert set(whole.inputs) == set(inputs) >= set(whole.importance)
