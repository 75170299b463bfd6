"""Faults of the kinds that a long export meets: it is killed anywhere, or its source or its disk is not sound.

Each ends with one sentence, an untouched source and no half bundle; what goes on afterwards gives the same bytes.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_calib.folder import KEPT, WORK
from eagle_export.base.errors import ExportError
from eagle_export.bundle import export
from eagle_export.commands.cli import main
from eagle_export.writing.settings import Settings
from eagle_runtime import BundleError, EagleModel
from export_workplace import configure, make_target
from faults.forks import Forks, Kill
from faults.tally import Tally, scaled

KILLED = -9


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A target of two layers and its bundle in int4, whose inputs were recorded."""
    root = tmp_path_factory.mktemp("whole")
    target = make_target(root / "target")
    export(target, None, root / "bundle", Settings(precision="int4", certify=False))
    return target, root / "bundle"


def killed_exports(target: Path, out: Path, tally: Tally, count: int) -> None:
    """Kills exports before random operations on files, each going on from the one before, then lets one end."""
    bundle = out / "bundle"
    command = ("eagle_export", target, "-o", bundle, "-p", "int4", "--no-certificate")
    with Forks() as forks:
        first = forks.run(command, out)
        assert first["status"] == 0
        expected = contents(bundle)
        shutil.rmtree(bundle)
        for _ in range(count):
            when = Kill(at_operation=tally.random.randrange(2, first["operations"]))
            done = forks.run(command, out, when)
            kept = out / f".bundle{WORK}" / KEPT / "target.journal"
            finished = len(kept.read_text().splitlines()) if kept.is_file() else 0
            if done["status"] not in (0, KILLED) or (bundle.exists() and contents(bundle) != expected):
                tally.fail(when, done)
            tally.add("killed with finished tensors" if finished else "killed with none")
            if bundle.exists():
                shutil.rmtree(bundle)
        assert forks.run(command, out)["status"] == 0
    assert contents(bundle) == expected
    assert [path.name for path in out.iterdir()] == ["bundle"]


@pytest.mark.slow
def test_kills_at_random_points(whole: tuple[Path, Path], tmp_path: Path, tally: Tally) -> None:
    (tmp_path / "out").mkdir()
    before = contents(whole[0])
    killed_exports(whole[0], tmp_path / "out", tally, scaled(10))
    assert contents(whole[0]) == before


def test_a_flipped_byte_in_any_file_of_a_bundle_is_named(whole: tuple[Path, Path], tmp_path: Path) -> None:
    bundle = shutil.copytree(whole[1], tmp_path / "bundle")
    files = sorted(path for path in bundle.rglob("*") if path.is_file())
    assert {"model.onnx", "model.onnx.data", "tokenizer.json", "eagle_config.json"} <= {path.name for path in files}
    for path in files:
        sound = path.read_bytes()
        damaged = bytearray(sound)
        damaged[len(sound) // 2] ^= 0x80
        path.write_bytes(damaged)
        with pytest.raises(BundleError, match=path.name):
            EagleModel.load(bundle, threads=1)
        path.write_bytes(sound)
    EagleModel.load(bundle, threads=1).close()


def missing_shard(target: Path) -> None:
    (target / "model.safetensors").rename(target / "model-00001-of-00002.safetensors")
    index = {"weight_map": {"a": "model-00001-of-00002.safetensors", "b": "model-00002-of-00002.safetensors"}}
    (target / "model.safetensors.index.json").write_text(json.dumps(index))


def cut_shard(target: Path) -> None:
    path = target / "model.safetensors"
    with path.open("r+b") as file:
        file.truncate(path.stat().st_size // 2)


@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (missing_shard, "model-00002-of-00002.safetensors is missing"),
        (cut_shard, "model.safetensors is damaged or cut short"),
        (lambda target: configure(target, num_hidden_layers=3), "model.layers.2"),
        (lambda target: configure(target, intermediate_size=96), "config and weights do not belong together"),
        (lambda target: configure(target, vocab_size=300), "model.embed_tokens.weight"),
        (lambda target: configure(target, num_key_value_heads=4), "config and weights do not belong together"),
    ],
)
def test_a_source_that_is_not_sound(
    tmp_path: Path, damage: Callable[[Path], object], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    target, out = make_target(tmp_path / "target"), tmp_path / "out"
    out.mkdir()
    damage(target)
    before = contents(target)
    assert main([str(target), "-o", str(out / "bundle"), "-p", "int4"]) == 2
    message = capsys.readouterr().err
    assert says in message and message.count("\n") == 1
    assert contents(target) == before
    assert list(out.iterdir()) == []


def test_too_little_memory_is_said_before_any_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    target = make_target(tmp_path / "target")
    monkeypatch.setattr("eagle_export.writing.requirement.free_memory", lambda: 10**8)
    with pytest.raises(ExportError, match=r"exporting takes 0.8 GB of memory and 0.1 GB are free; end other programs"):
        export(target, None, tmp_path / "bundle", Settings(precision="int4", certify=False))
    assert [path.name for path in tmp_path.iterdir()] == ["target"]
