"""The import graph: how it is read from source, and what must hold of this project's."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

import import_graph
from import_graph import cycles, imported_modules, levels, module_name, read_graph, room_of, summary, svg, upward

ROOT = Path(__file__).resolve().parents[2]
GRAPH = read_graph(ROOT)
MOST_LINES = 350  # of a file of the runtime
MOST_LINES_ELSEWHERE = 400  # of other sources; tests may be longer
# Of all files of the runtime together: as of 02fa2d8, and 29 for int8 caches, 73 for huge pages and stops, 120 for
# texts that go on, 3,600 for what applications need: turns, conversations and their files, constraints, the worker, the
# chat command.
RUNTIME_LINES = 17000


def test_no_cycles() -> None:
    assert cycles(GRAPH.arrows) == []
    assert cycles(GRAPH.within("eagle_runtime").rooms()) == []


def test_nothing_points_upwards() -> None:
    assert len(GRAPH.arrows) > 300
    assert upward(GRAPH.arrows) == []


def test_files_are_short() -> None:
    long = set()
    for part in import_graph.PARTS:
        for path in (ROOT / part).rglob("*.py"):
            if len(path.read_text(encoding="utf-8").splitlines()) > (
                MOST_LINES if part == "runtime" else MOST_LINES_ELSEWHERE
            ):
                long.add(path.relative_to(ROOT).as_posix())
    assert long == set()


def test_the_runtime_does_not_grow() -> None:
    assert sum(GRAPH.within("eagle_runtime").modules.values()) <= RUNTIME_LINES


def test_names_of_modules_and_rooms() -> None:
    assert module_name(Path("/eagle_x.d/runtime/eagle_runtime/session/ort/cuda.py")) == "eagle_runtime.session.ort.cuda"
    assert module_name(Path("runtime/eagle_runtime/__init__.py")) == "eagle_runtime"
    assert room_of("eagle_runtime.session.ort.cuda") == "session"
    assert room_of("eagle_runtime.tree") == "tree"
    assert room_of("eagle_runtime") == "eagle_runtime"
    assert room_of("eagle_export.heads.layers") == "eagle_export"


def test_imports_count_once_and_wherever_they_stand() -> None:
    known = {"a", "a.b", "a.b.c", "d"}
    source = (
        "import a.b, json\nfrom a import b\nfrom a.b import c, other\ndef f():\n    from d import x\n    import numpy\n"
    )
    assert imported_modules(ast.parse(source), known) == {"a.b", "a.b.c", "d"}


def test_cycles_and_levels() -> None:
    arrows = {("a", "b"), ("b", "c"), ("c", "b"), ("a", "d"), ("c", "d")}
    assert cycles(arrows) == [["b", "c"]]
    assert levels("abcde", arrows) == {"a": 2, "b": 1, "c": 1, "d": 0, "e": 0}


def test_upward_arrows() -> None:
    arrows = {("eagle_calib.a", "eagle_runtime.b"), ("eagle_runtime.b", "eagle_tools.c")}
    assert upward(arrows) == [("eagle_runtime.b", "eagle_tools.c")]


def test_the_picture_has_every_room(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_graph.main(["-o", str(tmp_path / "graph.svg")]) == 0
    text = (tmp_path / "graph.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    runtime = GRAPH.within("eagle_runtime")
    assert all(f">{room}" in text or room == "eagle_runtime" for room in map(room_of, runtime.modules))
    assert text == svg(GRAPH, "imports of eagle_runtime, today")
    assert capsys.readouterr().out.strip() == summary(GRAPH)


def test_an_earlier_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if subprocess.run(
        ["git", "rev-parse", "-q", "--verify", "HEAD^{commit}"], cwd=ROOT, capture_output=True
    ).returncode:
        pytest.skip("not a clone")
    assert import_graph.main(["--revision", "HEAD", "-o", str(tmp_path / "graph.svg")]) == 0
    assert "eagle_runtime" in capsys.readouterr().out
