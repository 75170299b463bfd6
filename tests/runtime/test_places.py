"""Where bundles lie and what may be written: links of the hub's cache, a machine without a writable folder."""

from __future__ import annotations

import os
import re
import shutil
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import GOLDEN
from eagle_runtime import BackendError, BundleError, EagleModel
from eagle_runtime.base.files import file_sha256, inside
from eagle_runtime.bundle.manifest import read_manifest
from eagle_runtime.ort.library import open_graph
from eagle_runtime.text.tokenizer import Text
from systems import needs_links

PROMPT = [5, 7, 200, 33]


def in_hub_cache(bundle: Path, cache: Path) -> Path:
    """Lays a bundle out as snapshot_download does; returns the snapshot."""
    snapshot, blobs = cache / "models--me--pair" / "snapshots" / "0123abc", cache / "models--me--pair" / "blobs"
    blobs.mkdir(parents=True)
    for path in (path for path in bundle.rglob("*") if path.is_file()):
        link = snapshot / path.relative_to(bundle)
        link.parent.mkdir(parents=True, exist_ok=True)
        blob = blobs / file_sha256(path)
        shutil.copyfile(path, blob)
        link.symlink_to(os.path.relpath(blob, link.parent))
    return snapshot


@needs_links
@pytest.mark.parametrize("precision", ["fp32", "int8"])
def test_a_bundle_in_the_hubs_cache(bundle_of: Callable[..., Path], tmp_path: Path, precision: str) -> None:
    bundle = bundle_of("eagle1", precision)
    snapshot = in_hub_cache(bundle, tmp_path)
    with EagleModel.load(bundle) as model:
        expected = model.generate(PROMPT, max_new_tokens=4).token_ids
    with EagleModel.load(snapshot) as model:
        assert model.generate(PROMPT, max_new_tokens=4).token_ids == expected


@needs_links
def test_links_elsewhere_are_named(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    """Nor do links of a snapshot lead anywhere but to the blobs of its own cache."""
    snapshot = in_hub_cache(bundle_of("eagle1", "fp32"), tmp_path / "hub")
    weights = snapshot / "target" / "model.onnx.data"
    (tmp_path / "elsewhere").mkdir()
    moved = shutil.copyfile(weights, tmp_path / "elsewhere" / "weights")
    weights.unlink()
    weights.symlink_to(moved)
    with pytest.raises(BundleError, match=r"'target/model.onnx.data' leaves the bundle by a link; put the file"):
        read_manifest(snapshot)
    assert not inside(tmp_path / "elsewhere", snapshot / "eagle_config.json")


@needs_links
def test_linked_weights_are_those_of_the_graph(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    """ONNX Runtime itself refuses links out of the graph's folder."""
    snapshot = in_hub_cache(bundle_of("eagle1", "fp32"), tmp_path)
    graph = snapshot / "draft" / "model.onnx"
    session = open_graph(graph, model=graph.read_bytes())
    assert session.get_inputs()
    if sys.platform == "linux":  # where a copy would take the memory of the file again
        assert str(graph.with_name("model.onnx.data").resolve()) in Path("/proc/self/maps").read_text(encoding="utf-8")
    del session
    for size in (100, 0):
        os.truncate(snapshot / "draft" / "model.onnx.data", size)
        with pytest.raises(BackendError, match="onnxruntime cannot load"):
            open_graph(graph, model=graph.read_bytes())


POINTER = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n"


@pytest.mark.parametrize("name", ["target/model.onnx.data", "eagle_config.json"])
def test_a_pointer_of_git_lfs_is_named(bundle_of: Callable[..., Path], tmp_path: Path, name: str) -> None:
    bundle = shutil.copytree(bundle_of("eagle1", "fp32"), tmp_path / "bundle")
    (bundle / name).write_text(POINTER)
    with pytest.raises(
        BundleError, match=rf"{re.escape(str(Path(name)))} is a pointer of Git LFS, not the file itself"
    ):
        EagleModel.load(bundle)


@needs_links
def test_a_link_to_nothing_is_named(bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    snapshot = in_hub_cache(bundle_of("eagle1", "fp32"), tmp_path)
    blob = (snapshot / "target" / "model.onnx").resolve()
    blob.unlink()
    with pytest.raises(BundleError, match=rf"model.onnx is a link to .*{blob.name}, which is not there"):
        read_manifest(snapshot)


def test_no_file_can_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A tokenizer loads where neither memory nor a folder takes a file for what its library may print."""

    def refused(*_: Any, **__: Any) -> Any:
        raise OSError(30, "Read-only file system")

    shutil.copyfile(GOLDEN / "byte_tokenizer.json", tmp_path / "tokenizer.json")
    monkeypatch.setattr(tempfile, "TemporaryFile", refused)
    assert Text(tmp_path).encode("ab")
    monkeypatch.setattr(os, "memfd_create", refused, raising=False)
    assert Text(tmp_path).encode("ab")


def test_no_home(bundle_of: Callable[..., Path], monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HOME", "XDG_CACHE_HOME", "EAGLE_CACHE", "TMPDIR"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(Path, "home", classmethod(lambda cls: Path("/proc/nowhere")))
    with EagleModel.load(bundle_of("eagle1", "fp32"), check_hashes="once") as model:
        assert len(model.generate(PROMPT, max_new_tokens=2).token_ids) == 2
