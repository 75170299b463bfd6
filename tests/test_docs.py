"""The README, the pages for users in docs/ and those for maintainers in docs/dev/: their examples run as printed, their
links and file names lead somewhere.

Examples are fenced blocks, run from a folder as `make demo` leaves it, in the order of the page:
- ```console: lines that begin with `$ ` are commands, the lines below each are its standard output;
- ```python with `>>>`: a session; names live to the end of the page;
- ```python that begins with `# NAME.py`: a file, for commands below it; any other ```python must compile.
In output, `...` stands for any text."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import doctest
import functools
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from eagle_calib import cli as calib_cli
from eagle_export.commands import cli as export_cli
from eagle_runtime.commands import chat
from eagle_runtime.commands import cli as run_cli
from eagle_runtime.drafting.methods import METHODS
from eagle_serve import cli as serve_cli
from eagle_tools import doctor, toy_demo
from eagle_tools.bench import cli as bench_cli
from eagle_tools.grow.shape import Shape
from eagle_tools.precision import cli as precision_cli
from eagle_train import cli as train_cli
from method_table import PAGE, table

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
DOCS = sorted((ROOT / "docs").glob("*.md"))  # for users
DEV = sorted((ROOT / "docs" / "dev").glob("*.md"))  # for maintainers
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *DOCS, *DEV]
OTHERS = [ROOT / "CHANGELOG.md", *(ROOT / "tools").glob("*/README.md")]
LINKED = [*PAGES, *OTHERS]
COMMANDS = {
    "eagle-export": export_cli.main,
    "eagle-run": run_cli.main,
    "eagle-chat": chat.main,
    "eagle-calib": calib_cli.main,
    "eagle-doctor": doctor.main,
    "eagle-bench": bench_cli.main,
    "eagle-precision": precision_cli.main,
    "eagle-train": train_cli.main,
    "eagle-serve": serve_cli.main,
}
PACKAGES = [
    "runtime/eagle_runtime",
    "calib/eagle_calib",
    "export/eagle_export",
    "train/eagle_train",
    "tools/eagle_tools",
    "runtime/eagle_serve",
]
# Pages whose examples train, calibrate or certify for half a minute and more: pytest -m slow tests/test_docs.py
LONG = {
    "docs/precision.md",
    "docs/training.md",
}
OPENING = 25  # lines of a page by which its first example begins
# Where a package index shows the README, nothing lies next to it.
HOSTS = (
    "https://github.com/eagle-edge/eagle-edge/blob/main/",
    "https://raw.githubusercontent.com/eagle-edge/eagle-edge/main/",
)


def name_of(page: Path) -> str:
    """The page's path in the project."""
    return page.relative_to(ROOT).as_posix()


def blocks(page: Path) -> Iterator[tuple[int, str, str]]:
    """(line, language, content) of a page's fenced blocks."""
    text = page.read_text(encoding="utf-8")
    for block in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.S | re.M):
        yield text.count("\n", 0, block.start()) + 1, block[1], block[2]


def has_example(language: str, content: str) -> bool:
    """Whether a block is one that a test runs."""
    return (language == "console" and "$ " in content) or (language == "python" and ">>> " in content)


def commands(block: str) -> list[tuple[str, str]]:
    """(command, output) of a console block; a backslash continues a command on the next line."""
    block = block.replace("\\\n", " ")
    return re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M)


@pytest.fixture(scope="session")
def demo_bundles(shared: Path) -> Path:
    """The folder .demo as `make demo` leaves it, made by the first worker that asks."""
    folder = shared / ".demo"
    with FileLock(f"{folder}.lock"):
        if not folder.exists():
            assert toy_demo.main(folder, 1) == 0
    return folder


@pytest.fixture
def workplace(demo_bundles: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder that examples run in."""
    (tmp_path / "tools").symlink_to(ROOT / "tools")
    (tmp_path / "docs").symlink_to(ROOT / "docs")
    (tmp_path / ".demo").symlink_to(demo_bundles)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def output_of(command: str) -> str:
    """Standard output of a command, which must succeed: in this process where it is the project's own."""
    program, *arguments = shlex.split(command)
    if program in COMMANDS:
        out = io.StringIO()
        with contextlib.redirect_stdout(out):
            assert COMMANDS[program](arguments) == 0, command
        return out.getvalue()
    path = os.pathsep.join([str(ROOT / package.split("/")[0]) for package in PACKAGES])
    program = sys.executable if program == "python" else program
    done = subprocess.run([program, *arguments], capture_output=True, text=True, env={**os.environ, "PYTHONPATH": path})
    assert done.returncode == 0, f"{command}\n{done.stderr}"
    return done.stdout


def run_page(page: Path) -> int:
    """Run the examples of a page; returns how many there were."""
    names: dict[str, object] = {}
    ran = 0
    for line, language, content in blocks(page):
        where = f"{page.name}:{line}"
        if language == "console":
            for command, printed in commands(content):
                shown = output_of(command)
                options = doctest.ELLIPSIS
                same = doctest.OutputChecker().check_output(printed.rstrip() + "\n", shown.rstrip() + "\n", options)
                assert same, f"{where}: {command}\nprinted:\n{printed}\nshown:\n{shown}"
                ran += 1
        elif language == "python" and ">>> " in content:
            test = doctest.DocTestParser().get_doctest(content, names, page.name, str(page), line)
            report = io.StringIO()
            runner = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS)
            failed = runner.run(test, out=report.write, clear_globs=False).failed
            assert failed == 0, f"{where}\n{report.getvalue()}"
            names = test.globs
            ran += len(test.examples)
        elif language == "python":
            compile(content, where, "exec")
            if name := re.match(r"# (\w+\.py)\n", content):
                Path(name[1]).write_text(content, encoding="utf-8")
    return ran


@pytest.mark.parametrize(
    "page",
    [
        pytest.param(page, marks=pytest.mark.slow if name_of(page) in LONG else (), id=name_of(page))
        for page in PAGES
        if any(has_example(*block[1:]) for block in blocks(page))
    ],
)
def test_examples(page: Path, workplace: Path) -> None:
    assert run_page(page) > 0


def test_the_readme_has_commands_and_a_session() -> None:
    of_readme = list(blocks(ROOT / "README.md"))
    assert sum(len(commands(content)) for _, language, content in of_readme if language == "console") >= 2
    assert sum(content.count(">>> ") for _, language, content in of_readme if language == "python") >= 4


def test_pages_open_with_an_example() -> None:
    without = {
        page.name
        for page in DOCS
        if page.name != "index.md"  # it has links alone
        and not any(line <= OPENING and has_example(language, content) for line, language, content in blocks(page))
    }
    assert without == set()


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub gives the headings of a page."""
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.S | re.M)
    seen: dict[str, int] = {}
    for heading in re.findall(r"^#+ (.*)$", text, re.M):
        anchor = re.sub(r"[^\w\- ]", "", re.sub(r"\[([^]]*)\]\([^)]*\)", r"\1", heading).lower()).replace(" ", "-")
        seen[anchor] = seen.get(anchor, -1) + 1
    return {f"{anchor}-{number}" if number else anchor for anchor, most in seen.items() for number in range(most + 1)}


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_links(page: Path) -> None:
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        own = next((link.removeprefix(host) for host in HOSTS if link.startswith(host)), None)
        if own is None and link.startswith("https://"):
            continue
        name, _, anchor = (link if own is None else own).partition("#")
        target = ROOT / name if own is not None else page.parent / name if name else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_a_release_of_the_changelog_fits_a_screen() -> None:
    releases = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8").split("\n## ")[1:]
    lines = [release.splitlines() for release in releases]
    assert lines and max(map(len, lines)) <= 60 and max(len(line) for each in lines for line in each) <= 128


@pytest.mark.parametrize("page", LINKED, ids=name_of)
def test_files_that_are_named_exist(page: Path) -> None:
    """Names in `code` of Python files and scripts, and all that begin with a folder of the project."""
    if page.name == "CHANGELOG.md":
        pytest.skip("tells of files that were moved since")
    folders = [
        ROOT,
        page.parent,
        *(ROOT / package for package in PACKAGES),
        *(ROOT / p.split("/")[0] for p in PACKAGES),
    ]
    own = {name for _, _, content in blocks(page) for name in re.findall(r"\A# (\w+\.py)\n", content)}
    tops = {package.split("/")[0] for package in PACKAGES} | {"tests", "docs"}
    for name in re.findall(r"`([\w.-]+(?:/[\w.-]+)*/?)`", page.read_text(encoding="utf-8")):
        if name not in own and (name.endswith((".py", ".sh")) or ("/" in name and name.split("/")[0] in tops)):
            assert any((folder / name).exists() for folder in folders), name


@pytest.mark.parametrize("drawing", sorted((ROOT / "docs").rglob("*.svg")), ids=lambda path: path.name)
def test_files_in_drawings_exist(drawing: Path) -> None:
    """Names that stand alone in the text of a drawing, below the runtime's package."""
    for name in re.findall(r">([\w/]+(?:\.py|/))<", drawing.read_text(encoding="utf-8")):
        assert (ROOT / "runtime/eagle_runtime" / name).exists(), name


def test_the_table_of_methods_is_that_of_the_code() -> None:
    """Every name and every tree has its row, and the rows are those that `python tools/method_table.py` writes."""
    rows = table().splitlines()[2:]
    assert {row.split("`")[1] for row in rows} == {method.name for method in METHODS}
    assert table() in PAGE.read_text(encoding="utf-8")


def test_the_readme_has_absolute_links() -> None:
    links = re.findall(r"\]\(([^)\s]+)\)", README)
    assert len(links) > 10 and all(link.startswith("https://") for link in links)
    assert not re.search(r"^<(?!BLANKLINE)", README, re.M)  # a package index shows Markdown alone


PROGRAM = re.compile(
    r"(?:\$ )?(?:[\w.]+/bin/)?(eagle-(?:export|run|chat|calib|doctor|bench|precision|train|serve)|"
    r"python3? -m (?:eagle_tools\.|studies\.trials\.|studies )[\w.]+|python3? tools/[\w/]+\.py)(?= |$)"
)
OPTION = re.compile(r"(?<![\w-])(--[a-z][\w-]*|-[a-z])(?![\w-])")
PARSERS: dict[str, Callable[[], argparse.ArgumentParser]] = {
    "eagle-export": export_cli._parser,
    "eagle-run": run_cli._parser,
    "eagle-chat": chat._parser,
    "eagle-calib": calib_cli._parser,
    "eagle-doctor": doctor._parser,
    "eagle-bench": bench_cli._parser,
    "eagle-precision": precision_cli._parser,
    "eagle-train": train_cli._parser,
    "eagle-serve": serve_cli._parser,
}


def shown_commands(text: str) -> Iterator[str]:
    """The commands of the project in the text of a page: lines of blocks, and `code` in sentences."""
    for block in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.S | re.M):
        if block[1] != "python":
            for line in block[2].replace("\\\n", " ").splitlines():
                yield from re.split(r" && | \| |; ", line.split("  #")[0])
    sentences = re.sub(r"^```.*?^```", "", text, flags=re.S | re.M)
    yield from (" ".join(code.split()) for code in re.findall(r"`([^`]+)`", sentences))


@functools.cache
def options_of(program: str, *subcommands: str) -> frozenset[str]:
    """The options that a program's own parser knows; of a script those that its source names."""
    if program in PARSERS:
        parser = PARSERS[program]()
        for action in parser._actions:
            if isinstance(action, argparse._SubParsersAction):
                named = next((word for word in subcommands if word in action.choices), "make")
                return frozenset({*parser._option_string_actions, *action.choices[named]._option_string_actions})
        return frozenset(parser._option_string_actions)
    name = program.split()[-1].removeprefix("studies.")
    folder = "studies" if " studies" in program else "tools"
    place = ROOT / (name if name.endswith(".py") else f"{folder}/{name.replace('.', '/')}")
    sources = [place] if place.suffix else [*place.rglob("*.py"), *place.parent.glob(f"{place.name}.py")]
    sources += (ROOT / "studies").glob("harness.py") if folder == "studies" else []
    known = {option for path in sources for option in re.findall(r'"(--?[a-z][a-z0-9-]*)"', path.read_text("utf-8"))}
    assert sources, program
    return frozenset(known | {"--help"} | {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(Shape)})


def wrong_options(text: str) -> list[str]:
    """Options of the commands in a page that the command's own parser does not know; "`--x` of `eagle-y`" and tables
    with the heading "option of `eagle-y`" count as such commands."""
    found = list(shown_commands(text))
    for names, program in re.findall(r"((?:`--[^`]+`[, and]*)+) of `(eagle-[a-z ]+)`", text):
        found += [f"{program} {name}" for name in re.findall(r"`([^`]+)`", names)]
    for program, rows in re.findall(r"^\|[^|\n]*option of `(eagle-[a-z ]+)`.*\n\|[-|: ]+\n((?:\|.*\n)*)", text, re.M):
        found += [f"{program} {name}" for name in re.findall(r"`(-[^`]+)`", rows)]
    wrong = []
    for shown in found:
        if (match := PROGRAM.match(shown)) is None:
            continue
        own = shown[match.end() :].split(" -- ")[0]
        words = [word for word in own.split() if re.fullmatch(r"[a-z]+", word)][:1]
        wrong += [
            f"{match[1]}: {option}" for option in OPTION.findall(own) if option not in options_of(match[1], *words)
        ]
    return wrong


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_commands_have_the_options_that_a_page_gives_them(page: Path) -> None:
    assert page.name == "CHANGELOG.md" or wrong_options(page.read_text(encoding="utf-8")) == []


def unparsed(text: str) -> list[str]:
    """The commands in the blocks of a page that their own parser refuses: an argument is missing, a list has another
    form."""
    refused = []
    for block in re.finditer(r"^```(\w*)\n(.*?)^```", text, re.S | re.M):
        for line in block[2].replace("\\\n", " ").splitlines() if block[1] != "python" else ():
            if block[1] == "console" and not line.startswith("$ "):
                continue  # output
            for shown in re.split(r" && | \| | > |; ", line.split("  #")[0]):
                if (match := PROGRAM.match(shown)) is None or match[1] not in PARSERS:
                    continue
                words = shlex.split(shown[match.end() :])
                words = export_cli.with_command(words) if match[1] == "eagle-export" else words
                with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
                    try:
                        PARSERS[match[1]]().parse_args(words)
                    except SystemExit as ended:
                        refused += [f"{shown}: {said.getvalue().strip()}"] if ended.code else []
    return refused


@pytest.mark.parametrize("page", [*PAGES, *OTHERS], ids=name_of)
def test_commands_in_blocks_are_complete(page: Path) -> None:
    assert unparsed(page.read_text(encoding="utf-8")) == []


def test_a_command_without_what_it_needs_is_found() -> None:
    text = "```\neagle-export T\neagle-bench B --count two\neagle-run B --prompt x | head\neagle-export inspect\n```\n"
    assert [line.split(":")[0] for line in unparsed(text)] == [
        "eagle-export T",
        "eagle-bench B --count two",
        "eagle-export inspect",
    ]


def test_an_option_of_another_command_is_found() -> None:
    text = """`eagle-run B --seed 0`, (`--top-k`, `--min-agreement` of `eagle-run`), `eagle-export engines B --keep x`

```
.venv/bin/eagle-export T \\
    -o B --top-p 1
python -m eagle_tools.lossless B --runs 2 --keep x   # --top-k
```

| option of `eagle-chat` | |
|---|---|
| `--load FILE` | |
| `--trace FILE` | |
"""
    assert wrong_options(text) == [
        "eagle-export: --top-p",
        "python -m eagle_tools.lossless: --keep",
        "eagle-export: --keep",
        "eagle-run: --min-agreement",
        "eagle-chat: --trace",
    ]
