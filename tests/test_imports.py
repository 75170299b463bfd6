"""Imports point one way, the runtime stays free of the exporter's libraries, and importing it is quick."""

from __future__ import annotations

import ast
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

import pytest

import eagle_runtime

ROOT = Path(__file__).resolve().parents[1]
# Folder and package of each part, lowest first: a part may import itself and what stands before it.
PARTS = {name: f"eagle_{name}" for name in ("runtime", "calib", "export", "train", "tools")}
SERVE = "runtime/eagle_serve"  # a package of its own: nothing else imports it, and of the runtime it imports only
# the public names, what all commands share, and the names of drafting methods and of formats of calls
FORMATS = "eagle_runtime.text.call_formats"
SHARED = {"eagle_runtime.commands.command", "eagle_runtime.app.turn"}
OPEN = {"eagle_runtime", *SHARED, "eagle_runtime.drafting.methods", FORMATS}
LEAN = ("runtime", "calib")  # installed without the exporter's libraries
HEAVY = {"torch", "transformers", "onnx", "onnxscript", "onnx_ir"}
BASE = {"numpy", "tokenizers", "jinja2", "safetensors"}  # what the distribution requires whatever its extras
# Of the lean parts: what their jobs bring.
EXTRAS = {"runtime": {"llguidance", "shtab", "huggingface_hub"}, "calib": {"onnx", "rich", "filelock"}}
OF_SERVE = {"starlette", "uvicorn", "h11"}
HOOKS = "runtime/eagle_runtime/_pyinstaller/"  # files that PyInstaller runs, and nothing imports
ENGINES = {  # engine library -> the one file that imports it
    "onnxruntime": "runtime/eagle_runtime/ort/library.py",
    "eagle_edge_kernels": "runtime/eagle_runtime/machine/kernels.py",
    "tensorrt_rtx": "runtime/eagle_runtime/trt/library.py",
    "tensorrt": "runtime/eagle_runtime/trt/library.py",
    "cuda": "runtime/eagle_runtime/trt/driver.py",
}
PACKAGE, NAMES = 1.3, 5.0  # most processor time of the import, in times of importing NumPy


def imported(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """(line, dotted name) of every import wherever it stands, import_module("...") and __import__("...") included.

    Relative imports stay inside their package and are left out."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.level == 0:
            yield node.lineno, str(node.module)
        elif isinstance(node, ast.Call) and node.args:
            function = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            name = node.args[0].value if isinstance(node.args[0], ast.Constant) else None
            if function in ("import_module", "__import__") and isinstance(name, str):
                yield node.lineno, name


def violations(root: Path) -> list[str]:
    """Imports below `root` that break a rule, as "file:line imports name"."""
    names = list(PARTS)
    above = {name: {PARTS[other] for other in names[index + 1 :]} for index, name in enumerate(names)}
    known = {*sys.stdlib_module_names, *BASE, *ENGINES, *PARTS.values()}  # to the lean parts
    violating = []
    for part in names:
        for path in sorted((root / part).rglob("*.py")):
            where = path.relative_to(root).as_posix()
            own = OF_SERVE | {"eagle_serve"} if where.startswith(f"{SERVE}/") else set()
            own |= {"PyInstaller"} if where.startswith(HOOKS) else set()
            for line, name in imported(ast.parse(path.read_text(encoding="utf-8"))):
                top = name.split(".")[0]
                wrong = top in above[part] or ENGINES.get(top, where) != where or (top == "eagle_serve" and not own)
                wrong = wrong or (where.startswith(f"{SERVE}/") and top == "eagle_runtime" and name not in OPEN)
                if wrong or (part in LEAN and top not in known | EXTRAS[part] | own):
                    violating.append(f"{where}:{line} imports {name}")
    return violating


def in_new_process(code: str) -> Mapping[str, object]:
    """Run code that prints one JSON object."""
    env = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, check=True)
    result: dict[str, object] = json.loads(done.stdout)
    return result


def test_imports_point_one_way() -> None:
    files = [path for part in PARTS for path in (ROOT / part).rglob("*.py")]
    assert len(files) > 30 and all((ROOT / part / package).is_dir() for part, package in PARTS.items())
    assert violations(ROOT) == []


@pytest.fixture
def house(tmp_path: Path) -> Path:
    """A small tree in which every allowed arrow is drawn."""
    allowed = [f"import {package}" for package in PARTS.values()]
    for index, (part, package) in enumerate(PARTS.items()):
        (tmp_path / part / package / "ort").mkdir(parents=True)
        text = ["import json", "import numpy as np", "from . import sibling", *allowed[: index + 1]]
        text += [] if part in LEAN else ["import torch"]
        (tmp_path / part / package / "__init__.py").write_text("\n".join(text))
    (tmp_path / ENGINES["onnxruntime"]).write_text(
        "try:\n    import onnxruntime as ort\nexcept ImportError:\n    raise\n"
    )
    (tmp_path / "tools" / "script.py").write_text("from eagle_train import trainer\n")
    return tmp_path


@pytest.mark.parametrize(
    ("file", "text", "line"),
    [
        ("runtime/eagle_runtime/a.py", "import eagle_export", 1),
        ("runtime/eagle_runtime/a.py", "import eagle_serve", 1),
        ("runtime/eagle_runtime/a.py", "import starlette", 1),
        ("runtime/eagle_serve/a.py", "from eagle_runtime.sampling.sampler import Sampler", 1),
        ("runtime/eagle_serve/a.py", "import numpy, torch", 1),
        ("tools/eagle_tools/a.py", "from eagle_serve import serving", 1),
        ("runtime/eagle_runtime/a.py", "from eagle_calib.texts import joined", 1),
        ("runtime/eagle_runtime/deep/er/a.py", "import json, torch.nn as nn", 1),
        ("runtime/eagle_runtime/a.py", "def lazy():\n    from transformers import AutoTokenizer", 2),
        ("runtime/eagle_runtime/a.py", "if TYPE_CHECKING:\n    import onnx", 2),
        ("runtime/eagle_runtime/a.py", "import importlib\nimportlib.import_module('onnx_ir')", 2),
        ("runtime/eagle_runtime/a.py", "__import__('onnxscript')", 1),
        ("runtime/eagle_runtime/a.py", "import onnxruntime", 1),
        ("runtime/eagle_runtime/ort/other.py", "from onnxruntime import InferenceSession", 1),
        ("runtime/eagle_runtime/ort/other.py", "from cuda.bindings import runtime", 1),
        ("runtime/eagle_runtime/a.py", "import rich", 1),
        ("calib/eagle_calib/a.py", "import torch", 1),
        ("calib/eagle_calib/a.py", "import onnxruntime", 1),
        ("calib/eagle_calib/a.py", "import onnx_ir", 1),
        ("calib/eagle_calib/a.py", "import eagle_export.bundle", 1),
        ("export/eagle_export/a.py", "import eagle_train", 1),
        ("export/eagle_export/a.py", "try:\n    pass\nfinally:\n    import eagle_tools.bench", 4),
        ("export/eagle_export/a.py", "import onnxruntime", 1),
        ("export/eagle_export/a.py", "import tensorrt_rtx as trt", 1),
        ("tools/doctor.py", "import onnxruntime", 1),
        ("train/eagle_train/a.py", "from eagle_tools import bench", 1),
    ],
)
def test_a_planted_violation_is_found(house: Path, file: str, text: str, line: int) -> None:
    assert violations(house) == []
    (house / file).parent.mkdir(exist_ok=True, parents=True)
    (house / file).write_text(text)
    violating = violations(house)
    assert len(violating) == 1 and violating[0].startswith(f"{file}:{line} imports ")


def test_importing_the_runtime_is_light() -> None:
    code = "import json, sys; {}; print(json.dumps({{'modules': sorted(sys.modules)}}))"
    package = set(in_new_process(code.format("import eagle_runtime"))["modules"])  # type: ignore[call-overload]
    model = set(in_new_process(code.format("from eagle_runtime import *"))["modules"])  # type: ignore[call-overload]
    assert not model & (HEAVY | set(ENGINES) | {"tokenizers", "jinja2"}) and "numpy" in model
    assert "numpy" not in package and {name for name in package if name.startswith("eagle")} == {"eagle_runtime"}


def test_importing_the_runtime_is_quick() -> None:
    """Compared with NumPy, which a program that decodes imports anyway: processor time of whole processes, in turns."""
    times: dict[str, list[float]] = {"import numpy": [], "import eagle_runtime": [], "from eagle_runtime import *": []}
    for _ in range(5):
        for statement, taken in times.items():
            code = f"import json, time; {statement}; print(json.dumps({{'seconds': time.process_time()}}))"
            taken.append(float(str(in_new_process(code)["seconds"])))
    numpy, package, names = (statistics.median(taken) for taken in times.values())
    assert package < PACKAGE * numpy and names < NAMES * numpy, times


def test_every_public_name_is_imported_from_where_it_is_defined() -> None:
    """The table that is used at run time equals the imports that type checkers read."""
    tree = ast.parse(Path(str(eagle_runtime.__file__)).read_text(encoding="utf-8"))
    (block,) = (node for node in tree.body if isinstance(node, ast.If))
    read = {
        alias.name: str(node.module).removeprefix("eagle_runtime.")
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert read == eagle_runtime._MODULES and sorted(read) == eagle_runtime.__all__
    assert set(eagle_runtime.__all__) <= set(dir(eagle_runtime))
    with pytest.raises(AttributeError, match="module 'eagle_runtime' has no attribute 'EagelModel'"):
        eagle_runtime.EagelModel  # noqa: B018


def test_the_command_lines_wait_with_heavy_imports() -> None:
    """So that a wrong argument is reported at once."""
    code = (
        "import json, sys, eagle_runtime.commands.cli, eagle_calib.cli, eagle_export.commands.cli; "
        "print(json.dumps({'modules': sorted(sys.modules)}))"
    )
    modules = set(in_new_process(code)["modules"])  # type: ignore[call-overload]
    assert not modules & (HEAVY | set(ENGINES) | {"safetensors", "rich"})


def test_measuring_a_bundle_takes_nothing_of_an_export() -> None:
    code = (
        "import json, sys, eagle_tools.bench.run, eagle_tools.precision.cli, eagle_tools.doctor; "
        "print(json.dumps({'modules': sorted(sys.modules)}))"
    )
    assert not set(in_new_process(code)["modules"]) & HEAVY  # type: ignore[call-overload]


def test_the_server_is_imported_when_it_runs() -> None:
    """So that a wrong argument is reported at once, and without the extra."""
    code = "import json, sys, eagle_serve.cli; print(json.dumps({'modules': sorted(sys.modules)}))"
    modules = set(in_new_process(code)["modules"])  # type: ignore[call-overload]
    assert not modules & (HEAVY | set(ENGINES) | OF_SERVE)


def test_reading_a_calibration_takes_numpy_only() -> None:
    code = "import json, sys, eagle_calib.calibration; print(json.dumps({'modules': sorted(sys.modules)}))"
    modules = set(in_new_process(code)["modules"])  # type: ignore[call-overload]
    assert "numpy" in modules and not modules & (HEAVY | set(ENGINES) | {"tokenizers", "jinja2", "rich"})


def test_the_model_shows_what_applications_use() -> None:
    """Engines, caches and turns are behind `_turns`, which other modules get from `Turns` and not from the model."""
    shown = {name for name in dir(eagle_runtime.EagleModel) if not name.startswith("_")}
    facts = {"manifest", "text", "context", "threads", "backend", "passed_over", "notice", "row_check", "head"}
    facts |= {"default_method", "has_twins", "joins_texts"}
    answers = {"generate", "stream", "batch", "grant", "check", "score", "conversation", "load_conversation", "twin"}
    texts = {"encode", "decode", "count_tokens", "chat_prompt", "fitting"}
    assert shown == facts | answers | texts | {"load", "close", "costs", "memory", "counters"}
    users = [
        path
        for part in ("runtime", "calib", "export", "train", "tools", "studies")
        for path in ROOT.glob(f"{part}/**/*.py")
    ]
    assert not [path for path in users if re.search(r"(?<!self)\._turns\b", path.read_text(encoding="utf-8"))]


def test_the_public_names_are_these() -> None:
    """A name added or gone is a decision, not an accident."""
    assert eagle_runtime.__all__ == [
        "AnswerForm",
        "BackendError",
        "BundleError",
        "BusyError",
        "ChatPrompt",
        "ClosedError",
        "Constraint",
        "ConstraintError",
        "ContextError",
        "Conversation",
        "ConversationFileError",
        "Cycle",
        "Drafter",
        "DynamicTree",
        "EagleError",
        "EagleModel",
        "EagleWarning",
        "FidelityWarning",
        "Memory",
        "MemoryLimitError",
        "Part",
        "Piece",
        "RequestError",
        "Result",
        "SamplingParams",
        "Settings",
        "StaticTree",
        "Stop",
        "TemplateError",
        "Token",
        "ToolUse",
        "Tree",
        "TreeShape",
        "Turn",
        "Usage",
        "Wish",
    ]
    assert all(hasattr(eagle_runtime, name) for name in eagle_runtime.__all__)
