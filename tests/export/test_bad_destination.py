"""The destination of an export: older bundles are replaced, and folders with other files are refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import eagle_export.bundle
from eagle_export.base.destination import check_destination
from eagle_export.base.errors import ExportError
from eagle_export.commands.cli import main
from eagle_runtime import EagleModel
from eagle_runtime.bundle.manifest import MANIFEST_NAME, read_manifest
from eagle_runtime.trt.engine_file import EngineSet, EngineSpec, Profile, TableSpec
from export_workplace import Workplace, early_refusal, edit, spoil, workplace
from systems import needs_links
from trace_memory import TraceMemory

NORM = "model.norm.weight"


@pytest.fixture
def work(
    golden: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trace_memory: TraceMemory
) -> Iterator[Workplace]:
    with workplace(golden, tmp_path, monkeypatch, trace_memory) as place:
        yield place


def test_an_older_bundle_is_replaced(
    work: Workplace, bundle_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    work.make_shallow()
    edit(work.target, spoil(NORM, 1e6))  # too large for fp16, well within fp32
    shutil.copytree(bundle_of("eagle1"), work.bundle)
    fake_engines(work.bundle)  # built from the older graphs, so they must be removed with them
    assert main([*work.arguments(), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert any("engines tensorrt-rtx-sm89 were built from the older bundle" in text for text in report["warnings"])
    assert report["bundle"] == str(work.bundle)
    assert [path.name for path in work.bundle.parent.iterdir()] == ["bundle"]
    manifest = read_manifest(work.bundle)
    assert manifest.head is not None and (manifest.head.kind, manifest.target.num_layers) == ("eagle1", 1)
    assert {path.relative_to(work.bundle).as_posix() for path in work.bundle.rglob("*") if path.is_file()} == {
        MANIFEST_NAME,
        *manifest.files,
    }
    with EagleModel.load(work.bundle, threads=1) as model:
        assert len(model.generate([5, 6, 7], max_new_tokens=4, ignore_eos=True).token_ids) == 4


def fake_engines(bundle: Path) -> Path:
    """A folder of engines with their sidecar, of an older version; no test loads them."""
    folder = bundle / "engines" / "tensorrt-rtx-sm89"
    folder.mkdir(parents=True)
    profile = Profile("tree", dict.fromkeys("TPR", (1, 1, 1)))
    specs = []
    for name in ("target", "draft", "keep"):
        files = {} if name == "keep" else {"embedding": f"{name}-embedding.table"}
        tables = {kind: TableSpec(file, "0" * 64, 6, "float16", (1, 3)) for kind, file in files.items()}
        spec = EngineSpec(f"{name}.engine", "0" * 64, 6, {}, {}, {}, tables, (profile,), None, None, None, None)
        specs.append(spec)
        for file in (spec.file, *files.values()):
            (folder / file).write_bytes(b"engine")
    sidecar = EngineSet(1, "tensorrt-rtx", "1.7", ("8.9",), None, None, 64, False, *specs)
    (folder / "engine.json").write_text(sidecar.to_json())
    (folder.parent / "timing.cache").write_bytes(b"timings")
    return folder


def foreign_file(bundle: Path) -> str:
    (bundle / "thesis.tex").write_text("years of work")
    return "thesis.tex"


def foreign_next_to_the_graph(bundle: Path) -> str:
    (bundle / "target" / "notes.txt").write_text("mine")
    return "target/notes.txt"


def foreign_folder(bundle: Path) -> str:
    (bundle / "photos").mkdir()
    return "photos"


def foreign_link(bundle: Path) -> str:
    (bundle / "link").symlink_to(bundle.parent)
    return "link"


def foreign_engine(bundle: Path) -> str:
    folder = fake_engines(bundle)
    (folder / "my.plan").write_bytes(b"engine")
    return "engines/tensorrt-rtx-sm89/my.plan"


def engines_without_a_sidecar(bundle: Path) -> str:
    folder = fake_engines(bundle)
    (folder / "engine.json").write_text("{}")
    return "engines/tensorrt-rtx-sm89"


def listed_name_as_a_folder(bundle: Path) -> str:
    (bundle / "generation_config.json").unlink(missing_ok=True)
    (bundle / "generation_config.json").mkdir()
    return "generation_config.json"


@pytest.mark.parametrize(
    "add",
    [
        foreign_file, foreign_next_to_the_graph, foreign_folder, pytest.param(foreign_link, marks=needs_links),
        foreign_engine, engines_without_a_sidecar, listed_name_as_a_folder,
    ],
)  # fmt: skip
def test_files_that_no_manifest_lists_stop_the_export(
    work: Workplace,
    bundle_of: Callable[..., Path],
    add: Callable[[Path], str],
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The refusal comes before any work, and changes no file."""
    shutil.copytree(bundle_of("eagle1"), work.bundle)
    name = add(work.bundle)
    message = early_refusal(work, capsys)
    assert f"{work.bundle / name} does not belong to the bundle" in message


@pytest.mark.parametrize("content", ["{", "[]", "{}", '{"files": 7}'])
def test_a_manifest_that_lists_nothing_stops_the_export(
    work: Workplace, content: str, capsys: pytest.CaptureFixture[str]
) -> None:
    work.bundle.mkdir()
    (work.bundle / MANIFEST_NAME).write_text(content)
    message = early_refusal(work, capsys)
    assert f"{work.bundle / MANIFEST_NAME} does not say which files are the bundle's" in message


def test_a_bundle_of_another_version_may_be_replaced(
    work: Workplace, bundle_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    work.make_shallow()
    shutil.copytree(bundle_of("eagle1"), work.bundle)
    data = json.loads((work.bundle / MANIFEST_NAME).read_text(encoding="utf-8"))
    (work.bundle / MANIFEST_NAME).write_text(json.dumps({"schema_version": 3, "files": data["files"]}))
    assert main([*work.arguments(), "--no-certificate"]) == 0, capsys.readouterr().err
    assert read_manifest(work.bundle).target.num_layers == 1


def test_a_file_that_comes_while_the_export_runs_stays(
    work: Workplace,
    bundle_of: Callable[..., Path],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The older bundle is checked again before it is removed."""
    work.make_shallow()
    shutil.copytree(bundle_of("eagle1"), work.bundle)
    write = eagle_export.bundle._made

    def write_meanwhile(*arguments: Any) -> Any:
        made = write(*arguments)
        foreign_file(work.bundle)
        return made

    monkeypatch.setattr(eagle_export.bundle, "_made", write_meanwhile)
    assert main([*work.arguments(), "--no-certificate"]) == 2
    assert f"{work.bundle / 'thesis.tex'} does not belong to the bundle" in capsys.readouterr().err
    assert (work.bundle / "thesis.tex").read_text(encoding="utf-8") == "years of work"
    assert read_manifest(work.bundle).target.num_layers > 1
    assert [path.name for path in work.bundle.parent.iterdir()] == ["bundle"]


def test_a_loaded_model_goes_on_when_its_bundle_is_replaced(
    work: Workplace, bundle_of: Callable[..., Path], capsys: pytest.CaptureFixture[str]
) -> None:
    """Its weights stay mapped from files that only lose their names."""
    work.make_shallow()
    shutil.copytree(bundle_of("eagle1"), work.bundle)
    with EagleModel.load(work.bundle, threads=1) as model:
        before = model.generate([5, 6, 7], max_new_tokens=32, ignore_eos=True).token_ids
        assert main([*work.arguments(), "--no-certificate"]) == 0, capsys.readouterr().err
        assert model.generate([5, 6, 7], max_new_tokens=32, ignore_eos=True).token_ids == before
    with EagleModel.load(work.bundle, threads=1) as model:
        assert model.generate([5, 6, 7], max_new_tokens=32, ignore_eos=True).token_ids != before


@needs_links
def test_what_a_destination_is_instead_is_named(tmp_path: Path) -> None:
    (tmp_path / "real").mkdir()
    (tmp_path / "link").symlink_to("real")
    (tmp_path / "file").write_text("")
    for name, said in (("link", "link is a link"), ("file", "file exists and is not a folder"),
                       ("file/x", "file is not a folder"), ("none/x", "none does not exist")):  # fmt: skip
        with pytest.raises(ExportError, match=said):
            check_destination(tmp_path / name)
