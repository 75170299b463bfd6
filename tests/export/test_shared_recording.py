"""A recording that two processes share: what both wrote is there, also where the copy of the process ends early."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from conftest import GOLDEN, HEADS
from eagle_calib.observe import SampleFile
from eagle_export.checking.source_reading import SourceReading, reading_of_pair
from eagle_export.graphs.pair import Pair, open_pair
from eagle_export.recording import recording
from eagle_export.recording.recording import LARGE, other_half, shared_texts
from eagle_export.recording.self_calibration import LENGTH, SEQUENCES, Listed, observe_source

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="other systems have no fork that this may use")


@pytest.fixture
def samples(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SampleFile]:
    """A file that is open as long as the test."""
    with SampleFile(tmp_path_factory.mktemp("samples")) as file:
        yield file


@pytest.fixture(scope="module")
def pair() -> Pair:
    return open_pair(GOLDEN / "target", GOLDEN / HEADS["eagle3"])


@pytest.fixture(scope="module")
def recordings(pair: Pair) -> list[Listed]:
    """Of each process's texts, by this one."""
    return [
        observe_source(pair.target, pair.text, None, pair.head, share=share).inputs
        for share in shared_texts(pair.target.numbers)
    ]


@pytest.fixture(scope="module")
def apart(pair: Pair) -> SourceReading:
    """What the source says if it is asked for nothing else."""
    reading = reading_of_pair(pair)
    assert reading is not None
    reading.read()
    return reading


@pytest.mark.parametrize("copy_fails", [False, True])
def test_two_processes_record_what_the_source_reads(
    copy_fails: bool,
    pair: Pair,
    recordings: list[Listed],
    apart: SourceReading,
    samples: SampleFile,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(recording, "LEAST", 0)
    monkeypatch.setattr(recording, "threads_allowed", lambda: 2)
    reading = reading_of_pair(pair)
    assert reading is not None

    def leave(folder: Path) -> None:
        assert not copy_fails
        reading.leave(folder)

    threads, finished = torch.get_num_threads(), tmp_path / "finished"
    (finished / recording.INPUTS / "of an export that was stopped").mkdir(parents=True)
    with other_half(pair, tmp_path / "bundle", replace(reading.asked(), leave=leave)) as other:
        assert other is not None
        recorded = other.completed(finished, samples, lambda step: None, weighed=2 * LENGTH)
    assert torch.get_num_threads() == threads and "model.layers.0.self_attn.q_proj.weight" in recorded.importance
    assert [path.name for path in tmp_path.iterdir()] == ["finished"], "nothing of the copy is left"
    assert set(recorded.inputs) == set(recordings[0])
    for name, seen in recorded.inputs.items():
        parts = [each[name] for each in recordings]
        assert seen.rows == sum(each.rows for each in parts) and len(seen.sample) == sum(
            len(each.sample) for each in parts
        )
        wanted = np.concatenate([each.sample for each in parts]).astype(np.float32)
        assert np.mean(np.abs(seen.sample.astype(np.float32) - wanted) > 0.02 * np.abs(wanted).max()) < 0.05, name
    expected, checked = apart.read()
    assert (reading.expected is None) == copy_fails
    again, checked_again = reading.read()
    assert [each.tokens for each in again] == [each.tokens for each in expected]
    np.testing.assert_allclose(again[0].logits, expected[0].logits, atol=1e-3)
    assert checked is not None and checked_again is not None and checked.best is not None
    assert (checked.rows, checked.share) == (checked_again.rows, checked_again.share)
    assert checked_again.best is not None and checked_again.best.words == checked.best.words


def test_each_text_is_written_by_one_process() -> None:
    """Of a large model, for which tracing takes a small part of the time, this process writes more."""
    for numbers, own in ((LARGE - 1, 18), (LARGE, 25)):
        first, second = shared_texts(numbers)
        assert len(first) == own and sorted([*first, *second]) == list(range(SEQUENCES))


def test_a_small_source_or_many_cores_take_one_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pair = open_pair(GOLDEN / "target", None)
    for least, count in ((10**7, 2), (0, 1), (0, 8)):
        monkeypatch.setattr(recording, "LEAST", least)
        monkeypatch.setattr(recording, "threads_allowed", lambda count=count: count)
        with other_half(pair, tmp_path / "bundle", None) as other:
            assert other is None
    assert not list(tmp_path.iterdir())
