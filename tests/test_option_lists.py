"""An option that takes a list has one spelling: names and numbers with commas, and the option again where a value, as a
path or a text, may hold commas itself. Paths may also come several at once, as a shell's pattern gives them."""

from __future__ import annotations

import argparse
import ast
from pathlib import Path
from typing import NamedTuple

import pytest

from eagle_runtime.commands.command import Listed, Parser

ROOT = Path(__file__).resolve().parents[1]
PARTS = ("runtime", "calib", "export", "train", "tools", "studies", "kernels")
# Took separate arguments before, and take them still, beside the one spelling.
OLDER = {"--allowed-hosts", "--allowed-origins", "--compute-capability", "--temperature"}


class Taken(NamedTuple):
    """What a call says of an option that takes a list."""

    option: str
    nargs: str | None
    action: str | None
    type: str | None


def lists(source: str) -> list[Taken]:
    """The options of a source text that take a list."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not (isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.args):
            continue
        option = next(
            (a.value for a in node.args if isinstance(a, ast.Constant) and str(a.value).startswith("--")), None
        )
        if node.func.attr not in ("add_argument", "add") or not isinstance(option, str):
            continue
        given = {keyword.arg: ast.unparse(keyword.value).strip("'") for keyword in node.keywords}
        taken = Taken(option, given.get("nargs"), given.get("action"), given.get("type"))
        if taken.nargs in ("+", "*") or taken.action in ("append", "extend", "Listed"):
            found.append(taken)
    return found


def wrong(source: str) -> list[str]:
    """Options of a source text that take a list in another spelling."""
    return [one.option for one in lists(source) if not _fine(one)]


def _fine(one: Taken) -> bool:
    if one.action == "extend":
        return one.type == "Path"
    return one.action in ("append", "Listed") and (one.nargs is None or one.option in OLDER)


def test_all_options_take_lists_in_one_spelling() -> None:
    sources = {path: path.read_text("utf-8") for part in PARTS for path in (ROOT / part).rglob("*.py")}
    found = {one.option for source in sources.values() for one in lists(source)}
    assert {"--methods", "--prompts", "--stop", "--data", "--peer-formats", *OLDER} <= found
    assert {path.relative_to(ROOT).as_posix(): bad for path, text in sources.items() if (bad := wrong(text))} == {}
    splitting = [path for path, text in sources.items() if "argparse" in text and 'split(",")' in text]
    assert [path.relative_to(ROOT).as_posix() for path in splitting] == ["runtime/eagle_runtime/commands/command.py"]


@pytest.mark.parametrize(
    ("call", "fine"),
    [
        ('p.add_argument("--pairs", action=Listed)', True),
        ('p.add_argument("--stop", action="append")', True),
        ('p.add_argument("-p", "--pairs", nargs="+")', False),
        ('p.add_argument("--pairs", action=Listed, nargs="+")', False),
        ('job.add("--pairs", "meaning", nargs="*")', False),
        ('p.add_argument("--data", type=Path, action="extend", nargs="+")', True),
        ('p.add_argument("--data", type=Path, nargs="+")', False),
        ('p.add_argument("--names", action="extend", nargs="+")', False),
    ],
)
def test_another_spelling_is_found(call: str, fine: bool) -> None:
    assert (wrong(call) == []) == fine and len(lists(call)) == 1


def test_a_list_and_what_is_none(capsys: pytest.CaptureFixture[str]) -> None:
    parser = Parser(prog="program")
    parser.add_argument("folder")
    parser.add_argument("--rows", action=Listed, of=int, metavar="1,2")
    parser.add_argument("--pairs", action=Listed, among=("demo", "grown"), default=["demo"])
    parser.add_argument("--hosts", action=Listed, nargs="+")
    assert parser.parse_args(["--rows", "4,8", "here"]) == argparse.Namespace(
        folder="here", rows=[4, 8], pairs=["demo"], hosts=None
    )
    assert parser.parse_args(["here", "--pairs", "grown,demo", "--hosts", "a", "b,c"]) == argparse.Namespace(
        folder="here", rows=None, pairs=["grown", "demo"], hosts=["a", "b", "c"]
    )
    for arguments, said in (
        (["--rows", "4,x"], "argument --rows: '4,x' is not a list like 1,2"),
        (["--pairs", "demo,big"], "argument --pairs: 'big' is not one of demo, grown; give a list with commas"),
    ):
        with pytest.raises(SystemExit):
            parser.parse_args(["here", *arguments])
        assert said in capsys.readouterr().err
