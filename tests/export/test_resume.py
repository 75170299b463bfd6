"""A stopped export goes on, and ends with the same bytes as one that was not; another export begins anew."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import eagle_export.base.data_file
from conftest import GOLDEN
from eagle_calib.folder import KEPT, WORK
from eagle_export.base.errors import ExportError
from eagle_export.base.resume import fingerprint
from eagle_export.bundle import export
from eagle_export.recording import source_text
from eagle_export.writing.settings import Settings
from export_workplace import make_target, spoil

Given = dict[str, Any]
PLAIN: Given = {"precision": "int4", "certify": False, "record": False}


class Stopped(BaseException):
    """As a signal: no error of the input."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_target(tmp_path_factory.mktemp("resumed") / "target")


@pytest.fixture(scope="module")
def whole(target: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, bytes]:
    """The files of an export that was not stopped."""
    bundle = tmp_path_factory.mktemp("whole") / "bundle"
    export(target, None, bundle, Settings(**PLAIN))
    return contents(bundle)


@pytest.fixture
def written(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Sizes of the tensors that are written, as they are written."""
    sizes: list[int] = []
    write = eagle_export.base.data_file._write

    def note(file: Any, content: memoryview) -> None:
        write(file, content)
        sizes.append(content.nbytes)

    monkeypatch.setattr(eagle_export.base.data_file, "_write", note)
    return sizes


def contents(folder: Path) -> dict[str, bytes]:
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def kept_of(bundle: Path) -> Path:
    return bundle.parent / f".{bundle.name}{WORK}" / KEPT


def stop_after(monkeypatch: pytest.MonkeyPatch, count: int, error: BaseException) -> None:
    """Lets the next export raise before its (count + 1)-th tensor is written, and those after it run."""
    write, left = eagle_export.base.data_file._write, [count]

    def stopping(file: Any, content: memoryview) -> None:
        left[0] -= 1
        if left[0] == -1:
            file.write(content[: content.nbytes // 2])
            raise error
        write(file, content)

    monkeypatch.setattr(eagle_export.base.data_file, "_write", stopping)


@pytest.mark.usefixtures("fresh_traces")
def test_equal_exports_have_equal_bytes(target: Path, whole: dict[str, bytes], tmp_path: Path) -> None:
    export(target, None, tmp_path / "again", Settings(**PLAIN))
    assert contents(tmp_path / "again") == whole


@pytest.mark.parametrize("error", [Stopped(), MemoryError(), OSError(28, "No space left on device")])
def test_a_stopped_export_goes_on(
    target: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    written: list[int],
    error: BaseException,
) -> None:
    bundle = tmp_path / "bundle"
    with monkeypatch.context() as patched:
        stop_after(patched, 7, error)
        with pytest.raises((Stopped, MemoryError, ExportError)):
            export(target, None, bundle, Settings(**PLAIN))
    assert not bundle.exists()
    assert len((kept_of(bundle) / "target.journal").read_text(encoding="utf-8").splitlines()) == 7
    written.clear()
    export(target, None, bundle, Settings(**PLAIN))
    assert contents(bundle) == whole
    assert [path.name for path in tmp_path.iterdir()] == ["bundle"]
    assert 0 < sum(written) < len(whole["target/model.onnx.data"]), "finished tensors were written again"


def cut_journal(kept: Path) -> None:
    with (kept / "target.journal").open("r+") as file:
        file.truncate((kept / "target.journal").stat().st_size - 9)


def flip_a_bit(kept: Path) -> None:
    data = bytearray((kept / "target.data").read_bytes())
    data[100] ^= 1
    (kept / "target.data").write_bytes(data)


def lose_data(kept: Path) -> None:
    """As a power cut may: the journal is on the disk, the weights are not."""
    os.truncate(kept / "target.data", 5000)


def lose_the_journal(kept: Path) -> None:
    (kept / "target.journal").unlink()


def other_entries(kept: Path) -> None:
    (kept / "target.journal").write_text('{"name": "x", "length": 1, "sha256": "0"}\n[]\n')


@pytest.mark.parametrize("damage", [cut_journal, flip_a_bit, lose_data, lose_the_journal, other_entries])
def test_damaged_leftovers_are_written_again(
    target: Path,
    whole: dict[str, bytes],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    damage: Callable[[Path], None],
) -> None:
    bundle = tmp_path / "bundle"
    with monkeypatch.context() as patched:
        stop_after(patched, 9, Stopped())
        with pytest.raises(Stopped):
            export(target, None, bundle, Settings(**PLAIN))
    damage(kept_of(bundle))
    export(target, None, bundle, Settings(**PLAIN))
    assert contents(bundle) == whole


def test_another_source_or_setting_begins_anew(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[int]
) -> None:
    source, bundle = make_target(tmp_path / "source"), tmp_path / "bundle"
    with monkeypatch.context() as patched:
        stop_after(patched, 9, Stopped())
        with pytest.raises(Stopped):
            export(source, None, bundle, Settings(**PLAIN))
    stale = (kept_of(bundle) / "made_of.txt").read_text(encoding="utf-8")
    written.clear()
    export(source, None, bundle, Settings(precision="fp32", certify=False))
    assert sum(written) == len((bundle / "target/model.onnx.data").read_bytes())
    config = json.loads((source / "config.json").read_text(encoding="utf-8"))
    before = fingerprint([source], {})
    (source / "config.json").write_text(json.dumps(config))
    assert fingerprint([source], {}) != before, "a file that was written again may hold anything"
    assert stale not in (before, fingerprint([source], {"precision": "int4"}))


def test_an_error_of_the_input_leaves_nothing(tmp_path: Path) -> None:
    source = make_target(tmp_path / "source", spoil("model.layers.1.mlp.down_proj.weight", float("nan")))
    with pytest.raises(ExportError, match="is not finite"):
        export(source, None, tmp_path / "bundle", Settings(**PLAIN))
    assert [path.name for path in tmp_path.iterdir()] == ["source"]


def test_a_shard_that_cannot_be_read_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While tensors are written, an error of the source is not taken for one of the destination."""
    source = make_target(tmp_path / "source")
    opened = Path.open

    def failing(path: Path, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if path == source / "model.safetensors" and named.get("buffering") == 0:
            raise OSError(5, "Input/output error")
        return opened(path, mode, *rest, **named)

    monkeypatch.setattr(Path, "open", failing)
    with pytest.raises(ExportError, match=r"model.safetensors cannot be read \(Input/output error\)"):
        export(source, None, tmp_path / "bundle", Settings(**PLAIN))
    assert not (tmp_path / "bundle").exists()


def test_the_published_weights_are_no_second_name_of_the_leftovers(target: Path, tmp_path: Path) -> None:
    export(target, None, tmp_path / "bundle", Settings(**PLAIN))
    assert (tmp_path / "bundle/target/model.onnx.data").stat().st_nlink == 1


def test_weights_that_were_rounded_by_other_inputs_are_rounded_again(
    target: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As with other threads or less memory, where the same command records others."""
    settings = Settings(precision="int4", certify=False)
    with monkeypatch.context() as patched:
        stop_after(patched, 12, Stopped())
        with pytest.raises(Stopped):
            export(target, None, tmp_path / "bundle", settings)
    assert (kept_of(tmp_path / "bundle") / "target.journal").is_file()
    monkeypatch.setattr(source_text, "SEED", 1)
    for name in ("bundle", "whole"):
        export(target, None, tmp_path / name, settings)
    assert contents(tmp_path / "bundle") == contents(tmp_path / "whole")


def test_golden_pair_resumes_in_its_head_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, written: list[int]
) -> None:
    arguments = (GOLDEN / "target", GOLDEN / "head_eagle1")
    export(*arguments, tmp_path / "whole", Settings(certify=False))
    entries = len(written)
    with monkeypatch.context() as patched:
        stop_after(patched, entries - 2, Stopped())
        with pytest.raises(Stopped):
            export(*arguments, tmp_path / "bundle", Settings(certify=False))
    assert (kept_of(tmp_path / "bundle") / "draft.journal").read_text(encoding="utf-8")
    export(*arguments, tmp_path / "bundle", Settings(certify=False))
    assert contents(tmp_path / "bundle") == contents(tmp_path / "whole")
