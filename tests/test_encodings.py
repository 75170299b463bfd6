"""The product reads and writes text as UTF-8, files and pipes alike: left to itself Python takes Windows' code page."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("runtime", "calib", "export", "train", "tools", "kernels", "examples", "studies")


def unsaid(tree: ast.AST) -> Iterator[int]:
    """Lines of calls that read or write text without `encoding`."""
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call) or {"encoding", "fileobj"} & (given := {word.arg for word in node.keywords}):
            continue
        method = isinstance(node.func, ast.Attribute)
        name = node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
        arguments = [*node.args, *(word.value for word in node.keywords if word.arg == "mode")]
        words = [one.value for one in arguments if isinstance(one, ast.Constant) and isinstance(one.value, str)]
        modes = [word for word in words if word and set(word) <= set("rwxabt+")]
        if name == "read_text":  # a distribution's takes a name
            wrong = not arguments
        elif name == "write_text":
            wrong = method
        elif name == "open":  # with an argument that is no mode, a method is no path's
            wrong = (not arguments or bool(modes)) if method else True
            wrong = wrong and not any("b" in mode for mode in modes)
        elif name in ("TemporaryFile", "NamedTemporaryFile", "fdopen"):
            wrong = any("b" not in mode for mode in modes)
        else:
            wrong = name in ("run", "Popen", "check_output") and bool(given & {"text", "universal_newlines"})
        if wrong:
            yield node.lineno


def test_text_has_a_known_encoding() -> None:
    files = [path for folder in FOLDERS for path in sorted((ROOT / folder).rglob("*.py"))]
    assert len(files) > 300
    trees = {path: ast.parse(path.read_text(encoding="utf-8")) for path in files}
    found = [f"{path.relative_to(ROOT).as_posix()}:{line}" for path, tree in trees.items() for line in unsaid(tree)]
    assert not found, "say encoding="


def test_such_calls_are_found() -> None:
    wrong = """
path.read_text()
path.write_text(text)
path.open()
path.open("w")
open(path)
open(path, mode="a")
os.fdopen(number, "w")
tempfile.NamedTemporaryFile("w", dir=folder)
subprocess.run(command, text=True)
"""
    right = """
path.read_text(encoding="utf-8")
path.open("rb")
path.open("w", encoding="ascii")
open(path, "wb")
os.open(path, os.O_RDONLY)
tarfile.open(fileobj=packed)
tempfile.TemporaryFile(dir=folder)
distribution.read_text("METADATA")
write_text(path, text)
subprocess.run(command, encoding="utf-8")
"""
    assert sorted(unsaid(ast.parse(wrong))) == list(range(2, wrong.count("\n") + 1))
    assert not list(unsaid(ast.parse(right)))
