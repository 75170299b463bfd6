"""A user's machine: the wheel with `[cpu]` in an empty environment decodes a bundle, with no torch in sight."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from eagle_runtime import EagleModel

ROOT = Path(__file__).resolve().parents[1]


def run(*command: str | Path, expect: int = 0, cwd: Path) -> subprocess.CompletedProcess[str]:
    """Run a command as a user would: without this test's import path. Asserts the exit status."""
    environment = {key: value for key, value in os.environ.items() if key not in ("PYTHONPATH", "VIRTUAL_ENV")}
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, env=environment, cwd=cwd)
    assert done.returncode == expect, done.stderr[-2000:]
    return done


@pytest.fixture(scope="module")
def scripts(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of commands of an empty environment with eagle-edge[cpu] from its wheel."""
    folder = tmp_path_factory.mktemp("lean")
    run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT, cwd=folder)
    (wheel,) = folder.glob("*.whl")
    run(sys.executable, "-m", "venv", folder / "venv", cwd=folder)
    found = folder / "venv" / ("Scripts" if os.name == "nt" else "bin")
    run(found / "python", "-m", "pip", "install", "--quiet", f"{wheel}[cpu]", cwd=folder)
    return found


def test_the_wheel_decodes_without_torch(
    scripts: Path, bundle_of: Callable[[str], Path], prompts: list[list[int]], tmp_path: Path
) -> None:
    for kind in ("eagle1", "eagle3"):
        ids = ",".join(map(str, prompts[0]))
        done = run(scripts / "eagle-run", bundle_of(kind), "--prompt-ids", ids, "--json", cwd=tmp_path)
        with EagleModel.load(bundle_of(kind)) as model:
            expected = model.generate(prompts[0])
        assert json.loads(done.stdout)["token_ids"] == list(expected.token_ids)


def test_nothing_heavy_is_installed(scripts: Path, tmp_path: Path) -> None:
    code = "import importlib.util as u; print([m for m in ('torch', 'transformers', 'onnx', 'rich') if u.find_spec(m)])"
    assert run(scripts / "python", "-c", code, cwd=tmp_path).stdout.strip() == "[]"


def test_exporting_there_names_what_to_install(scripts: Path, tmp_path: Path) -> None:
    target, head = ROOT / "tests/golden/target", ROOT / "tests/golden/head_eagle1"
    done = run(scripts / "eagle-export", target, head, "-o", tmp_path / "bundle", expect=2, cwd=tmp_path)
    (line,) = done.stderr.splitlines()
    assert "pip install 'eagle-edge[export]'" in line
    assert list(tmp_path.iterdir()) == []
