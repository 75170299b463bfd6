"""What an edge device installs: the wheel with one engine, in an empty environment, decodes as the development tree.

Needs the network, for the wheel's build backend and the runtime's few dependencies.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import venv
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest
from filelock import FileLock

from eagle_runtime import EagleModel

ROOT = Path(__file__).resolve().parents[1]
PACKAGES = {"eagle_runtime", "eagle_calib", "eagle_export", "eagle_train", "eagle_tools", "eagle_serve"}
HEAVY = ("torch", "transformers", "onnx", "onnxscript", "onnx_ir")
LEAN_BYTES = 70_000_000  # of all wheels together
PROMPT = [5, 17, 3, 60, 41, 2, 33, 8]


def run(*command: object, expect: int = 0, folder: Path | None = None) -> subprocess.CompletedProcess[str]:
    """A process that sees nothing of the development tree; fails with its words unless it ends with `expect`."""
    env = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run(
        [str(part) for part in command], capture_output=True, text=True, env=env, cwd=folder, check=False
    )
    assert done.returncode == expect, done.stdout + done.stderr
    return done


def pip(programs: Path, *arguments: object) -> str:
    """What pip prints, for an environment that has none of its own: putting one there takes longer than the rest."""
    return run(sys.executable, "-m", "pip", "--python", programs / "python", *arguments).stdout


def build(folder: Path) -> Path:
    """The wheel of this tree."""
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("*.whl")
    return wheel


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build(tmp_path_factory.mktemp("wheel"))


@pytest.fixture(scope="module")
def device(wheel: Path, shared: Path) -> Path:
    """The programs folder of an environment that holds the wheel and its [cpu] extra, made by the first worker."""
    folder = shared / "device"
    programs = folder / ("Scripts" if os.name == "nt" else "bin")
    with FileLock(f"{folder}.lock"):
        if not (folder / "complete").exists():
            venv.create(folder)
            pip(programs, "install", "--quiet", "--no-compile", f"eagle-edge[cpu] @ {wheel.as_uri()}")
            (folder / "complete").touch()
    return programs


def test_the_wheel_holds_the_packages_and_their_types(wheel: Path) -> None:
    """And nothing else: no tests, no golden pairs, no demo."""
    names = zipfile.ZipFile(wheel).namelist()
    assert {name.split("/")[0] for name in names if ".dist-info/" not in name} == PACKAGES
    assert {f"{package}/py.typed" for package in PACKAGES} <= set(names)
    sources = {path.relative_to(path.parents[1]) for package in PACKAGES for path in ROOT.glob(f"*/{package}/*.py")}
    assert {source.as_posix() for source in sources} <= set(names)
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    page = {path.relative_to(ROOT / "runtime").as_posix() for path in ROOT.glob("runtime/eagle_serve/page/*")}
    assert page <= set(names) and len(page) == 3


def test_only_what_decoding_needs_is_installed(device: Path) -> None:
    listed = json.loads(pip(device, "list", "--format", "json"))
    names = {package["name"].lower() for package in listed}
    assert {"eagle-edge", "numpy", "tokenizers", "jinja2", "onnxruntime"} <= names
    assert not names & {name.replace("_", "-") for name in HEAVY}
    for name in HEAVY:
        said = run(device / "python", "-c", f"import {name}", expect=1).stderr
        assert f"ModuleNotFoundError: No module named '{name}'" in said


def test_its_wheels_are_small_and_need_no_compiler(wheel: Path, tmp_path: Path) -> None:
    """All wheels of [cpu], ours included, and no source among them."""
    options = ("--quiet", "--only-binary", ":all:", "--dest", tmp_path)
    run(sys.executable, "-m", "pip", "download", *options, f"eagle-edge[cpu] @ {wheel.as_uri()}")
    sizes = {path.name: path.stat().st_size for path in tmp_path.iterdir()}
    assert len(sizes) > 5 and all(name.endswith(".whl") for name in sizes)
    assert sum(sizes.values()) <= LEAN_BYTES, sizes


@pytest.mark.parametrize("kind", ["eagle1", "eagle3"])
def test_it_decodes_the_same_tokens(device: Path, bundle_of: Callable[..., Path], tmp_path: Path, kind: str) -> None:
    bundle = Path(shutil.copytree(bundle_of(kind), tmp_path / "bundle"))
    with EagleModel.load(bundle, threads=1) as model:
        # Not the default tree, which depends on how long forward passes take.
        wanted = model.generate(PROMPT, max_new_tokens=64, ignore_eos=True, tree="dynamic")
    prompt = ("--prompt-ids", ",".join(map(str, PROMPT)), "--max-new-tokens", 64, "--tree", "dynamic")
    command = (device / "eagle-run", "bundle", *prompt, "--ignore-eos", "--json")
    done = run(*command, "--threads", 1, folder=tmp_path)
    result = json.loads(done.stdout)
    assert tuple(result["token_ids"]) == wanted.token_ids
    assert len(set(wanted.token_ids)) > 3, "a constant output would prove little"
    assert result["usage"]["tau"] == wanted.usage.tau > 1
    assert done.stderr == ""


def test_it_runs_as_a_library_without_the_sources(device: Path, tmp_path: Path) -> None:
    code = "import eagle_runtime; print(eagle_runtime.__file__)"
    place = Path(run(device / "python", "-c", code, folder=tmp_path).stdout.strip())
    assert place.is_relative_to(device.parent.resolve()) and not place.is_relative_to(ROOT)


def test_export_names_its_extra(device: Path, golden: Path, tmp_path: Path) -> None:
    done = run(device / "eagle-export", golden / "target", golden / "head_eagle1", "-o", tmp_path / "bundle", expect=2)
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("eagle-export: ") and "pip install 'eagle-edge[export]'" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_the_missing_engine_names_its_extra(device: Path, bundle_of: Callable[..., Path], tmp_path: Path) -> None:
    """All that the environment holds but the engine, on the path of a Python that looks nowhere else."""
    code = "import sysconfig; print(sysconfig.get_path('purelib'))"
    held = Path(run(device / "python", "-c", code).stdout.strip())
    for package in held.iterdir():
        if not package.name.startswith("onnxruntime"):
            (tmp_path / package.name).symlink_to(package)
    command = (device / "python", "-S", "-m", "eagle_runtime.commands.cli", bundle_of("eagle1"), "--prompt-ids", "5,6")
    done = run(*command, expect=2, folder=tmp_path)  # "-m" searches the folder it is started in
    assert done.stdout == "" and done.stderr.count("\n") == 1
    assert done.stderr.startswith("eagle-run: ") and "pip install 'eagle-edge[cpu]'" in done.stderr
