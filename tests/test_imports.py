"""Imports point one way, the runtime stays lean, and the public names stay what they are."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import eagle_runtime

ROOT = Path(__file__).resolve().parents[1]
ORDER = ["runtime", "calib", "export", "train", "tools"]  # each may import itself and what stands before it
HEAVY = {"torch", "transformers", "onnx", "onnx_ir", "onnxscript"}
ENGINES = {"onnxruntime": "runtime/eagle_runtime/session/ort.py"}  # engine -> the only file that may import it


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """(line, top-level package) of every import in a file, lazy ones included."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
        for name in names:
            yield node.lineno, name.split(".")[0]  # type: ignore[attr-defined]


def violations(root: Path) -> list[str]:
    """Every import below root that points the wrong way or is too heavy for its place."""
    found = []
    for rank, layer in enumerate(ORDER):
        above = {f"eagle_{name}" for name in ORDER[rank + 1 :]}
        forbidden = above | (HEAVY if layer in ("runtime", "calib") else set())
        for path in sorted((root / layer).rglob("*.py")):
            place = path.relative_to(root).as_posix()
            for line, package in imported(path):
                if package in forbidden or ENGINES.get(package, place) != place:
                    found.append(f"{place}:{line} imports {package}")
    return found


def test_imports_point_one_way() -> None:
    assert violations(ROOT) == []
    assert len(list((ROOT / "runtime").rglob("*.py"))) > 10


@pytest.mark.parametrize(
    ("place", "statement"),
    [
        ("runtime/eagle_runtime/tree.py", "import torch"),
        ("runtime/eagle_runtime/cli.py", "def f():\n    from transformers import AutoModel"),
        ("runtime/eagle_runtime/model.py", "import onnxruntime"),
        ("calib/eagle_calib/observe.py", "from eagle_export.pair import Pair"),
        ("export/eagle_export/bundle.py", "import eagle_train.cli"),
        ("train/eagle_train/cli.py", "from eagle_tools import demo"),
    ],
)
def test_a_wrong_import_is_found(place: str, statement: str, tmp_path: Path) -> None:
    (tmp_path / place).parent.mkdir(parents=True)
    (tmp_path / place).write_text(statement)
    assert len(violations(tmp_path)) == 1


def run_python(code: str) -> str:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    return done.stdout.strip()


def test_importing_the_runtime_loads_nothing_heavy() -> None:
    code = "import sys, eagle_runtime; print(*sorted({name.split('.')[0] for name in sys.modules}))"
    assert not {*HEAVY, "onnxruntime", "tokenizers", "jinja2", "scipy"} & set(run_python(code).split())


def test_importing_the_runtime_takes_less_than_300_ms() -> None:
    code = "import time; t = time.process_time(); import eagle_runtime; print(time.process_time() - t)"
    assert min(float(run_python(code)) for _ in range(5)) < 0.3


def test_public_names() -> None:
    assert eagle_runtime.__all__ == [
        "BackendError",
        "BundleError",
        "EagleError",
        "EagleModel",
        "Piece",
        "RequestError",
        "Result",
        "SamplingParams",
        "Stats",
    ]
