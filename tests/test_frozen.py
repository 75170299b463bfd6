"""An application that PyInstaller has made into a folder answers, and starts a worker from its own executable."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from conftest import needs_operators
from eagle_export.bundle import export
from eagle_export.writing.settings import Settings
from eagle_runtime import EagleModel
from patience import PATIENCE_S

ROOT = Path(__file__).resolve().parents[1]
PAIR = ROOT / "tools/demo_pair"
APPLICATION = """
import sys
from eagle_runtime.commands import chat, worker

sys.exit(worker.main(sys.argv[2:]) if sys.argv[1] == "--worker" else chat.main())
"""
# What the tests' environment holds and decoding does not need.
LEFT_OUT = (
    "torch",
    "transformers",
    "onnx",
    "onnxscript",
    "scipy",
    "matplotlib",
    "pandas",
    "PIL",
    "tkinter",
    "sympy",
    "huggingface_hub",
)
MOST_MB = 200  # of the whole folder, the interpreter and OpenBLAS included

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def application(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("frozen")
    (folder / "talk.py").write_text(APPLICATION, encoding="utf-8")
    options = ["--noconfirm", "--onedir", "--console", "--log-level", "WARN"]
    left_out = [part for name in LEFT_OUT for part in ("--exclude-module", name)]
    done = subprocess.run(
        [sys.executable, "-m", "PyInstaller", *options, *left_out, "talk.py"],
        cwd=folder,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return folder / "dist/talk/talk"


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("pair") / "eagle1"
    export(PAIR / "target", PAIR / "eagle1", folder, Settings(precision="int8"))
    return folder


def frozen(application: Path, *arguments: object, text: str) -> subprocess.CompletedProcess[str]:
    command = [str(application), *map(str, arguments)]
    return subprocess.run(
        command, input=text, capture_output=True, text=True, env=bare_environment(), timeout=PATIENCE_S
    )


def bare_environment() -> dict[str, str]:
    return {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "VIRTUAL"))}


def test_it_answers(application: Path, bundle: Path) -> None:
    done = frozen(application, bundle, "--max-new-tokens", 20, text="sum a list\n")
    assert done.returncode == 0, done.stderr
    with EagleModel.load(bundle) as model, model.conversation() as chat:
        pieces = list(chat.send("sum a list", max_new_tokens=20))
    assert pieces[-1].result is not None and pieces[-1].result.text
    assert done.stdout.rstrip("\n") == pieces[-1].result.text.rstrip("\n")


@needs_operators
def test_it_runs_the_native_operators(application: Path, bundle: Path) -> None:
    done = frozen(application, bundle, "--backend", "native", "--max-new-tokens", 8, text="sum a list\n")
    assert done.returncode == 0, done.stderr


def test_it_is_a_worker_too(application: Path, bundle: Path) -> None:
    order = {"id": 1, "op": "generate", "prompt": "def f(", "max_new_tokens": 8}
    bare = bare_environment()
    with subprocess.Popen(
        [application, "--worker", bundle], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=bare
    ) as process:
        assert process.stdin is not None and process.stdout is not None
        print(json.dumps(order), file=process.stdin, flush=True)
        while (event := json.loads(process.stdout.readline()))["event"] not in ("done", "error"):
            pass
    with EagleModel.load(bundle) as model:
        assert event["result"]["text"] == model.generate("def f(", max_new_tokens=8).text
    assert process.returncode == 0


def test_its_size(application: Path) -> None:
    size = sum(
        path.stat().st_size for path in application.parent.rglob("*") if path.is_file() and not path.is_symlink()
    )
    assert size < MOST_MB * 1e6, size
