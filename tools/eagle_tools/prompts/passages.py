"""Open text that is on any machine with this project: Python's standard library, the descriptions and licences of
installed packages, and the project's own pages when it runs from a checkout."""

from __future__ import annotations

import ast
import importlib.metadata
import re
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

SHORTEST, LONGEST = 40, 130  # words of a passage
LINES = (4, 22)  # of a function
SKIPPED = ("test", "tests", "idlelib", "lib2to3", "site-packages", "__pycache__", "turtledemo")


@dataclass(frozen=True, slots=True)
class Function:
    """A function of the standard library. source: without its docstring. summary: its docstring's first line or ""."""

    name: str
    source: str
    summary: str


def functions(root: Path) -> list[Function]:
    """Returns the short functions of a folder of Python modules, in a fixed order."""
    taken = []
    for tree, text in _modules(root):
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef) and (function := _function(node, text)):
                taken.append(function)
    return taken


def prose(root: Path) -> list[str]:
    """Returns passages of English prose in a fixed order: of the docstrings of a folder of Python modules, of installed
    packages, and of the project's pages."""
    texts = [doc for tree, _ in _modules(root) for doc in _docstrings(tree)]
    for package in sorted(importlib.metadata.distributions(), key=lambda each: str(each.metadata["Name"]).lower()):
        texts.append(package.read_text("METADATA") or "")
        licences = [file for file in package.files or () if "licen" in file.name.lower() and file.suffix != ".py"]
        texts += [_read(Path(str(file.locate()))) for file in licences]
    pages = sorted((Path(__file__).resolve().parents[3] / "docs").glob("*.md"))
    texts += [_read(page) for page in pages]
    taken = dict.fromkeys(passage for text in texts for passage in _passages(text))
    return list(taken)


def standard_library() -> Path:
    """Returns the folder of Python's own modules."""
    return Path(sysconfig.get_paths()["stdlib"])


def _modules(root: Path) -> Iterator[tuple[ast.Module, str]]:
    for path in sorted(root.rglob("*.py")):
        if any(part in SKIPPED for part in path.relative_to(root).parts):
            continue
        text = _read(path)
        try:
            yield ast.parse(text), text
        except (SyntaxError, ValueError, RecursionError):
            continue


def _function(node: ast.FunctionDef, text: str) -> Function | None:
    body, doc = node.body, ast.get_docstring(node)
    if doc is not None:
        body = body[1:]
    if not body or node.name.startswith("__") or node.end_lineno is None:
        return None
    lines = text.splitlines()
    head = lines[node.lineno - 1 : node.body[0].lineno - 1]
    if doc is not None and not head:
        return None
    kept = [*head, *lines[body[0].lineno - 1 : node.end_lineno]]
    if not head or not LINES[0] <= len(kept) <= LINES[1] or max(map(len, kept)) > 100:
        return None
    indent = len(kept[0]) - len(kept[0].lstrip())
    source = "\n".join(line[indent:] for line in kept)
    return Function(node.name, source, (doc or "").strip().split("\n")[0])


def _docstrings(tree: ast.Module) -> Iterator[str]:
    for node in ast.walk(tree):
        if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)) and (doc := ast.get_docstring(node)):
            yield doc


def _passages(text: str) -> Iterator[str]:
    """Yields paragraphs, or several in a row, that read as prose."""
    held: list[str] = []
    for paragraph in [*re.split(r"\n\s*\n", text), ""]:
        words = paragraph.split()
        letters = sum(c.isalpha() or c == " " for c in paragraph)
        plain = len(words) > 8 and letters > 0.85 * len(paragraph) and ">>>" not in paragraph and "://" not in paragraph
        if plain and sum(len(each.split()) for each in held) + len(words) <= LONGEST:
            held.append(" ".join(words))
            continue
        if sum(len(each.split()) for each in held) >= SHORTEST:
            yield "\n\n".join(held)
        held = [" ".join(words)] if plain and len(words) <= LONGEST else []


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8", errors="ignore") if path.is_file() else ""
    except OSError:
        return ""
