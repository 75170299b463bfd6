"""Sidecars of engines: engines that do not fit the machine or the bundle are refused before a library loads them."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from eagle_runtime import BackendError, BundleError
from eagle_runtime.bundle.listed_files import verify_hashes
from eagle_runtime.bundle.manifest import Manifest, read_manifest
from eagle_runtime.machine.nvidia import DeviceInfo
from eagle_runtime.trt.engine_file import SIDECAR, EngineFolder, find_engines, host_platform
from systems import needs_links, posix_only
from trt_fake import VERSION, write_fake_engines

GPU = DeviceInfo("Fake RTX", "8.9", "13.0", 1 << 32, 1 << 32)
CONTEXT = 300


@pytest.fixture
def bundle(bundle_of: Callable[..., Path], tmp_path: Path) -> Path:
    shutil.copytree(bundle_of("eagle1"), tmp_path / "bundle")
    write_fake_engines(tmp_path / "bundle", "tensorrt-rtx", CONTEXT)
    return tmp_path / "bundle"


def find(bundle: Path, library: str = "tensorrt-rtx", **changes: Any) -> EngineFolder:
    settings: dict[str, Any] = {"version": VERSION, "device": GPU, "context": CONTEXT} | changes
    return find_engines(bundle, read_manifest(bundle), library, **settings)


def edit(bundle: Path, change: Callable[[dict[str, Any]], None], folder: str = "tensorrt-rtx-sm89") -> None:
    path = bundle / "engines" / folder / SIDECAR
    data = json.loads(path.read_text(encoding="utf-8"))
    change(data)
    path.write_text(json.dumps(data), encoding="utf-8")


def test_fitting_engines_are_returned(bundle: Path) -> None:
    fitting = find(bundle)
    assert fitting.folder.name == "tensorrt-rtx-sm89" and fitting.engines.library_version == VERSION
    verify_hashes(bundle, read_manifest(bundle))  # engines are not among the files that a manifest lists


def test_a_sidecar_is_read_as_written(bundle: Path) -> None:
    written = find(bundle)
    again = write_fake_engines(bundle, "tensorrt-rtx", CONTEXT)
    assert written.engines == again.engines == find(bundle).engines


def test_a_bundle_without_engines_names_the_command(bundle: Path) -> None:
    with pytest.raises(BackendError, match=r"no engines for tensorrt; .*engines .*bundle --backend tensorrt --context"):
        find(bundle, "tensorrt")
    shutil.rmtree(bundle / "engines")
    with pytest.raises(BackendError, match=r"tensorrt-rtx --compute-capability 8\.9 --context 300$"):
        find(bundle)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"device": replace(GPU, compute_capability="8.6")}, "built for compute capability 8.9, but this GPU has 8.6"),
        (
            {"version": "1.1"},
            r"built by tensorrt-rtx 1.0, but 1.1 is installed \(pip install tensorrt-rtx==1.0 runs them as they are\)",
        ),
        (
            {"context": 600},
            r"target.engine serves 512 rows, but the context needs 600 \(a context of 300 needs no new engines\)",
        ),
    ],
)
def test_engines_for_another_machine_or_context_are_refused(
    bundle: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(
        BundleError, match=f"^[^;]*tensorrt-rtx-sm89: .*{message}; build the engines again: eagle-export"
    ):
        find(bundle, **changes)


@pytest.mark.parametrize("key", ["gpu", "platform"])
def test_tensorrt_engines_fit_one_gpu_model_and_system(bundle: Path, key: str) -> None:
    write_fake_engines(bundle, "tensorrt", CONTEXT)
    here = {"gpu": GPU.name, "platform": host_platform()}
    edit(bundle, lambda data: data.update(here), "tensorrt-sm89")
    assert find(bundle, "tensorrt").folder.name == "tensorrt-sm89"
    edit(bundle, lambda data: data.update({key: "another"}), "tensorrt-sm89")
    with pytest.raises(BundleError, match=f"built for another, but this is {here[key]}; build"):
        find(bundle, "tensorrt")


@pytest.mark.parametrize("name", ["target", "draft"])
def test_engines_of_another_graph_are_refused(bundle: Path, name: str) -> None:
    edit(bundle, lambda data: data[name]["graph"].update({f"{name}/model.onnx.data": "0" * 64}))
    message = f"{name}.engine was built from another {name}/model.onnx{{}} than the bundle now has"
    with pytest.raises(BundleError, match=message.format(".data")):
        find(bundle)
    edit(bundle, lambda data: data[name].update(graph={}))
    with pytest.raises(BundleError, match=message.format("")):
        find(bundle)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (flip, "draft.engine does not match its SHA-256 in engine.json"),
        (lambda path: path.write_bytes(path.read_bytes()[:-1]), "does not match"),
        (Path.unlink, "draft.engine is missing"),
    ],
)
def test_a_damaged_engine_is_refused(bundle: Path, damage: Callable[[Path], None], message: str) -> None:
    damage(bundle / "engines/tensorrt-rtx-sm89/draft.engine")
    with pytest.raises(BundleError, match=f"{message}.*; build the engines again"):
        find(bundle)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data.update(schema_version=1), "schema_version is 1, this runtime reads 2"),
        (lambda data: data.pop("context"), "key 'context' is missing"),
        (lambda data: data.update(more=1), "unknown key 'more'"),
        (lambda data: data["target"].update(size="big"), "target: size is 'big'"),
        (lambda data: data["draft"].update(profiles=[]), "draft: profiles need three sizes each"),
        (lambda data: data["draft"]["profiles"][0]["sizes"].update(T=[1, 2]), "profiles need three sizes each"),
        (lambda data: data["draft"]["profiles"][0]["sizes"].update(P=[9, 2, 3]), "profiles need three sizes each"),
        (lambda data: data["target"].update(file="../target.engine"), "target.engine is missing"),
    ],
)
def test_a_malformed_sidecar_is_refused(bundle: Path, change: Callable[[dict[str, Any]], None], message: str) -> None:
    edit(bundle, change)
    with pytest.raises(BundleError, match=message) as error:
        find(bundle)
    assert str(error.value).count("build the engines again: eagle-export engines") == 1 and "\n" not in str(error.value)


def test_a_sidecar_that_is_not_json_is_refused(bundle: Path) -> None:
    (bundle / "engines/tensorrt-rtx-sm89" / SIDECAR).write_bytes(b"{\xff")
    with pytest.raises(BundleError, match="not readable JSON"):
        find(bundle)


@posix_only
def test_a_sidecar_that_is_a_pipe_is_refused(bundle: Path) -> None:
    """Opening a pipe would wait for a writer."""
    path = bundle / "engines/tensorrt-rtx-sm89" / SIDECAR
    path.unlink()
    os.mkfifo(path)
    with pytest.raises(BundleError, match=f"{path} is not a regular file"):
        find(bundle)


@needs_links
@pytest.mark.parametrize("name", [SIDECAR, "draft.engine"])
def test_links_out_of_the_bundle_are_refused(bundle: Path, tmp_path: Path, name: str) -> None:
    path = bundle / "engines/tensorrt-rtx-sm89" / name
    shutil.move(path, tmp_path / "elsewhere")
    path.symlink_to(tmp_path / "elsewhere")
    with pytest.raises(BundleError, match=f"{name} leaves the .* by a link; build the engines again"):
        find(bundle)


def test_the_fitting_one_of_several_folders_is_taken(bundle: Path) -> None:
    """If none fits, the error is about the engines that passed most checks."""
    write_fake_engines(bundle, "tensorrt-rtx", CONTEXT, capability="8.6")
    write_fake_engines(bundle, "tensorrt-rtx", CONTEXT, capability="12.0")
    assert find(bundle).folder.name == "tensorrt-rtx-sm89"
    (bundle / "engines/tensorrt-rtx-sm89/target.engine").unlink()
    with pytest.raises(BundleError, match=r"tensorrt-rtx-sm89: target\.engine is missing"):
        find(bundle)


def test_engines_are_compared_with_the_manifests_hashes(bundle: Path) -> None:
    """The sidecar's own statements are not enough."""
    manifest: Manifest = read_manifest(bundle)
    files = {**manifest.files, "target/model.onnx": "1" * 64}
    with pytest.raises(BundleError, match=r"another target/model\.onnx"):
        find_engines(bundle, replace(manifest, files=files), "tensorrt-rtx", VERSION, GPU, CONTEXT)
