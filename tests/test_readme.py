"""The README's commands and sessions run as printed, and its links lead somewhere."""

from __future__ import annotations

import contextlib
import doctest
import io
import re
import shlex
from pathlib import Path

import pytest

from eagle_calib import cli as calib_cli
from eagle_export import cli as export_cli
from eagle_runtime import cli as run_cli
from eagle_tools import demo, doctor
from eagle_tools.bench import cli as bench_cli

ROOT = Path(__file__).resolve().parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
COMMANDS = {
    "eagle-export": export_cli.main,
    "eagle-run": run_cli.main,
    "eagle-calib": calib_cli.main,
    "eagle-doctor": doctor.main,
}


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as `make demo` leaves it."""
    folder = tmp_path_factory.mktemp("readme")
    (folder / "tools").symlink_to(ROOT / "tools")
    assert demo.main(folder / ".demo") == 0
    return folder


def blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, re.S | re.M)


def test_commands(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    ran = 0
    for block in blocks("console"):
        for command, printed in re.findall(r"^\$ (.*)\n((?:(?!\$ ).*\n)*)", block, re.M):
            program, *arguments = shlex.split(command)
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                assert COMMANDS[program](arguments) == 0, command
            assert out.getvalue().rstrip() == printed.rstrip(), command
            ran += 1
    assert ran >= 2


def test_python_session(workplace: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workplace)
    session = "\n".join(blocks("python"))
    test = doctest.DocTestParser().get_doctest(session, {}, "README", "README.md", 0)
    assert len(test.examples) >= 4
    report = io.StringIO()
    assert doctest.DocTestRunner().run(test, out=report.write).failed == 0, report.getvalue()


def test_links() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    for page in pages:
        for link in re.findall(r"\]\(([^)#]+)\)", page.read_text(encoding="utf-8")):
            assert link.startswith("https://") or (page.parent / link).exists(), f"{page.name}: {link}"


def test_every_option_of_the_readme_exists() -> None:
    known = {
        option
        for cli in (export_cli, run_cli, calib_cli, doctor, bench_cli)
        for option in cli._parser()._option_string_actions
    }
    mentioned = set(re.findall(r"`[^`\n]*?(--[a-z-]+)", README)) | set(re.findall(r" (--[a-z-]+)", README))
    assert mentioned <= known
