"""Draw the project's import graph from the code's own imports.

    python tools/import_graph.py -o after.svg
    python tools/import_graph.py --revision 02fa2d8 -o before.svg

Prints how many arrows there are between modules and between rooms, the cycles, and the arrows that point upwards. An
arrow means "imports". A room is a folder of the runtime or of the exporter, at any depth: the top folder is one, and a
folder in a folder is one of its own. Another package is one room as a whole. FLOORS orders them.
"""

from __future__ import annotations

import argparse
import ast
import io
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("runtime", "calib", "export", "train", "tools")  # lowest first: a package may import those before it
RUNTIME = "eagle_runtime"
PACKAGES = (*(f"eagle_{part}" for part in PARTS), "eagle_serve")  # lowest first; nothing imports the last

Arrow = tuple[str, str]  # importing, imported
# Rooms of a package, lowest first: a module imports from its own room and from those before it. The top folder has the
# package's name. What PyInstaller runs stands last.
FLOORS = {
    RUNTIME: (
        "base", "machine", "bundle", "text", "sampling", "core", "ort", "trt", "drafting", "opening", "app", "commands",
        RUNTIME, "_pyinstaller",
    ),
    "eagle_export": (
        "base", "recipes", "reading", "reading.gguf", "reading.families", "heads", "graphs", "recording", "checking",
        "inspection", "tensorrt", "writing", "eagle_export", "commands",
    ),
}  # fmt: skip


@dataclass(frozen=True)
class ImportGraph:
    """modules: dotted name -> lines of its file; a package's __init__ has the package's name. arrows: between modules,
    each once, however often one imports the other."""

    modules: Mapping[str, int]
    arrows: frozenset[Arrow]

    def within(self, package: str) -> ImportGraph:
        """The part of one package."""
        inside = {name: lines for name, lines in self.modules.items() if name.split(".")[0] == package}
        return ImportGraph(inside, frozenset(arrow for arrow in self.arrows if set(arrow) <= set(inside)))

    def rooms(self) -> Counter[Arrow]:
        """Arrows between rooms, with the number of arrows between their modules."""
        room = self.room_of()
        pairs = ((room[source], room[target]) for source, target in self.arrows)
        return Counter(pair for pair in pairs if pair[0] != pair[1])

    def room_of(self) -> Mapping[str, str]:
        """module -> its room, such as "reading.gguf" for eagle_export.reading.gguf.file, and "eagle_calib" for any of
        its modules."""
        folders = {name.rpartition(".")[0] for name in self.modules}
        rooms = {}
        for name in self.modules:
            package, _, path = name.partition(".")
            folder = path if name in folders else path.rpartition(".")[0]
            rooms[name] = (package in FLOORS and folder) or package
        return rooms


def read_graph(root: Path) -> ImportGraph:
    """The import graph of a checkout."""
    paths = (path for part in PARTS for package in PACKAGES for path in (root / part).glob(f"{package}/**/*.py"))
    files = {module_name(path): path for path in paths}
    sources = {name: path.read_text(encoding="utf-8") for name, path in files.items()}
    arrows = {
        (name, imported)
        for name, source in sources.items()
        for imported in imported_modules(ast.parse(source), files.keys())
        if imported != name
    }
    return ImportGraph({name: len(source.splitlines()) for name, source in sources.items()}, frozenset(arrows))


def module_name(path: Path) -> str:
    """runtime/eagle_runtime/core/session.py -> eagle_runtime.core.session."""
    package = max(index for index, name in enumerate(path.parts) if name.startswith("eagle_") and "." not in name)
    names = [*path.parts[package:-1], path.stem]
    return ".".join(names[:-1] if names[-1] == "__init__" else names)


def imported_modules(tree: ast.Module, known: Iterable[str]) -> set[str]:
    """The project's modules that a file imports, wherever the import stands. `from package import name` counts for the
    module package.name if there is one, else for the package."""
    known = set(known)
    imported: set[str] = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            imported.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None and node.level == 0:
            names = {f"{node.module}.{alias.name}" for alias in node.names}
            imported.update(names & known or {node.module})
    return imported & known


def cycles(arrows: Iterable[Arrow]) -> list[list[str]]:
    """Groups of names of which each reaches every other by arrows, sorted."""
    targets: dict[str, set[str]] = {}
    for source, target in arrows:
        targets.setdefault(source, set()).add(target)
        targets.setdefault(target, set())
    reached = {name: _reachable(name, targets) for name in targets}
    groups = {tuple(sorted(other for other in reached[name] if name in reached[other])) for name in targets}
    return sorted(list(group) for group in groups if group)


def _reachable(start: str, targets: Mapping[str, set[str]]) -> set[str]:
    """Names that at least one arrow leads to from `start`."""
    seen: set[str] = set()
    waiting = list(targets[start])
    while waiting:
        name = waiting.pop()
        if name not in seen:
            seen.add(name)
            waiting.extend(targets[name])
    return seen


def upward(arrows: Iterable[Arrow]) -> list[Arrow]:
    """Arrows from a package to a higher one."""
    height = {package: index for index, package in enumerate(PACKAGES)}
    return sorted(arrow for arrow in arrows if height[arrow[0].split(".")[0]] < height[arrow[1].split(".")[0]])


def upward_in(graph: ImportGraph, package: str) -> list[Arrow]:
    """Arrows between modules of a package that lead to a higher room. Raises ValueError for one that FLOORS lacks."""
    part = graph.within(package)
    height = {room: floor for floor, room in enumerate(FLOORS[package])}
    room = part.room_of()
    if unknown := set(room.values()) - height.keys():
        raise ValueError(f"{package} has rooms without a floor: {', '.join(sorted(unknown))}; add them to FLOORS")
    return sorted(arrow for arrow in part.arrows if height[room[arrow[0]]] < height[room[arrow[1]]])


def levels(names: Iterable[str], arrows: Iterable[Arrow]) -> dict[str, int]:
    """Height of each name: 0 if it imports nothing, else one more than the highest that it imports. Names of one cycle
    share a height."""
    arrows = set(arrows)
    group = {name: tuple(names) for names in cycles(arrows) for name in names}
    below: dict[tuple[str, ...], set[tuple[str, ...]]] = {group.get(name, (name,)): set() for name in names}
    for source, target in arrows:
        one, other = group.get(source, (source,)), group.get(target, (target,))
        if one != other:
            below[one].add(other)
    heights: dict[tuple[str, ...], int] = {}
    while len(heights) < len(below):
        for one, others in below.items():
            if one not in heights and others <= heights.keys():
                heights[one] = 1 + max((heights[other] for other in others), default=-1)
    return {name: height for one, height in heights.items() for name in one}


def summary(graph: ImportGraph) -> str:
    """What the picture shows, in words and numbers."""
    runtime = graph.within(RUNTIME)
    packages = Counter((one.split(".")[0], other.split(".")[0]) for one, other in graph.arrows)
    lines = [f"all packages: {len(graph.modules)} modules, {len(graph.arrows)} arrows between modules"]
    for package in FLOORS:
        part = graph.within(package)
        rooms = part.rooms()
        lines += [
            f"{package}: {len(part.modules)} modules of {sum(part.modules.values())} lines, "
            f"{len(part.arrows)} arrows between modules",
            f"{package}: {len(set(part.room_of().values()))} rooms, {len(rooms)} arrows between rooms, "
            f"of {sum(rooms.values())} between their modules",
            f"{package}: cycles of rooms: " + ("; ".join(map(", ".join, cycles(rooms))) or "none"),
        ]
    lines += [
        "between packages: "
        + ", ".join(f"{one} -> {two} {n}" for (one, two), n in sorted(packages.items()) if one != two),
        "cycles of modules: " + ("; ".join(map(", ".join, cycles(graph.arrows))) or "none"),
        "upward arrows: " + ("; ".join(map(" -> ".join, upward(graph.arrows))) or "none"),
    ]
    longest = sorted(runtime.modules.items(), key=lambda item: -item[1])[:3]
    return "\n".join([*lines, "longest modules: " + ", ".join(f"{name} {count}" for name, count in longest)])


# The picture: boxes of rooms in rows by height, importing rooms above imported ones.
WIDTH, BOX, LINE, GAP_X, GAP_Y, MARGIN = 1240, 148, 14, 14, 46, 16


def svg(graph: ImportGraph, title: str) -> str:
    """The runtime's rooms with their modules, and an arrow wherever a room imports another; thicker for more imports,
    red where the two rooms import each other, directly or by way of others."""
    runtime = graph.within(RUNTIME)
    arrows = runtime.rooms()
    modules: dict[str, list[str]] = {}
    for name, room in sorted(runtime.room_of().items()):
        modules.setdefault(room, []).append(name)
    boxes, height = _placed(modules, levels(modules, arrows), arrows)
    red = {name for names in cycles(arrows) for name in names}
    out = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {height}" '
        'font-family="sans-serif" font-size="11">',
        '<defs><marker id="tip" viewBox="0 0 6 6" refX="5" refY="3" markerWidth="5" markerHeight="5" orient="auto" '
        'markerUnits="userSpaceOnUse"><path d="M0 0L6 3L0 6z" fill="#567"/></marker></defs>',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{MARGIN}" y="24" font-size="15" font-weight="bold">{title}</text>',
        f'<text x="{MARGIN}" y="42">{len(runtime.arrows)} arrows between {len(runtime.modules)} modules, '
        f"{len(arrows)} between {len(modules)} rooms (boxes); the number in a box is its lines of code</text>",
    ]
    for (source, target), count in sorted(arrows.items()):
        x, y, _ = boxes[source]
        to_x, to_y, _ = boxes[target]
        y += boxes[source][2]
        bend = max(30.0, (to_y - y) / 2)
        colour = "#c22" if {source, target} <= red else "#567"
        path = f"M{x + BOX / 2:.0f} {y:.0f}C{x + BOX / 2:.0f} {y + bend:.0f} {to_x + BOX / 2:.0f} {to_y - bend:.0f}"
        out.append(
            f'<path d="{path} {to_x + BOX / 2:.0f} {to_y:.0f}" fill="none" stroke="{colour}" stroke-opacity="0.45" '
            f'stroke-width="{min(4.0, 0.6 + 0.3 * count):.1f}" marker-end="url(#tip)"/>'
        )
    for room, (x, y, tall) in boxes.items():
        lines = sum(runtime.modules[name] for name in modules[room])
        names = [name.removeprefix(f"{RUNTIME}.{room}").lstrip(".") for name in modules[room] if name.count(".") > 1]
        fill, label = ("#eef4fb", f"{room}/") if names else ("#fbf7ee", f"{room}.py")
        if room == RUNTIME:
            label = "__init__.py"
        out.append(
            f'<rect x="{x:.0f}" y="{y:.0f}" width="{BOX}" height="{tall:.0f}" rx="4" fill="{fill}" stroke="#345"/>'
            f'<text x="{x + 7:.0f}" y="{y + 14:.0f}" font-weight="bold">{label}'
            f'<tspan font-weight="normal" fill="#777" dx="5">{lines}</tspan></text>'
        )
        for index, name in enumerate(names):
            out.append(f'<text x="{x + 14:.0f}" y="{y + 14 + LINE * (index + 1):.0f}">{name.replace(".", "/")}</text>')
    return "\n".join([*out, "</svg>", ""])


def _placed(
    modules: Mapping[str, Sequence[str]], heights: Mapping[str, int], arrows: Iterable[Arrow]
) -> tuple[dict[str, tuple[float, float, float]], float]:
    """room -> x, y and height of its box, and the height of the picture. Rows run from the highest rooms down; in a row
    each room stands near the mean of the rooms above that import it."""
    importers: dict[str, list[str]] = {name: [] for name in modules}
    for source, target in arrows:
        importers[target].append(source)
    boxes: dict[str, tuple[float, float, float]] = {}
    y = 60.0
    for level in range(max(heights.values()), -1, -1):
        rooms = [room for room in modules if heights[room] == level]
        above = {room: [boxes[one][0] for one in importers[room] if one in boxes] for room in rooms}
        rooms.sort(key=lambda room: sum(above[room]) / len(above[room]) if above[room] else WIDTH / 2)
        columns = (WIDTH - 2 * MARGIN + GAP_X) // (BOX + GAP_X)
        for start in range(0, len(rooms), columns):
            row = rooms[start : start + columns]
            x = (WIDTH - len(row) * (BOX + GAP_X) + GAP_X) / 2
            tall = {room: 20.0 + LINE * sum(name.count(".") > 1 for name in modules[room]) for room in row}
            for room in row:
                boxes[room] = (x, y, tall[room])
                x += BOX + GAP_X
            y += max(tall.values()) + GAP_Y
    return boxes, y


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, metavar="SVG", help="where to draw the runtime's rooms")
    parser.add_argument("--revision", metavar="GITREV", help="a commit, in place of the files as they are")
    args = parser.parse_args(argv)
    if args.revision is None:
        graph = read_graph(ROOT)
    else:
        archive = subprocess.run(["git", "archive", args.revision, *PARTS], cwd=ROOT, capture_output=True, check=True)
        with tempfile.TemporaryDirectory() as folder, tarfile.open(fileobj=io.BytesIO(archive.stdout)) as files:
            files.extractall(folder)
            graph = read_graph(Path(folder))
    print(summary(graph))
    if args.output is not None:
        args.output.write_text(svg(graph, f"imports of {RUNTIME}, {args.revision or 'today'}"), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
