"""The import graph: how it is read from source, and what must hold of this project's."""

from __future__ import annotations

import ast
import subprocess
from pathlib import Path
from xml.etree import ElementTree

import pytest

import import_graph
from import_graph import (
    FLOORS,
    ImportGraph,
    cycles,
    imported_modules,
    levels,
    module_name,
    read_graph,
    summary,
    svg,
    upward,
    upward_in,
)

ROOT = Path(__file__).resolve().parents[2]
# Of the runtime and of the exporter each. More of either means that a change went through the corridors.
MOST_ROOMS, MOST_ARROWS = 14, 60


@pytest.fixture(scope="module")
def graph() -> ImportGraph:
    """Of this project."""
    return read_graph(ROOT)


def test_no_cycles(graph: ImportGraph) -> None:
    assert cycles(graph.arrows) == []


@pytest.mark.parametrize("package", FLOORS)
def test_rooms_are_few_and_stand_on_floors(package: str, graph: ImportGraph) -> None:
    part = graph.within(package)
    rooms = part.rooms()
    assert len(set(part.room_of().values())) <= MOST_ROOMS
    assert 20 < len(rooms) <= MOST_ARROWS
    assert upward_in(graph, package) == [] and cycles(rooms) == []


def test_the_core_knows_no_drafter_no_engine_and_no_application(graph: ImportGraph) -> None:
    below = {target for source, target in graph.within("eagle_runtime").rooms() if source == "core"}
    assert below == {"base", "bundle", "sampling"}


def test_an_arrow_to_a_higher_room_is_found() -> None:
    modules = {"eagle_runtime.core.accept": 9, "eagle_runtime.drafting.head": 9, "eagle_runtime.base.tree": 9}
    arrows = {("eagle_runtime.core.accept", "eagle_runtime.drafting.head")}
    down = ("eagle_runtime.drafting.head", "eagle_runtime.base.tree")
    assert upward_in(ImportGraph(modules, frozenset({*arrows, down})), "eagle_runtime") == list(arrows)
    with pytest.raises(ValueError, match="eagle_runtime has rooms without a floor: cellar; add them to FLOORS"):
        upward_in(ImportGraph({"eagle_runtime.cellar.wine": 1}, frozenset()), "eagle_runtime")


def test_nothing_points_upwards(graph: ImportGraph) -> None:
    assert len(graph.arrows) > 300
    assert upward(graph.arrows) == []


def test_names_of_modules_and_rooms() -> None:
    assert module_name(Path("/eagle_x.d/runtime/eagle_runtime/ort/cuda.py")) == "eagle_runtime.ort.cuda"
    assert module_name(Path("runtime/eagle_runtime/__init__.py")) == "eagle_runtime"
    rooms = {
        "eagle_runtime": "eagle_runtime",
        "eagle_runtime.loose": "eagle_runtime",
        "eagle_runtime.ort.cuda": "ort",
        "eagle_runtime.ort.deep": "ort.deep",
        "eagle_runtime.ort.deep.down": "ort.deep",
        "eagle_export.reading": "reading",
        "eagle_export.reading.gguf.file": "reading.gguf",
        "eagle_export.reading.hub": "reading",
        "eagle_calib.replay": "eagle_calib",
    }
    assert ImportGraph(dict.fromkeys(rooms, 1), frozenset()).room_of() == rooms


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


def test_the_picture_has_every_room(graph: ImportGraph, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert import_graph.main(["-o", str(tmp_path / "graph.svg")]) == 0
    text = (tmp_path / "graph.svg").read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    runtime = graph.within("eagle_runtime")
    assert all(f">{room}" in text or room == "eagle_runtime" for room in runtime.room_of().values())
    assert text == svg(graph, "imports of eagle_runtime, today")
    assert capsys.readouterr().out.strip() == summary(graph)


def test_an_earlier_commit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if subprocess.run(
        ["git", "rev-parse", "-q", "--verify", "HEAD^{commit}"], cwd=ROOT, capture_output=True
    ).returncode:
        pytest.skip("not a clone")
    assert import_graph.main(["--revision", "HEAD", "-o", str(tmp_path / "graph.svg")]) == 0
    assert "eagle_runtime" in capsys.readouterr().out
