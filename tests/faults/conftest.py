"""Fixtures of the campaigns; their figures are printed after the tests."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from filelock import FileLock

from conftest import GOLDEN, HEADS
from faults.tally import Tally

FIGURES = "figures"
SHOWN = 20  # failures of a campaign


@pytest.fixture
def tally(request: pytest.FixtureRequest, record_property: Callable[[str, object], None]) -> Iterator[Tally]:
    """Of this test; it fails if a case ended as none may."""
    counted = Tally(request.node.name.removeprefix("test_").replace("_", " "))
    yield counted
    record_property(FIGURES, counted.line)
    if counted.wrong:
        pytest.fail("\n".join([counted.line, *counted.wrong[:SHOWN]]), pytrace=False)


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """Folders of the golden target with a tokenizer, a token being a byte, and of its EAGLE-3 head."""
    target = Path(shutil.copytree(GOLDEN / "target", tmp_path_factory.mktemp("pair") / "target"))
    shutil.copy(GOLDEN / "byte_tokenizer.json", target / "tokenizer.json")
    return target, GOLDEN / HEADS["eagle3"]


@pytest.fixture(scope="session")
def text_bundle(pair: tuple[Path, Path], shared: Path) -> Callable[[str], Path]:
    """precision -> bundle of the pair, with a certificate if it is of fp32."""

    def bundle(precision: str) -> Path:
        folder = shared / f"text_bundle_{precision}"
        with FileLock(f"{folder}.lock"):
            if not folder.exists():
                from eagle_export.bundle import export
                from eagle_export.writing.settings import Settings

                export(*pair, folder, Settings(precision=precision, certify=precision == "fp32"))
        return folder

    return bundle


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    """One line of figures per campaign."""
    lines = {
        str(value)
        for reports in terminalreporter.stats.values()
        for report in reports
        for name, value in getattr(report, "user_properties", ())
        if name == FIGURES
    }
    for line in sorted(lines):
        terminalreporter.write_line(line)
