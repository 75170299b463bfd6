"""A target that runs layer by layer computes what it computes as a whole, to the last bit of every recorded input."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest

import eagle_export.recording.recording
import eagle_export.recording.self_calibration
from conftest import GOLDEN, HEADS
from eagle_calib.calibration import Observed
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.graphs.pair import open_pair
from eagle_export.reading.checkpoint import open_checkpoint
from eagle_export.reading.families.source import load_source
from eagle_export.recording.layered import batches
from eagle_export.recording.layered_recording import observe_layers, texts_to_read
from eagle_export.recording.self_calibration import observe_source
from eagle_export.writing.settings import Settings
from eagle_runtime.text.tokenizer import Text
from mtp_writers import mimo, random_layer, read_folder

TEXTS = [[5, 6, 7, 8, 9], [200, 3, 3, 17], list(range(40, 90))]


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return written(tmp_path_factory.mktemp("texts") / "texts.jsonl", TEXTS)


def written(path: Path, texts: Sequence[Sequence[int]]) -> Path:
    path.write_text("".join(json.dumps({"ids": ids}) + "\n" for ids in texts))
    return path


def assert_equal(first: Mapping[str, Observed], second: Mapping[str, Observed]) -> None:
    assert set(first) == set(second)
    for name in first:
        one, other = first[name], second[name]
        assert one.rows == other.rows
        np.testing.assert_array_equal(one.channel_absmax, other.channel_absmax)
        np.testing.assert_array_equal(one.sample, other.sample)


@pytest.mark.parametrize("kind", [*HEADS, "mtp"])
def test_recorded_inputs_are_those_of_the_whole_model(kind: str, data: Path, tmp_path: Path) -> None:
    target = GOLDEN / "target"
    if kind == "mtp":
        target = mimo(target, random_layer(read_folder(target)[1]), tmp_path / "mimo")
    pair = open_pair(target, target if kind == "mtp" else GOLDEN / HEADS[kind])
    assert pair.head is not None
    text = Text(target)
    # with the same products: those of packed layers add in another order on Intel's processors
    whole = observe_source(target, text, data, pair.head, model=load_source(pair.target))
    windows = texts_to_read(text, data, 256, 4096)
    layered = observe_layers(pair.target, windows, tmp_path / "inputs", pair.head)
    assert_equal(layered.inputs, whole.inputs)
    assert "head.fc.weight" in whole.inputs
    assert not layered.importance, "no gradients without the whole model"
    q, k = (layered.inputs.names[f"model.layers.0.self_attn.{part}_proj.weight"] for part in "qk")
    assert q == k, "layers that read one tensor share a file"


def test_texts_of_one_length_are_read_together(tmp_path: Path) -> None:
    """Products of more rows may differ in the last bits. A head reads them twice, which orders its rows otherwise."""
    assert batches([5, 5, 4, 400, 400, 400, 4]) == [range(2), range(2, 3), range(3, 5), range(5, 6), range(6, 7)]
    pair = open_pair(GOLDEN / "target", GOLDEN / HEADS["eagle3"])
    windows, steps = [TEXTS[0], TEXTS[2][:7], TEXTS[2][7:14], TEXTS[2][14:21]], list[str]()
    text, data = Text(GOLDEN / "target"), written(tmp_path / "texts.jsonl", windows)
    whole = observe_source(pair.target, text, data, pair.head, model=load_source(pair.target)).inputs
    layered = observe_layers(pair.target, windows, tmp_path / "inputs", pair.head, steps.append).inputs
    assert set(layered) == set(whole)
    for name in whole:
        assert layered[name].rows == whole[name].rows
        samples = layered[name].sample, whole[name].sample
        found, wanted = (np.sort(each, 0) if "head." in name else each for each in samples)
        np.testing.assert_allclose(found, wanted, rtol=1e-2, atol=1e-3)
    assert [step for step in steps if "layer 1 of" in step] == [
        f"recording inputs (layer 1 of 8, text {text} of 4)" for text in (1, 2)
    ]


def test_a_stopped_recording_goes_on_after_its_last_layer(data: Path, tmp_path: Path) -> None:
    checkpoint = open_checkpoint(GOLDEN / "target")
    windows = texts_to_read(Text(GOLDEN / "target"), data, 256, 4096)
    whole = observe_layers(checkpoint, windows, tmp_path / "whole")
    steps: list[str] = []

    def stop(step: str) -> None:
        steps.append(step)
        if "layer 4 of" in step and "text 2" in step:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        observe_layers(checkpoint, windows, tmp_path / "stopped", report=stop)
    steps.clear()
    resumed = observe_layers(checkpoint, windows, tmp_path / "stopped", report=steps.append)
    assert steps[0].startswith("recording inputs (layer 4 of 8, text 1 of 3)")
    assert_equal(resumed.inputs, whole.inputs)
    damaged = next((tmp_path / "stopped").glob("*layers.2*mlp.down*.npz"))
    content = bytearray(damaged.read_bytes())
    content[len(content) // 2] ^= 1
    damaged.write_bytes(content)
    steps.clear()
    assert_equal(observe_layers(checkpoint, windows, tmp_path / "stopped", report=steps.append).inputs, whole.inputs)
    assert steps[0].startswith("recording inputs (layer 1 of 8"), "a damaged file is not believed"


def test_an_export_that_lacks_memory_for_the_whole_records_by_layers(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Equal text and equal products give equal weights; what was done is said."""
    target = GOLDEN / "target"
    for reader in (eagle_export.recording.recording, eagle_export.recording.self_calibration):
        monkeypatch.setattr(reader, "load_packed", load_source)  # as above
    whole = export(target, None, tmp_path / "whole", Settings(precision="int4", certify=False, calibrate=data))

    def refuse(*_: object) -> None:
        raise ExportError("comparing takes 40.0 GB of memory and 3.0 GB are free")

    monkeypatch.setattr(eagle_export.recording.recording, "check_memory", refuse)
    layered = export(target, None, tmp_path / "layered", Settings(precision="int4", certify=False, calibrate=data))
    assert whole.manifest.files == layered.manifest.files
    assert any("layer by layer, on the text that was given: comparing takes 40.0 GB" in w for w in layered.warnings)
    without = export(target, None, tmp_path / "without", Settings(precision="int4", certify=False))
    assert any("on the package's text, not on text of the model's own" in w for w in without.warnings)
    assert "errors compensated" in str(without.manifest.target.graph.recipe)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["layered", "whole", "without"]
